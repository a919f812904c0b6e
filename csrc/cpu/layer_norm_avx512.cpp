// The kernels of x86-64 with AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "instruction_sets.h"
#include "layer_norm_partition.h"

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#define FASTNORM_CPU_NAMESPACE avx512
#define FASTNORM_CPU_VECTOR_BYTES 64
#include "layer_norm_kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
