// How mean and rstd of many short rows are written.
//
// They are few bytes, but a sector of 32 bytes has those of eight rows (of four in float64), which
// several warps write. Of 268 MB of bfloat16 on an H200 262144 x 512 took 134.1 us with plain
// stores, 130.0 us without any, 131.7 us so; 1048576 x 192 202.1, 194.2 and 198.0 us, 131072 x 1024
// 133.1, 131.0 and 131.1 us. (Gathered by a block in shared memory, in whole sectors: 132.4, 199.6
// and 131.6 us, but 1048576 x 200 222.8 us for 215.5.)
#pragma once

#include "forward_parameters.cuh"

namespace fastnorm::cuda {

// Stores a number and has the L2 cache keep it, so that others complete its sector there.
template <class T>
__device__ __forceinline__ void store_lasting(T* target, T value) {
#if __CUDA_ARCH__ >= 800
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  if constexpr (sizeof(T) == 4) {
    asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(target), "f"(value), "l"(policy)
                 : "memory");
  } else {
    asm volatile("st.global.L2::cache_hint.f64 [%0], %1, %2;" ::"l"(target), "d"(value), "l"(policy)
                 : "memory");
  }
#else
  *target = value;
#endif
}

constexpr int kLineBytes = 128;  // of the L2 cache

// Lets the L2 cache drop the line of a number that was stored so like any other. Whoever reads or
// writes it later does not: as many numbers as 2097152 rows have took 16 MB of an H200's cache away
// from all kernels that came after.
template <class T>
__device__ __forceinline__ void release(const T* target) {
#if __CUDA_ARCH__ >= 800
  const uintptr_t line = reinterpret_cast<uintptr_t>(target) / kLineBytes * kLineBytes;
  asm volatile("applypriority.global.L2::evict_normal [%0], 128;" ::"l"(line) : "memory");
#endif
}

// Stores mean and rstd of a row for whose threads kRowBytes bytes find a place, and releases those
// of rows so far before it that all blocks which had them are at their end: some 8 MB are under
// way.
template <int kRowBytes, class P, class A>
__device__ __forceinline__ void store_statistics(const P& p, int64_t row, A mean, A rstd) {
  if (p.mean == nullptr) return;
  store_lasting(p.mean + row, mean);
  store_lasting(p.rstd + row, rstd);
  constexpr int kLineRows = kLineBytes / static_cast<int>(sizeof(A));
  constexpr int64_t kBehind = (8 << 20) / kRowBytes / kLineRows * kLineRows;
  if (row % kLineRows == 0 && row >= kBehind) {
    release(p.mean + row - kBehind);
    release(p.rstd + row - kBehind);
  }
}

}  // namespace fastnorm::cuda
