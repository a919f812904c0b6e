// What libfastnorm was built from and for, and the CUDA plan, handed out through exported
// functions.
#include "inspection.h"

#include <torch/version.h>

#include <utility>

#include "backend/layer_norm_cuda.h"
#include "cpu/layer_norm_cpu.h"
#include "fastnorm/version.h"

const char* fastnorm_version() { return FASTNORM_VERSION; }

namespace fastnorm::inspection {

BuildInfo build_info() {
  ops::CudaBuild cuda = ops::cuda_build();
  BuildInfo info;
  info.version = FASTNORM_VERSION;
  info.torch = TORCH_VERSION;
  info.cuda = std::move(cuda.version);
  info.cuda_architectures = std::move(cuda.architectures);
#if defined(__clang__)
  info.compiler = "clang " __clang_version__;
#elif defined(__GNUC__)
  info.compiler = "gcc " __VERSION__;
#else
  info.compiler = "unknown";
#endif
  info.instruction_set = cpu::instruction_set();
  return info;
}

cuda::ForwardPlan plan_forward(const cuda::ForwardProblem& problem,
                               const cuda::DeviceProperties& device,
                               const cuda::PlanRequest& request) {
  return cuda::plan_forward(problem, device, request);
}

cuda::BackwardPlan plan_backward(const cuda::BackwardProblem& problem,
                                 const cuda::DeviceProperties& device,
                                 const cuda::PlanRequest& request) {
  return cuda::plan_backward(problem, device, request);
}

void force_cuda_plan(const cuda::PlanRequest& request) { ops::force_cuda_plan(request); }

}  // namespace fastnorm::inspection
