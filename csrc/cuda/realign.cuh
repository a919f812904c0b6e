// Spans that are not aligned, in registers: lanes read and write 16-byte granules of device memory,
// which are not their chunks, and give their neighbours the words that belong to those.
#pragma once

#include "shift.cuh"

namespace fastnorm::cuda {

// Where chunks begin at byte 4 * kWord + bits / 8 of a granule: a lane that has the granule in
// which its chunk begins lacks words 0 to kWord of the next lane's; one that has the granule in
// which its chunk ends, words kWord to 3 of the lane's before. Two at the most, the one way or the
// other.
template <int kWord>
constexpr bool kTakesFromNext = kWord < 2;

// Calls put(k, granule) with the 16 bytes from that byte on: of own[k] with the next lane's behind
// it, or of the one before with own[k] behind. (kWord = 4: with own[k].) own[k + 1] is a warp's
// granules further on in memory. `beyond`: the two words that follow the last lane's last granule,
// in the first lane, or those before the first lane's first, in the last lane. The whole warp comes
// here together.
template <int kWord, int kChunks, class Put>
__device__ __forceinline__ void realign(const Granule (&own)[kChunks], const uint2& beyond,
                                        int bits, const Put& put) {
  const int lane = threadIdx.x % kWarpSize;
  if constexpr (kWord == 4) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) put(k, own[k]);
  } else if constexpr (kTakesFromNext<kWord>) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const Granule later =
          k + 1 < kChunks ? own[(k + 1) % kChunks] : Granule{{beyond.x, beyond.y, 0, 0}};
      Granule next = {};
#pragma unroll
      for (int j = 0; j <= kWord; ++j) {
        const uint32_t given = lane == 0 ? later.words[j] : own[k].words[j];
        next.words[j] = __shfl_sync(kAllLanes, given, lane + 1);
      }
      put(k, shift<kWord>(own[k], next, bits));
    }
  } else {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const Granule earlier =
          k > 0 ? own[(k + kChunks - 1) % kChunks] : Granule{{0, 0, beyond.x, beyond.y}};
      Granule before = {};
#pragma unroll
      for (int j = kWord; j < 4; ++j) {
        const uint32_t given = lane == kWarpSize - 1 ? earlier.words[j] : own[k].words[j];
        before.words[j] = __shfl_sync(kAllLanes, given, lane - 1);
      }
      put(k, shift<kWord>(before, own[k], bits));
    }
  }
}

// A granule of device memory, if it exists; else whatever is in some registers. (Volatile, or it
// might be read before the kernel before this one has ended.)
__device__ __forceinline__ Granule load_if(const void* source, bool exists) {
  Granule granule;
  asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
               : "=r"(granule.words[0]), "=r"(granule.words[1]), "=r"(granule.words[2]),
                 "=r"(granule.words[3])
               : "l"(source), "r"(static_cast<int>(exists)));
  return granule;
}

// The same of a pack of whole granules.
template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> load_pack_if(const T* source, bool exists) {
  Pack<T, kCount> pack;
#pragma unroll
  for (int g = 0; g < static_cast<int>(sizeof(pack)) / kChunkBytes; ++g) {
    const Granule granule = load_if(reinterpret_cast<const uint4*>(source) + g, exists);
#pragma unroll
    for (int j = 0; j < 4; ++j) pack.set_bits32(4 * g + j, granule.words[j]);
  }
  return pack;
}

// Reads the first `count` of a warp's kChunks * 32 chunks, which begin at column `begin` of a row,
// a whole number of chunks. Whole granules, and so perhaps bytes around the row, but none from
// `end` on, where the tensor's memory ends. (The offset of a row's first column is that of all its
// warps: from it the compiler sees that they branch together.) kInside: all of the chunks exist,
// and so does a granule behind them.
template <bool kInside, class T, int kColumns, int kChunks>
__device__ __forceinline__ void read_realigned(Pack<T, kColumns> (&chunks)[kChunks], const T* row,
                                               int begin, int count, const T* end) {
  const int lane = threadIdx.x % kWarpSize;
  const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(row) % kChunkBytes);
  const bool from_next = offset < kChunkBytes / 2;
  const T* const origin =
      reinterpret_cast<const T*>(reinterpret_cast<const char*>(row) - offset) + begin;
  const int wanted = count > 0 ? count + (offset > 0) : 0;
  const bool cut = !kInside && wanted > 0 &&
                   reinterpret_cast<const char*>(end) - reinterpret_cast<const char*>(origin) <
                       wanted * kChunkBytes;
  const int readable = wanted - cut;
  const int first = lane + (from_next ? 0 : 1);
  const T* const mine = origin + first * kColumns;
  Granule own[kChunks];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    own[k] = load_if(mine + k * kWarpSize * kColumns, kInside || first + k * kWarpSize < readable);
  }
  // The granule that is no lane's own.
  const int other = from_next ? kChunks * kWarpSize : 0;
  const bool has_other = lane == (from_next ? 0 : kWarpSize - 1);
  uint2 beyond = {};
  if (has_other && (kInside || other < readable)) {
    beyond = reinterpret_cast<const uint2*>(origin + other * kColumns)[from_next ? 0 : 1];
  }
  if (cut) {  // a tensor's last one
    const T* const rest = origin + readable * kColumns;
    const Granule granule =
        to_granule(load_unaligned<T, kColumns>(rest, static_cast<int>(end - rest)));
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (first + k * kWarpSize == readable) own[k] = granule;
    }
    if (has_other && other == readable) {
      beyond = from_next ? make_uint2(granule.words[0], granule.words[1])
                         : make_uint2(granule.words[2], granule.words[3]);
    }
  }
  with_offset(offset, [&](auto word, int bits) {
    constexpr int kWord = decltype(word)::value;
    if constexpr (kWord < 4) {
      realign<kWord>(own, beyond, bits, [&](int k, const Granule& granule) {
        chunks[k] = to_pack<T, kColumns>(granule);
      });
    }
  });
}

// Word `index` of a granule. (Selected by number it would be kept in memory.)
__device__ __forceinline__ uint32_t word_of(const Granule& granule, int index) {
  uint32_t word = granule.words[0];
#pragma unroll
  for (int j = 1; j < 4; ++j) word = j == index ? granule.words[j] : word;
  return word;
}

// Stores the bytes of a granule from `begin` on, a whole number of elements of kSize bytes, two or
// four; some.
template <int kSize>
__device__ __forceinline__ void store_end(char* target, const Granule& granule, int begin) {
  const int words = (begin + 3) / 4;  // before the first whole one
  if (kSize == 2 && begin % 4 != 0) {
    *reinterpret_cast<uint16_t*>(target + begin) =
        static_cast<uint16_t>(word_of(granule, begin / 4) >> 16);
  }
  if (words % 2 != 0) {
    *reinterpret_cast<uint32_t*>(target + 4 * words) = word_of(granule, words);
  }
  if (words <= 2) {
    *reinterpret_cast<uint2*>(target + 8) = make_uint2(granule.words[2], granule.words[3]);
  }
}

// Those before `end`; some, but not all.
template <int kSize>
__device__ __forceinline__ void store_begin(char* target, const Granule& granule, int end) {
  if (end >= 8) *reinterpret_cast<uint2*>(target) = make_uint2(granule.words[0], granule.words[1]);
  if (end % 8 >= 4) {
    *reinterpret_cast<uint32_t*>(target + end / 8 * 8) = word_of(granule, end / 8 * 2);
  }
  if (kSize == 2 && end % 4 != 0) {
    *reinterpret_cast<uint16_t*>(target + end / 4 * 4) =
        static_cast<uint16_t>(word_of(granule, end / 4));
  }
}

// Writes the first `count` of a warp's chunks, from column `begin` of a row on.
template <class T, int kChunks>
__device__ __forceinline__ void write_realigned(const Granule (&own)[kChunks], T* row, int begin,
                                                int count) {
  constexpr int kSize = static_cast<int>(sizeof(T));
  const int lane = threadIdx.x % kWarpSize;
  const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(row) % kChunkBytes);
  char* const origin = reinterpret_cast<char*>(row) - offset + begin * kSize;
  with_offset(kChunkBytes - offset, [&](auto word, int bits) {
    constexpr int kWord = decltype(word)::value;
    // With the next lane's words this one fills the granule in which its chunk ends.
    constexpr bool kEnd = kTakesFromNext<kWord>;
    auto* const mine = reinterpret_cast<uint4*>(origin) + lane + kEnd;
    realign<kWord>(own, uint2(), bits, [&](int k, const Granule& granule) {
      const int i = k * kWarpSize + lane;
      const bool whole = i + kEnd < count && (kEnd || kWord == 4 || i > 0);
      if (whole) store_granule(mine + k * kWarpSize, granule);
    });
    // Of the granules at both ends others have elements.
    if constexpr (kWord < 4) {
      if (count <= 0) return;
      if (lane == 0) {
        store_end<kSize>(origin, shift<kWord>(Granule(), own[0], bits), offset);
      }
      Granule last = own[kChunks - 1];
      if (count < kChunks * kWarpSize) {
#pragma unroll
        for (int k = 0; k < kChunks - 1; ++k) {
          if (k * kWarpSize + lane == count - 1) last = own[k];
        }
      }
      if (lane == (count - 1) % kWarpSize) {
        store_begin<kSize>(origin + count * kChunkBytes, shift<kWord>(last, Granule(), bits),
                           offset);
      }
    }
  });
}

}  // namespace fastnorm::cuda
