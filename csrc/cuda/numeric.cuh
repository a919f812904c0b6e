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

template <class T>
constexpr DType kDTypeOf = std::is_same_v<T, double>     ? DType::kFloat64
                           : std::is_same_v<T, float>    ? DType::kFloat32
                           : std::is_same_v<T, BFloat16> ? DType::kBFloat16
                                                         : DType::kFloat16;

// Elements of a chunk of rows of X.
template <class X>
constexpr int kChunkColumns = kChunkBytes / static_cast<int>(sizeof(X));

template <class T>
constexpr bool kIs16Bit = sizeof(T) == 2;

// Whether rows that are not aligned move by accesses of an element, since that is half a chunk.
template <class T>
constexpr bool kMovesByElements = sizeof(T) == 8;

// Columns that a lane of kElements has side by side.
template <class X>
constexpr int kSideBySide = kIs16Bit<X> ? 2 : 1;

template <class T>
__device__ __forceinline__ Accumulator<T> widen(T value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return __bfloat162float(value);
  } else if constexpr (std::is_same_v<T, Half>) {
    return __half2float(value);
  } else {
    return value;
  }
}

// The nearest value of T.
template <class T>
__device__ __forceinline__ T narrow(float value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return __float2bfloat16_rn(value);
  } else if constexpr (std::is_same_v<T, Half>) {
    return __float2half_rn(value);
  } else {
    return value;
  }
}

// kCount consecutive elements of T (an even number), moved by accesses of up to 16 bytes. 16-bit
// elements are kept as pairs in 32-bit words and unpacked by hand. As an array of elements the
// compiler shuffled halves of registers, eight instructions for each element: the forward of 16384
// x 4096 bfloat16 took 130 us on an H200, and 82 us now (with reduce.cuh's quotient).
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

  // Word j of a pack of 16 bytes, whatever the type.
  __device__ __forceinline__ uint32_t bits32(int j) const {
    if constexpr (kIs16Bit<T>) {
      return words[j];
    } else if constexpr (std::is_same_v<T, float>) {
      return __float_as_uint(words[j]);
    } else {
      return static_cast<uint32_t>(j % 2 == 0 ? __double2loint(words[j / 2])
                                              : __double2hiint(words[j / 2]));
    }
  }

  __device__ __forceinline__ void set_bits32(int j, uint32_t bits) {
    if constexpr (kIs16Bit<T>) {
      words[j] = bits;
    } else if constexpr (std::is_same_v<T, float>) {
      words[j] = __uint_as_float(bits);
    } else {
      const int value = static_cast<int>(bits);
      words[j / 2] = j % 2 == 0 ? __hiloint2double(__double2hiint(words[j / 2]), value)
                                : __hiloint2double(value, __double2loint(words[j / 2]));
    }
  }

  // Turns all elements but the first `left` into zeros.
  __device__ __forceinline__ void truncate(int left) {
    if constexpr (kIs16Bit<T>) {
#pragma unroll
      for (int j = 0; j < kCount / 2; ++j) {
        words[j] &= 2 * j + 1 < left ? 0xffffffffu : 2 * j < left ? 0x0000ffffu : 0u;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) words[i] = i < left ? words[i] : T(0);
    }
  }

  // Element i, for stores of one element.
  __device__ __forceinline__ T element(int i) const {
    if constexpr (std::is_same_v<T, BFloat16>) {
      return __ushort_as_bfloat16(bits(i));
    } else if constexpr (std::is_same_v<T, Half>) {
      return __ushort_as_half(bits(i));
    } else {
      return words[i];
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

// The first `left` of kCount elements at `source`, or all of them, whatever its alignment; zero
// beyond. Reads
// words of four bytes and shifts them into place, without a branch, so that all loads are in flight
// together. The word of the first element may begin with the element before it: that is in the
// same four bytes of memory, so it can be read.
template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> load_unaligned(const T* source, int left) {
  Pack<T, kCount> pack;
  if constexpr (kIs16Bit<T>) {
    constexpr int kWords = kCount / 2;
    const auto address = reinterpret_cast<uintptr_t>(source);
    const int odd = static_cast<int>(address / 2 % 2);
    const int count = left < kCount ? left : kCount;
    const auto* const base = reinterpret_cast<const uint32_t*>(address - 2 * odd);
    uint32_t words[kWords + 1];
#pragma unroll
    for (int j = 0; j <= kWords; ++j) words[j] = 2 * j + 1 - odd < count ? base[j] : 0;
    // The last element may have the lower half of a word whose upper half must not be read.
    const int end = count + odd;
    uint32_t last = 0;
    if (end % 2 == 1 && count > 0) last = reinterpret_cast<const uint16_t*>(base)[end - 1];
#pragma unroll
    for (int j = 0; j <= kWords; ++j) words[j] = end == 2 * j + 1 ? last : words[j];
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      pack.words[j] = __funnelshift_r(words[j], words[j + 1], 16 * odd);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) pack.words[i] = i < left ? source[i] : T(0);
  }
  return pack;
}

// Keeps the compiler from unpacking 16-bit elements before here, into registers that it does not
// have.
template <class T, int kCount>
__device__ __forceinline__ void keep_packed(Pack<T, kCount>& pack) {
  if constexpr (kIs16Bit<T>) {
#pragma unroll
    for (uint32_t& word : pack.words) asm volatile("" : "+r"(word));
  }
}

// The same elements, of which ptxas does not know that (nor that a grid has no third dimension):
// they are unpacked anew, instead of taking twice the registers since they were unpacked before.
template <class T, int kCount>
__device__ __forceinline__ void forget_unpacked(Pack<T, kCount>& pack) {
  if constexpr (kIs16Bit<T>) {
#pragma unroll
    for (uint32_t& word : pack.words) word ^= blockIdx.z;
  }
}

// A pack from aligned memory if it `exists`, else of `absent` elements; without a branch.
template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> load_wide(const T* source, bool exists,
                                                     Accumulator<T> absent = 0) {
  Pack<T, kCount> pack = fill_pack<T, kCount>(absent);
  if (exists) pack = *reinterpret_cast<const Pack<T, kCount>*>(source);
  return pack;
}

// The first `left` elements at `source`, or all of them, zero beyond. With kVectorized all or none
// are there, and aligned.
template <bool kVectorized, class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> load_pack(const T* source, int left) {
  if constexpr (kVectorized) return load_wide<T, kCount>(source, left > 0);
  return load_unaligned<T, kCount>(source, left);
}

template <class T, int kCount>
__device__ __forceinline__ void store_pack(T* target, const Pack<T, kCount>& pack) {
  *reinterpret_cast<Pack<T, kCount>*>(target) = pack;
}

// The same to device memory, by accesses of 16 bytes. Of a store_pack nvcc 13.0 may make four
// words, with which dx alone of 24414 x 4096 bfloat16 took 152 us on an H200, 148 us so.
template <class T, int kCount>
__device__ __forceinline__ void store_wide(T* target, const Pack<T, kCount>& pack) {
  if constexpr (sizeof(pack) % kChunkBytes != 0) return store_pack(target, pack);
#pragma unroll
  for (int g = 0; g < static_cast<int>(sizeof(pack)) / kChunkBytes; ++g) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(reinterpret_cast<char*>(target) +
                                                                  g * kChunkBytes),
                 "r"(pack.bits32(4 * g)), "r"(pack.bits32(4 * g + 1)), "r"(pack.bits32(4 * g + 2)),
                 "r"(pack.bits32(4 * g + 3))
                 : "memory");
  }
}

}  // namespace fastnorm::cuda
