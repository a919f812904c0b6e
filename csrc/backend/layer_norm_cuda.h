// What the CUDA operators offer beside the operators themselves; there in builds without CUDA too.
#pragma once

#include <string>
#include <vector>

#include "cuda/plan.h"

namespace fastnorm::ops {

struct CudaBuild {
  std::string version;                     // such as "13.0"; empty when built without CUDA
  std::vector<std::string> architectures;  // such as "sm_90"
};

CudaBuild cuda_build();

// Kernels that every later call is to run where it can, for tests. Not for concurrent use.
void force_cuda_plan(const cuda::PlanRequest& request);

}  // namespace fastnorm::ops
