// The operators without data: shapes, dtypes and strides of what the kernels return.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "layer_norm.h"

namespace fastnorm::ops {
namespace {

Tensors3 layer_norm_forward_meta(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                                 const OptionalTensor& weight, const OptionalTensor& bias,
                                 double /*eps*/, std::optional<at::ScalarType> out_dtype) {
  const at::ScalarType output_dtype =
      check_forward(input, normalized_shape, weight, bias, out_dtype);
  const auto shape = statistics_shape(input, normalized_shape.size());
  const auto statistics = input.options().dtype(statistics_dtype(input.scalar_type()));
  return {at::empty_symint(input.sym_sizes(), input.options().dtype(output_dtype)),
          at::empty_symint(shape, statistics), at::empty_symint(shape, statistics)};
}

Tensors3 layer_norm_backward_meta(const at::Tensor& grad_out, const at::Tensor& input,
                                  c10::SymIntArrayRef normalized_shape, const at::Tensor& mean,
                                  const at::Tensor& rstd, const OptionalTensor& weight,
                                  const OptionalTensor& bias, double /*eps*/,
                                  std::array<bool, 3> output_mask) {
  check_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias);
  Tensors3 gradients;
  if (output_mask[0]) {
    std::get<0>(gradients) = at::empty_symint(input.sym_sizes(), input.options());
  }
  if (output_mask[1] && given(weight)) {
    std::get<1>(gradients) = at::empty_symint(normalized_shape, weight->options());
  }
  if (output_mask[2] && given(bias)) {
    std::get<2>(gradients) = at::empty_symint(normalized_shape, bias->options());
  }
  return gradients;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastnorm, Meta, m) {
  m.impl("layer_norm_forward", layer_norm_forward_meta);
  m.impl("layer_norm_backward", layer_norm_backward_meta);
}

}  // namespace fastnorm::ops
