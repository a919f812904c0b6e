// Rows that do not start at a multiple of 16 bytes, moved in wide accesses all the same: lanes read
// the 16-byte granules that the row lies in and shift them into place with their neighbours'.
#pragma once

#include "numeric.cuh"

namespace fastnorm::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// What is the same in all lanes of a warp, for ptxas to know it: branches and loops that follow
// from it are taken by whole warps then. Else each shuffle in them asks first whether all lanes are
// there (BRA.DIV), which costs instructions and keeps the arithmetic before from that behind.
__device__ __forceinline__ int same_in_warp(int value) { return __shfl_sync(kAllLanes, value, 0); }

// This thread's warp in a block of one dimension.
__device__ __forceinline__ int warp_index() {
  return same_in_warp(static_cast<int>(threadIdx.x) / kWarpSize);
}

// This thread's lane, asked for anew wherever it is needed: one register less, for threadIdx.x.
__device__ __forceinline__ int lane_index() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// A granule, or a chunk that fills one.
struct Granule {
  uint32_t words[4];
};

__device__ __forceinline__ Granule load_granule(const uint4* source) {
  const uint4 value = *source;
  return {{value.x, value.y, value.z, value.w}};
}

__device__ __forceinline__ void store_granule(uint4* target, const Granule& granule) {
  *target = make_uint4(granule.words[0], granule.words[1], granule.words[2], granule.words[3]);
}

// The 16 bytes from byte 4 * kWord + bits / 8 of the 32 bytes of `low` and `high`.
template <int kWord>
__device__ __forceinline__ Granule shift(const Granule& low, const Granule& high, int bits) {
  static_assert(0 <= kWord && kWord <= 4);
  const uint32_t words[9] = {low.words[0],  low.words[1],  low.words[2],
                             low.words[3],  high.words[0], high.words[1],
                             high.words[2], high.words[3], 0};
  Granule result;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    result.words[j] = __funnelshift_r(words[kWord + j], words[kWord + j + 1], bits);
  }
  return result;
}

// Calls body(word, bits) with the word of a byte offset up to 16 as a constant, for it decides
// which registers take part, and the bits of it that are left. One branch for all the shifts of a
// row.
template <class Body>
__device__ __forceinline__ void with_offset(int offset, const Body& body) {
  const int bits = offset % 4 * 8;
  switch (offset / 4) {
    case 0:
      return body(std::integral_constant<int, 0>(), bits);
    case 1:
      return body(std::integral_constant<int, 1>(), bits);
    case 2:
      return body(std::integral_constant<int, 2>(), bits);
    case 3:
      return body(std::integral_constant<int, 3>(), bits);
    default:
      return body(std::integral_constant<int, 4>(), bits);
  }
}

__device__ __forceinline__ Granule shuffle_down(const Granule& granule) {
  Granule result;
#pragma unroll
  for (int j = 0; j < 4; ++j) result.words[j] = __shfl_down_sync(kAllLanes, granule.words[j], 1);
  return result;
}

__device__ __forceinline__ Granule shuffle_up(const Granule& granule) {
  Granule result;
#pragma unroll
  for (int j = 0; j < 4; ++j) result.words[j] = __shfl_up_sync(kAllLanes, granule.words[j], 1);
  return result;
}

template <class T, int kCount>
__device__ __forceinline__ Granule to_granule(const Pack<T, kCount>& pack) {
  static_assert(sizeof(pack) == sizeof(Granule));
  Granule granule;
#pragma unroll
  for (int j = 0; j < 4; ++j) granule.words[j] = pack.bits32(j);
  return granule;
}

template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> to_pack(const Granule& granule) {
  Pack<T, kCount> pack;
#pragma unroll
  for (int j = 0; j < 4; ++j) pack.set_bits32(j, granule.words[j]);
  return pack;
}

// Reads the chunks of whole warps' lanes from `row`, whatever its alignment; columns that do not
// exist are zero. Granules may reach beyond the row, into the bytes before or after it, but not
// beyond `end`, where the tensor's memory ends. Of 16384 x 4095
// bfloat16 on an H200 the backward takes 243 us so, and 290 us in words of four bytes; the forward
// 161 us so and 136 us in words: it has yet to gain.
template <int kChunks, class T, int kColumns, class RowShare>
__device__ __forceinline__ void load_shifted(Pack<T, kColumns> (&chunks)[kChunks], const T* row,
                                             const RowShare& share, const T* end) {
  const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(row) % kChunkBytes);
  const auto* const base =
      reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(row) - offset);
  const int lane = threadIdx.x % kWarpSize;
  // Granules with a byte of the row, and those of them that lie within the memory: in the last row
  // the last one may not.
  const int bytes = offset + share.cols * static_cast<int>(sizeof(T));
  const int needed = (bytes + kChunkBytes - 1) / kChunkBytes;
  const int64_t within =
      (reinterpret_cast<const char*>(end) - reinterpret_cast<const char*>(base)) / kChunkBytes;
  const int readable = within < needed ? static_cast<int>(within) : needed;
  const auto load = [&](int index, bool wanted) {
    Granule granule = {};
    if (wanted && index < readable) {
      const uint4 value = base[index];
      granule = {{value.x, value.y, value.z, value.w}};
    }
    return granule;
  };
  Granule own[kChunks], beyond[kChunks];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const int index = share.first + k * share.step;
    own[k] = load(index, true);
    // The last lane's neighbour is in another warp.
    beyond[k] = load(index + 1, lane == kWarpSize - 1);
  }
  with_offset(offset, [&](auto word, int bits) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      Granule next = shuffle_down(own[k]);
      if (lane == kWarpSize - 1) next = beyond[k];
      chunks[k] = to_pack<T, kColumns>(shift<decltype(word)::value>(own[k], next, bits));
    }
  });
  // The row's end, and a chunk with elements in a granule that was not read.
  bool rest = false;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    rest |= (share.left(k) < kColumns && share.left(k) > -kColumns) ||
            (readable < needed && share.first + k * share.step + 2 > readable);
  }
  if (!rest) return;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const int left = share.left(k);
    chunks[k].truncate(left);
    if (readable < needed && share.first + k * share.step + 2 > readable && left > 0) {
      chunks[k] = load_unaligned<T, kColumns>(row + share.column(k), left);
    }
  }
}

}  // namespace fastnorm::cuda
