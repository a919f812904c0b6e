// The operators as C++ functions. Each goes through PyTorch's dispatcher, so autograd, autocast and
// the transforms apply as they do from Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <array>
#include <optional>
#include <tuple>

#include "fastnorm/export.h"

namespace fastnorm {

// y = (input - mean) / sqrt(var + eps) * weight + bias over the trailing dimensions
// `normalized_shape`, in the input's dtype or in `out_dtype`.
FASTNORM_API at::Tensor layer_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                                   const std::optional<at::Tensor>& weight = std::nullopt,
                                   const std::optional<at::Tensor>& bias = std::nullopt,
                                   double eps = 1e-5,
                                   std::optional<at::ScalarType> out_dtype = std::nullopt);

// The same with the statistics of each row: (output, mean, rstd). The statistics carry no gradient.
FASTNORM_API std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward(
    const at::Tensor& input, at::IntArrayRef normalized_shape,
    const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps,
    std::optional<at::ScalarType> out_dtype = std::nullopt);

// (dx, dw, db); undefined where output_mask is false or there is no such parameter.
FASTNORM_API std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& grad_out, const at::Tensor& input, at::IntArrayRef normalized_shape,
    const at::Tensor& mean, const at::Tensor& rstd, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, double eps, std::array<bool, 3> output_mask);

}  // namespace fastnorm
