// The entry points of the kernels, once for each instruction set they are compiled for.
#pragma once

#include "../layer_norm_args.h"
#include "layer_norm_cpu.h"

namespace fastnorm::cpu {

struct Moments {
  double mean;
  double squares;  // sum of the squared deviations from it
};

struct Kernels {
  // `scratch` holds a Moments per row and tile, where the partition shares rows among threads.
  void (*forward)(const ForwardArgs& args, Moments* scratch, const ThreadPool& pool);
  void (*backward)(const BackwardArgs& args, void* workspace, const ThreadPool& pool);
};

namespace baseline {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif

}  // namespace fastnorm::cpu
