// What libfastnorm tells of itself, for fastnorm._C and the tests. Exported, but no part of the
// public API: its headers are not installed.
#pragma once

#include <string>
#include <vector>

#include "cuda/plan.h"
#include "fastnorm/export.h"

namespace fastnorm::inspection {

struct BuildInfo {
  std::string version;
  std::string torch;
  std::string cuda;                             // such as "13.0"; empty when built without CUDA
  std::vector<std::string> cuda_architectures;  // such as "sm_90"
  std::string compiler;
  std::string instruction_set;  // of the CPU kernels that run on this machine
};

FASTNORM_API BuildInfo build_info();

// How a LayerNorm of this size would run on such a GPU. Needs no GPU.
FASTNORM_API cuda::ForwardPlan plan_forward(const cuda::ForwardProblem& problem,
                                            const cuda::DeviceProperties& device,
                                            const cuda::PlanRequest& request);
FASTNORM_API cuda::BackwardPlan plan_backward(const cuda::BackwardProblem& problem,
                                              const cuda::DeviceProperties& device,
                                              const cuda::PlanRequest& request);

// Kernels that every later call is to run where it can. Not for concurrent use.
FASTNORM_API void force_cuda_plan(const cuda::PlanRequest& request);

}  // namespace fastnorm::inspection
