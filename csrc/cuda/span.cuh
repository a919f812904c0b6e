// The span of a row that one warp holds, and how it moves: by 16-byte accesses wherever the row
// starts.
#pragma once

#include "async.cuh"
#include "numeric.cuh"
#include "shift.cuh"

namespace fastnorm::cuda {

// Chunks lane, lane + 32, ... of the warp's kChunks * 32. Ownership goes by column index, whatever
// the row's alignment and the number of warps, so that a row is always summed in the same order;
// and the distance between two chunks of a lane is a constant, which keeps addresses out of the
// instruction stream: 5120 columns of bfloat16 took 141 us on an H200 with chunks dealt out over
// all threads of a number known at run time only, and 131 us so.
//
// kOverhang: the columns behind a row's last whole chunk belong to the span of that chunk, even if
// that is full; no span has them alone. Else the next span has them then.
template <class X, int kChunks, bool kOverhang = false>
struct Span {
  static constexpr int kColumns = kChunkColumns<X>;
  static constexpr int kSize = kWarpSize * kChunks * kColumns;

  int begin;  // first column
  int cols;   // columns of the row from there on: kSize or more if the span is whole, none or less
              // if there is none of it
  int lane;

  __device__ __forceinline__ int column(int k) const {
    return begin + (k * kWarpSize + lane) * kColumns;
  }
  __device__ __forceinline__ bool whole() const { return cols >= kSize; }
  // Whether the row goes on behind it, by a chunk at the least.
  __device__ __forceinline__ bool is_inside() const { return cols >= kSize + kColumns; }
  // Whole chunks.
  __device__ __forceinline__ int chunks() const { return min(max(cols, 0), kSize) / kColumns; }
  // Whether chunk k exists whole.
  __device__ __forceinline__ bool has(int k) const {
    return cols >= (k * kWarpSize + lane + 1) * kColumns;
  }
  // Whether it does in the neighbouring lane.
  __device__ __forceinline__ bool neighbour_has(int k) const {
    return cols >= (k * kWarpSize + (lane ^ 1) + 1) * kColumns;
  }
  // Columns behind the last whole chunk of a row, fewer than a chunk, if they are this span's: one
  // for each of the first lanes.
  __device__ __forceinline__ int tail() const {
    constexpr int kEnd = kOverhang ? kSize + kColumns : kSize;
    return cols < 0 || cols >= kEnd ? 0 : cols % kColumns;
  }
  __device__ __forceinline__ int tail_column() const { return begin + chunks() * kColumns + lane; }
};

// Shared memory through which a warp, or a team of kLanes of its lanes (eight at the least), moves
// kLanes * kChunks chunks of 16 bytes that start anywhere. The whole warp comes to each function,
// if need be with nothing to do.
template <int kChunks, int kLanes = kWarpSize>
struct SpanStage {
  static constexpr int kGranules = kLanes * kChunks + 1;
  struct Buffer {
    uint4 granules[kGranules];
  };
  uint4* granules;

  // Copies the granules in which `cols` elements (no more than fit) at `source` lie, all at once,
  // and waits for them. Whole granules, and so perhaps bytes around the row, but none from `end`
  // on, where the tensor's memory ends.
  template <class T>
  __device__ __forceinline__ void fetch(const T* source, int cols, const T* end) const {
    constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(T));
    const int lane = threadIdx.x % kLanes;
    const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(source) % kChunkBytes);
    const T* const origin = source - offset / static_cast<int>(sizeof(T));
    const auto* const memory = reinterpret_cast<const uint4*>(origin);
    const int bytes = cols * static_cast<int>(sizeof(T));
    int wanted = cols > 0 ? (offset + bytes + kChunkBytes - 1) / kChunkBytes : 0;
    const bool cut = cols > 0 && origin + static_cast<int64_t>(wanted) * kElements > end;
    if (cut) --wanted;  // only a tensor's last granule
#pragma unroll
    for (int k = 0; k <= kChunks; ++k) {
      const int i = k * kLanes + lane;
      if (i < wanted && (k < kChunks || lane == 0)) start_copy(granules + i, memory + i);
    }
    if (cut) {
      T* const elements = reinterpret_cast<T*>(granules);
      const int i = wanted * kElements + lane;
      if (lane < kElements && origin + i < end) elements[i] = origin[i];
    }
    wait_for_copies();
    __syncwarp();
  }

  // This lane's k-th chunk of what has been fetched, from as far into a granule on as kWord and
  // `bits` say (see with_offset). What lies beyond the last element is not defined.
  template <int kWord>
  __device__ __forceinline__ Granule shifted(int k, int bits) const {
    const uint4* const granule = granules + k * kLanes + threadIdx.x % kLanes;
    return shift<kWord>(load_granule(granule), load_granule(granule + 1), bits);
  }

  // All of this lane's chunks of what has been fetched from `source`.
  template <class T, int kColumns>
  __device__ __forceinline__ void shift_into(Pack<T, kColumns> (&chunks)[kChunks],
                                             const T* source) const {
    const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(source) % kChunkBytes);
    with_offset(offset, [&](auto word, int bits) {
      constexpr int kWord = decltype(word)::value;
      if constexpr (kWord < 4) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          chunks[k] = to_pack<T, kColumns>(shifted<kWord>(k, bits));
        }
      }
    });
  }

  // The place of element i of what is to be written.
  template <class T>
  __device__ __forceinline__ T* element(int i) const {
    return reinterpret_cast<T*>(granules) + i;
  }

  // Before elements are put into the stage: what was there has been read.
  __device__ __forceinline__ void open() const { __syncwarp(); }

  // Writes the first `count` elements (no more than fit) to `target`, in whole granules but for the
  // first and the last one.
  template <class T>
  __device__ __forceinline__ void store(T* target, int count) const {
    constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(T));
    __syncwarp();
    const int lane = threadIdx.x % kLanes;
    const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(target) % kChunkBytes);
    const int before = offset / static_cast<int>(sizeof(T));  // elements of others
    auto* const memory = reinterpret_cast<uint4*>(target - before);
    const int end = (before + count) / kElements;  // of the whole granules
    // Granule i has the last bytes of staged granule i - 1 and the first ones of i.
    with_offset(kChunkBytes - offset, [&](auto word, int bits) {
      const auto write = [&](int i) {
        const uint4* const granule = granules + i;
        store_granule(memory + i,
                      shift<decltype(word)::value>(load_granule(i > 0 ? granule - 1 : granule),
                                                   load_granule(granule), bits));
      };
      if (lane < end && (lane > 0 || offset == 0)) write(lane);
#pragma unroll
      for (int k = 1; k < kChunks; ++k) {
        if (k * kLanes + lane < end) write(k * kLanes + lane);
      }
    });
    const T* const staged = reinterpret_cast<const T*>(granules);
    const int head = lane;
    if (before > 0 && head < kElements - before && head < count) target[head] = staged[head];
    const int tail = end * kElements - before + lane;
    if ((end > 0 || before == 0) && lane < kElements && tail < count) target[tail] = staged[tail];
  }
};

}  // namespace fastnorm::cuda
