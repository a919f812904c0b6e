// The kernels of any machine: SSE2 on x86-64, NEON on AArch64.
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <utility>

#include "instruction_sets.h"
#include "layer_norm_partition.h"

#define FASTNORM_CPU_NAMESPACE baseline
#define FASTNORM_CPU_VECTOR_BYTES 16
#include "layer_norm_kernels.h"
