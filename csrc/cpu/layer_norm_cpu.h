// The CPU kernels' interface. No ATen: the caller lends its thread pool and its memory.
#pragma once

#include <cstdint>

#include "../layer_norm_args.h"

namespace fastnorm::cpu {

// The caller's threads. `run` calls body(context, begin, end) on disjoint pieces of [0, count),
// none shorter than `grain` but the last, and returns when all are done.
struct ThreadPool {
  using Body = void (*)(void* context, int64_t begin, int64_t end);
  void (*run)(int64_t count, int64_t grain, Body body, void* context);
};

void forward(const ForwardArgs& args, const ThreadPool& pool);

// Bytes of scratch that `backward` needs for these arguments: partial sums of dw and db. Depends on
// sizes and dtypes alone, never on the number of threads, so that results do not either.
int64_t backward_workspace_bytes(const BackwardArgs& args);

void backward(const BackwardArgs& args, void* workspace, const ThreadPool& pool);

// The instruction set that the running machine's kernels were compiled for, such as "AVX2".
const char* instruction_set();

}  // namespace fastnorm::cpu
