// The kernels of x86-64 with AVX2, FMA and F16C.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "instruction_sets.h"
#include "layer_norm_partition.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define FASTNORM_CPU_NAMESPACE avx2
#define FASTNORM_CPU_VECTOR_BYTES 32
#include "layer_norm_kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
