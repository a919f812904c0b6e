// The backward's ring in shared memory: how many rows it has under way, how their granules get
// there and, of rows that are not aligned, how they are read.
#pragma once

#include "async.cuh"
#include "row_sums.cuh"
#include "shift.cuh"

namespace fastnorm::cuda {

constexpr int kRingWarps = kMaxRingThreads / kWarpSize;  // of a block

// Rows that are summed before the one that is finished. Sums take longer through device memory than
// a row does: 192 x 1000000 bfloat16 took 362 us on an H200 with one, 328 us with two and 313 us
// with three of six stages. (In clusters two are no better than one.)
template <class X, RingSpan kSpan>
constexpr int kRingAhead = kSpan == RingSpan::kGrid && kIs16Bit<X> ? kGridAhead : 1;

// Rows under way per group, those being summed and finished among them. More are no gain: at 16384
// x 8192 bfloat16 4 gave .92 of an elementwise sum, 3 .91; at 8192 x 16384 both .885, 2 only .71.
template <class X, RingSpan kSpan, class DY = X>
constexpr int kRingStages = sizeof(DY) > sizeof(X)     ? 3
                            : kRingAhead<X, kSpan> > 1 ? 6
                            : kSpan == RingSpan::kWarp ? (sizeof(X) == 2 ? 3 : 2)
                                                       : (sizeof(X) == 2 ? 4 : 3);

// Granules of a tensor of T beside rows of X, in a stage of a warp. An unaligned row reaches into
// one more per team. kTail: a column for each lane behind its chunks.
template <class X, RingSpan kSpan, bool kVectorized, int kChunks, class T = X, bool kTail = false>
constexpr int kRingGranules = kWarpSize * kChunks * static_cast<int>(sizeof(T) / sizeof(X)) +
                              (kVectorized                ? 0
                               : kSpan == RingSpan::kWarp ? kWarpSize
                                                          : 1) +
                              (kTail ? kWarpSize * static_cast<int>(sizeof(T)) / kChunkBytes : 0);

template <class X, RingSpan kSpan, bool kVectorized, int kChunks = kRingChunks<X>, class DY = X,
          bool kTail = false>
constexpr int kRingWarpBytes = kRingStages<X, kSpan, DY> * kChunkBytes *
                               (kRingGranules<X, kSpan, kVectorized, kChunks, X, kTail> +
                                kRingGranules<X, kSpan, kVectorized, kChunks, DY, kTail>);

// kCount elements of T from neighbouring granules in shared memory.
template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> load_shared_pack(unsigned place) {
  Pack<T, kCount> pack;
#pragma unroll
  for (int g = 0; g < static_cast<int>(sizeof(pack)) / kChunkBytes; ++g) {
    const Granule granule = load_shared(place + g * kChunkBytes);
#pragma unroll
    for (int j = 0; j < 4; ++j) pack.set_bits32(4 * g + j, granule.words[j]);
  }
  return pack;
}

// The same value, which ptxas does not know to be: it works out what it can anew in every row, from
// parameters and indices, and has registers left.
template <class T>
__device__ __forceinline__ T keep(T value) {
  return __shfl_sync(kAllLanes, value, threadIdx.x % kWarpSize);
}

// The same place, of which the compiler does not know, with kDetached, what it follows from.
template <bool kDetached, class T>
__device__ __forceinline__ T* detach(T* place) {
  if constexpr (kDetached) asm volatile("" : "+l"(place));
  return place;
}

// The same value, which ptxas does not know to be the same in all lanes. What is loaded from a
// place that is, it puts into uniform registers at once, and waits for it: by statistics of later
// rows 16384 x 12288 bfloat16 took 352 us on an H200, 300 us by those of a lane each.
__device__ __forceinline__ int64_t as_of_a_lane(int64_t value) {
  return value + (threadIdx.x >= blockDim.x ? 1 : 0);  // never is
}

// The granule of a place in device memory.
__device__ __forceinline__ uintptr_t granule_of(const char* place) {
  return reinterpret_cast<uintptr_t>(place) & ~uintptr_t{kChunkBytes - 1};
}

// Starts to copy `granules` granules of a team's run, by `lanes` lanes that take up to kChunks
// each, `step` apart in the ring, and the first ones one more. `slot` and `source` are of this
// lane's first one; `source` is as far into it as the run begins in its own.
template <int kChunks>
__device__ __forceinline__ void copy_granules(unsigned slot, int step, const char* source,
                                              int granules, int lane, int lanes) {
  const char* const first = reinterpret_cast<const char*>(granule_of(source));
#pragma unroll
  for (int k = 0; k <= kChunks; ++k) {
    if (k * lanes + lane < granules) copy_async(slot + k * step, first + k * lanes * kChunkBytes);
  }
}

// The same, up to `end` of the tensor, whose last granule may not be all its own.
template <int kSize, int kChunks>
__device__ __forceinline__ void copy_last_granules(unsigned slot, unsigned step, const char* source,
                                                   const void* end, int bytes, int lane,
                                                   int lanes) {
  const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(source) % kChunkBytes);
  const int used = bytes > 0 ? offset + bytes : 0;
  const char* const granules = source - offset;
  const auto has = [&](int k) {
    return (k * lanes + lane) * kChunkBytes < used && (k < kChunks || lane == 0);
  };
  const char* const run = source - lane * kChunkBytes;
  if (static_cast<const char*>(end) - run >= bytes + kChunkBytes - 1) {
#pragma unroll
    for (int k = 0; k <= kChunks; ++k) {
      if (has(k)) copy_async(slot + k * step, granules + k * lanes * kChunkBytes);
    }
    return;
  }
#pragma unroll 1
  for (int k = 0; k <= kChunks; ++k) {
    const char* const granule = granules + k * lanes * kChunkBytes;
    const int64_t rest = static_cast<const char*>(end) - granule;
    if (!has(k)) break;
    if (rest >= kChunkBytes) {
      copy_async(slot + k * step, granule);
    } else {
      copy_elements<kSize>(slot + k * step, granule, static_cast<int>(rest));
    }
  }
}

// Of a tensor of T beside rows of X that are not aligned, kCount chunks of a lane: the granules of
// the ring in which they lie and then, moved into place, they themselves.
template <class X, class T, int kCount>
class UnalignedChunks {
 public:
  static constexpr int kColumns = kChunkColumns<X>;
  static constexpr int kParts = static_cast<int>(sizeof(T) / sizeof(X));  // granules of a chunk
  static constexpr int kPart = kColumns / kParts;

  __device__ __forceinline__ void load(unsigned place, unsigned step) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
#pragma unroll
      for (int g = 0; g <= kParts; ++g) {
        granules_[j][g] = load_shared(place + j * step + g * kChunkBytes);
      }
    }
  }

  // They begin at byte 4 * kWord + bits / 8 of their first granules.
  template <int kWord>
  __device__ __forceinline__ void align(int bits) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
#pragma unroll
      for (int g = 0; g < kParts; ++g) {
        granules_[j][g] = shift<kWord>(granules_[j][g], granules_[j][g + 1], bits);
      }
    }
  }

  // Of chunk j only the first `left` columns exist.
  __device__ __forceinline__ void truncate(int j, int left) {
#pragma unroll
    for (int g = 0; g < kParts; ++g) {
      auto part = to_pack<T, kPart>(granules_[j][g]);
      part.truncate(left - g * kPart);
      granules_[j][g] = to_granule(part);
    }
  }

  __device__ __forceinline__ void store(unsigned place, unsigned step) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
#pragma unroll
      for (int g = 0; g < kParts; ++g) {
        store_shared(place + j * step + g * kChunkBytes, granules_[j][g]);
      }
    }
  }

  __device__ __forceinline__ Pack<T, kColumns> chunk(int j) const {
    Pack<T, kColumns> pack;
#pragma unroll
    for (int g = 0; g < kParts; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) pack.set_bits32(4 * g + i, granules_[j][g].words[i]);
    }
    return pack;
  }

 private:
  Granule granules_[kCount][kParts + 1];
};

}  // namespace fastnorm::cuda
