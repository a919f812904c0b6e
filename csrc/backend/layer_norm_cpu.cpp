// The operators on the CPU: the kernels of cpu/ on PyTorch's own threads.
#include "cpu/layer_norm_cpu.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "backend/prepare.h"

namespace fastnorm::ops {
namespace {

constexpr cpu::ThreadPool kThreadPool{
    [](int64_t count, int64_t grain, cpu::ThreadPool::Body body, void* context) {
      at::parallel_for(0, count, grain,
                       [body, context](int64_t begin, int64_t end) { body(context, begin, end); });
    }};

Tensors3 layer_norm_forward_cpu(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                                const OptionalTensor& weight, const OptionalTensor& bias,
                                double eps, std::optional<at::ScalarType> out_dtype) {
  ForwardCall call = prepare_forward(input, normalized_shape, weight, bias, eps, out_dtype);
  cpu::forward(call.args, kThreadPool);
  return std::move(call.results);
}

Tensors3 layer_norm_backward_cpu(const at::Tensor& grad_out, const at::Tensor& input,
                                 c10::SymIntArrayRef normalized_shape, const at::Tensor& mean,
                                 const at::Tensor& rstd, const OptionalTensor& weight,
                                 const OptionalTensor& bias, double /*eps*/,
                                 std::array<bool, 3> output_mask) {
  BackwardCall call =
      prepare_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask);
  const at::Tensor workspace =
      at::empty({cpu::backward_workspace_bytes(call.args)}, input.options().dtype(at::kByte));
  cpu::backward(call.args, workspace.mutable_data_ptr(), kThreadPool);
  return std::move(call.results);
}

}  // namespace

TORCH_LIBRARY_IMPL(fastnorm, CPU, m) {
  m.impl("layer_norm_forward", layer_norm_forward_cpu);
  m.impl("layer_norm_backward", layer_norm_backward_cpu);
}

}  // namespace fastnorm::ops
