// Element types, their conversions, and packs of consecutive elements that move as wide accesses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../layer_norm_args.h"
#include "plan.h"

namespace fastnorm::cuda {

using Half = __half;
using BFloat16 = __nv_bfloat16;

// What rows of T are summed in.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Elements of a chunk of rows of X.
template <class X>
constexpr int kChunkColumns = kChunkBytes / static_cast<int>(sizeof(X));

template <class T>
constexpr bool kIs16Bit = sizeof(T) == 2;

// kCount consecutive elements of T (an even number), read and written in accesses of up to 16
// bytes. 16-bit elements are kept as pairs in 32-bit words and unpacked by hand. As an array of
// elements the compiler shuffled halves of registers, eight instructions for each element: the
// forward of 16384 x 4096 bfloat16 took 130 us on an H200, and 82 us now (with reduce.cuh's
// quotient).
template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Pack {
  static_assert(kCount % 2 == 0);
  using Word = std::conditional_t<kIs16Bit<T>, uint32_t, T>;
  Word words[kIs16Bit<T> ? kCount / 2 : kCount];

  // Element i as A, which is float for all but double.
  template <class A>
  __device__ __forceinline__ A get(int i) const {
    if constexpr (std::is_same_v<T, BFloat16>) {
      const uint32_t word = words[i / 2];
      return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
    } else if constexpr (std::is_same_v<T, Half>) {
      return __half2float(__ushort_as_half(bits(i)));
    } else {
      return words[i];
    }
  }

  // Rounds two values into elements i (even) and i + 1.
  template <class A>
  __device__ __forceinline__ void set_pair(int i, A first, A second) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
      words[i / 2] = *reinterpret_cast<const uint32_t*>(&pair);
    } else if constexpr (std::is_same_v<T, Half>) {
      const __half2 pair = __floats2half2_rn(first, second);
      words[i / 2] = *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      words[i] = static_cast<T>(first);
      words[i + 1] = static_cast<T>(second);
    }
  }

  __device__ __forceinline__ void load_element(int i, const T* source) {
    if constexpr (kIs16Bit<T>) {
      const uint32_t value = *reinterpret_cast<const uint16_t*>(source);
      const uint32_t word = words[i / 2];
      words[i / 2] = i % 2 == 0 ? (word & 0xffff0000u) | value : (word & 0x0000ffffu) | value << 16;
    } else {
      words[i] = *source;
    }
  }

  __device__ __forceinline__ void store_element(int i, T* target) const {
    if constexpr (kIs16Bit<T>) {
      *reinterpret_cast<uint16_t*>(target) = bits(i);
    } else {
      *target = words[i];
    }
  }

 private:
  __device__ __forceinline__ uint16_t bits(int i) const {
    return static_cast<uint16_t>(i % 2 == 0 ? words[i / 2] : words[i / 2] >> 16);
  }
};

// A pack with every element `value`.
template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> fill_pack(Accumulator<T> value) {
  Pack<T, kCount> pack;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) pack.set_pair(i, value, value);
  return pack;
}

// Replaces the first `count` elements of `pack` by those at `source`. With kVectorized all or none
// are there, and aligned.
template <bool kVectorized, class T, int kCount>
__device__ __forceinline__ void load_pack(Pack<T, kCount>& pack, const T* source, int count) {
  if constexpr (kVectorized) {
    if (count > 0) pack = *reinterpret_cast<const Pack<T, kCount>*>(source);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) pack.load_element(i, source + i);
    }
  }
}

template <bool kVectorized, class T, int kCount>
__device__ __forceinline__ void store_pack(T* target, const Pack<T, kCount>& pack, int count) {
  if constexpr (kVectorized) {
    if (count > 0) *reinterpret_cast<Pack<T, kCount>*>(target) = pack;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) pack.store_element(i, target + i);
    }
  }
}

}  // namespace fastnorm::cuda
