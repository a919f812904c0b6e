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

// Calls plan_and_launch(properties, launch) for the device of `input`. A context with fewer
// multiprocessors than the device (a green context) refuses a grid that needs nearly all of them at
// once, and large clusters; then once more, without either.
template <class PlanAndLaunch>
void run(const at::Tensor& input, const PlanAndLaunch& plan_and_launch) {
  cuda::DeviceProperties properties = properties_of(input.device());
  const auto launch = [&](auto function, const auto& args, const auto& plan) {
    at::Tensor workspace;
    if (plan.workspace_bytes > 0) {
      workspace = at::empty({plan.workspace_bytes}, input.options().dtype(at::kByte));
    }
    return function(args, plan, workspace.defined() ? workspace.mutable_data_ptr() : nullptr,
                    c10::cuda::getCurrentCUDAStream().stream());
  };
  cudaError_t error = plan_and_launch(properties, launch);
  if (error == cudaErrorCooperativeLaunchTooLarge || error == cudaErrorInvalidClusterSize) {
    cudaGetLastError();
    properties.whole_grids = false;
    properties.large_clusters = 0;
    error = plan_and_launch(properties, launch);
  }
  C10_CUDA_CHECK(error);
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

bool are_of_sums_dtype(const BackwardArgs& args) {
  const DType sums = accumulation_dtype(args.x_dtype);
  return args.dw != nullptr && args.db != nullptr && args.weight_dtype == sums &&
         args.bias_dtype == sums;
}

bool has_one_dtype(const ForwardArgs& args) {
  return args.y_dtype == args.x_dtype &&
         (args.weight == nullptr || args.weight_dtype == args.x_dtype) &&
         (args.bias == nullptr || args.bias_dtype == args.x_dtype);
}

Tensors3 run_forward(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                     const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                     std::optional<at::ScalarType> out_dtype, bool statistics) {
  const c10::cuda::CUDAGuard guard(input.device());
  ForwardCall call =
      prepare_forward(input, normalized_shape, weight, bias, eps, out_dtype, statistics);
  const ForwardArgs& args = call.args;
  if (args.rows > 0) {
    unify_parameters(call);
    run(input, [&](const cuda::DeviceProperties& device, auto launch) {
      const cuda::ForwardPlan plan = cuda::plan_forward(
          {args.rows, args.cols, args.x_dtype, cuda::is_aligned(args), has_one_dtype(args),
           args.y_dtype == args.x_dtype, cuda::is_contiguous(args)},
          device, forced_plan());
      return launch(cuda::forward, args, plan);
    });
  }
  return std::move(call.results);
}

Tensors3 layer_norm_forward_cuda(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                                 const OptionalTensor& weight, const OptionalTensor& bias,
                                 double eps, std::optional<at::ScalarType> out_dtype) {
  return run_forward(input, normalized_shape, weight, bias, eps, out_dtype, true);
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
    run(input, [&](const cuda::DeviceProperties& device, auto launch) {
      const cuda::BackwardPlan plan = cuda::plan_backward(
          {args.rows, args.cols, args.x_dtype, args.dy_dtype, cuda::is_aligned(args),
           args.dx != nullptr, args.dw != nullptr || args.db != nullptr, cuda::is_contiguous(args),
           are_of_sums_dtype(args)},
          device, forced_plan());
      return launch(cuda::backward, args, plan);
    });
  }
  return std::move(call.results);
}

}  // namespace

at::Tensor layer_norm_output_cuda(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                                  const OptionalTensor& weight, const OptionalTensor& bias,
                                  double eps, std::optional<at::ScalarType> out_dtype) {
  return std::get<0>(run_forward(input, normalized_shape, weight, bias, eps, out_dtype, false));
}

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

at::Tensor layer_norm_output_cuda(const at::Tensor& /*input*/,
                                  c10::SymIntArrayRef /*normalized_shape*/,
                                  const OptionalTensor& /*weight*/, const OptionalTensor& /*bias*/,
                                  double /*eps*/, std::optional<at::ScalarType> /*out_dtype*/) {
  raise_no_cuda();
}

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
