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

template <class A, class T>
__device__ __forceinline__ A load_as(T value) {
  if constexpr (std::is_same_v<T, Half>) {
    return __half2float(value);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return __bfloat162float(value);
  } else {
    return static_cast<A>(value);
  }
}

template <class T, class A>
__device__ __forceinline__ T store_as(A value) {
  if constexpr (std::is_same_v<T, Half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return static_cast<T>(value);
  }
}

// kCount consecutive elements of T, read and written in accesses of up to 16 bytes.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Pack {
  T values[kCount];
};

// A pack with every element `value`.
template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> fill_pack(Accumulator<T> value) {
  Pack<T, kCount> pack;
#pragma unroll
  for (int i = 0; i < kCount; ++i) pack.values[i] = store_as<T>(value);
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
      if (i < count) pack.values[i] = source[i];
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
      if (i < count) target[i] = pack.values[i];
    }
  }
}

}  // namespace fastnorm::cuda
