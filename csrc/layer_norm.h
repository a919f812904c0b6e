// The operators as C++ sees them below the public API: typed handles and the checks of their
// inputs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <array>
#include <optional>
#include <tuple>

namespace fastnorm::ops {

using OptionalTensor = std::optional<at::Tensor>;
using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Calls through the dispatcher.
at::Tensor layer_norm(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                      const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                      std::optional<at::ScalarType> out_dtype);
Tensors3 layer_norm_forward(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                            const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                            std::optional<at::ScalarType> out_dtype);
Tensors3 layer_norm_backward(const at::Tensor& grad_out, const at::Tensor& input,
                             c10::SymIntArrayRef normalized_shape, const at::Tensor& mean,
                             const at::Tensor& rstd, const OptionalTensor& weight,
                             const OptionalTensor& bias, double eps,
                             std::array<bool, 3> output_mask);

// y alone of tensors that are on a CUDA device and nothing else (see layer_norm.cpp).
at::Tensor layer_norm_output_cuda(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                                  const OptionalTensor& weight, const OptionalTensor& bias,
                                  double eps, std::optional<at::ScalarType> out_dtype);

// Whether an optional tensor argument is there.
inline bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

// The dtype of mean and rstd: float64 for float64 rows, float32 for all others.
inline at::ScalarType statistics_dtype(at::ScalarType input) {
  return input == at::kDouble ? at::kDouble : at::kFloat;
}

// The leading dimensions of `input` followed by ones.
c10::SymDimVector statistics_shape(const at::Tensor& input, size_t normalized_ndim);

// Raise what ATen raises, in its words, for shapes that do not fit; and name the argument, what it
// was and what it must be for dtypes and devices. `check_forward` returns the output's dtype.
at::ScalarType check_forward(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                             const OptionalTensor& weight, const OptionalTensor& bias,
                             std::optional<at::ScalarType> out_dtype);
void check_backward(const at::Tensor& grad_out, const at::Tensor& input,
                    c10::SymIntArrayRef normalized_shape, const at::Tensor& mean,
                    const at::Tensor& rstd, const OptionalTensor& weight,
                    const OptionalTensor& bias);

}  // namespace fastnorm::ops
