// The operators on CUDA devices: guard, stream, plan, workspace, launch. Built without CUDA, they
// say so.
#include "backend/layer_norm_cuda.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "backend/prepare.h"

#ifdef FASTNORM_WITH_CUDA

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/layer_norm_cuda.h"

namespace fastnorm::ops {
namespace {

cuda::PlanRequest& forced_plan() {
  static cuda::PlanRequest request;
  return request;
}

cuda::DeviceProperties properties_of(c10::Device device) {
  cuda::DeviceProperties properties;
  C10_CUDA_CHECK(cuda::device_properties(device.index(), properties));
  return properties;
}

at::Tensor make_workspace(int64_t bytes, const at::Tensor& input) {
  return bytes == 0 ? at::Tensor() : at::empty({bytes}, input.options().dtype(at::kByte));
}

void* workspace_data(const at::Tensor& workspace) {
  return workspace.defined() ? workspace.mutable_data_ptr() : nullptr;
}

// The kernels read weight and bias in one dtype; where the two differ, the narrower is made
// float32.
void unify_parameters(ForwardCall& call) {
  ForwardArgs& args = call.args;
  if (args.weight == nullptr || args.bias == nullptr || args.weight_dtype == args.bias_dtype) {
    return;
  }
  call.weight = call.weight.to(at::kFloat);
  call.bias = call.bias.to(at::kFloat);
  args.weight = call.weight.const_data_ptr();
  args.bias = call.bias.const_data_ptr();
  args.weight_dtype = args.bias_dtype = DType::kFloat32;
}

bool has_one_dtype(const ForwardArgs& args) {
  return args.y_dtype == args.x_dtype &&
         (args.weight == nullptr || args.weight_dtype == args.x_dtype) &&
         (args.bias == nullptr || args.bias_dtype == args.x_dtype);
}

Tensors3 layer_norm_forward_cuda(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                                 const OptionalTensor& weight, const OptionalTensor& bias,
                                 double eps, std::optional<at::ScalarType> out_dtype) {
  const c10::cuda::CUDAGuard guard(input.device());
  ForwardCall call = prepare_forward(input, normalized_shape, weight, bias, eps, out_dtype);
  const ForwardArgs& args = call.args;
  if (args.rows > 0) {
    unify_parameters(call);
    const cuda::ForwardPlan plan =
        cuda::plan_forward({args.rows, args.cols, args.x_dtype, cuda::is_aligned(args),
                            has_one_dtype(args), args.y_dtype == args.x_dtype},
                           properties_of(input.device()), forced_plan());
    const at::Tensor workspace = make_workspace(plan.workspace_bytes, input);
    C10_CUDA_CHECK(cuda::forward(args, plan, workspace_data(workspace),
                                 c10::cuda::getCurrentCUDAStream().stream()));
  }
  return std::move(call.results);
}

Tensors3 layer_norm_backward_cuda(const at::Tensor& grad_out, const at::Tensor& input,
                                  c10::SymIntArrayRef normalized_shape, const at::Tensor& mean,
                                  const at::Tensor& rstd, const OptionalTensor& weight,
                                  const OptionalTensor& bias, double /*eps*/,
                                  std::array<bool, 3> output_mask) {
  const c10::cuda::CUDAGuard guard(input.device());
  BackwardCall call =
      prepare_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask);
  const BackwardArgs& args = call.args;
  if (args.rows == 0) {
    auto& [dx, dw, db] = call.results;
    if (dw.defined()) dw.zero_();
    if (db.defined()) db.zero_();
  } else if (args.cols > 0 && (args.dx || args.dw || args.db)) {
    const cuda::BackwardPlan plan = cuda::plan_backward(
        {args.rows, args.cols, args.x_dtype, cuda::is_aligned(args), args.dx != nullptr,
         args.dw != nullptr || args.db != nullptr, args.dy_dtype == args.x_dtype},
        properties_of(input.device()), forced_plan());
    const at::Tensor workspace = make_workspace(plan.workspace_bytes, input);
    C10_CUDA_CHECK(cuda::backward(args, plan, workspace_data(workspace),
                                  c10::cuda::getCurrentCUDAStream().stream()));
  }
  return std::move(call.results);
}

}  // namespace

CudaBuild cuda_build() {
  CudaBuild build;
  build.version =
      std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  for (int architecture : cuda::compiled_architectures()) {
    build.architectures.push_back("sm_" + std::to_string(architecture / 10));
  }
  return build;
}

void force_cuda_plan(const cuda::PlanRequest& request) { forced_plan() = request; }

}  // namespace fastnorm::ops

#else

namespace fastnorm::ops {
namespace {

[[noreturn]] void raise_no_cuda() {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "fastnorm was built without CUDA and cannot run on a CUDA tensor. Install the CUDA toolkit "
      "that torch was built with and rebuild fastnorm; in its source tree: "
      "FASTNORM_CUDA=1 pip install .");
}

Tensors3 layer_norm_forward_cuda(const at::Tensor& /*input*/,
                                 c10::SymIntArrayRef /*normalized_shape*/,
                                 const OptionalTensor& /*weight*/, const OptionalTensor& /*bias*/,
                                 double /*eps*/, std::optional<at::ScalarType> /*out_dtype*/) {
  raise_no_cuda();
}

Tensors3 layer_norm_backward_cuda(const at::Tensor& /*grad_out*/, const at::Tensor& /*input*/,
                                  c10::SymIntArrayRef /*normalized_shape*/,
                                  const at::Tensor& /*mean*/, const at::Tensor& /*rstd*/,
                                  const OptionalTensor& /*weight*/, const OptionalTensor& /*bias*/,
                                  double /*eps*/, std::array<bool, 3> /*output_mask*/) {
  raise_no_cuda();
}

}  // namespace

CudaBuild cuda_build() { return {}; }

void force_cuda_plan(const cuda::PlanRequest& /*request*/) {}

}  // namespace fastnorm::ops

#endif

namespace fastnorm::ops {

TORCH_LIBRARY_IMPL(fastnorm, CUDA, m) {
  m.impl("layer_norm_forward", layer_norm_forward_cuda);
  m.impl("layer_norm_backward", layer_norm_backward_cuda);
}

}  // namespace fastnorm::ops
