// From tensors to kernel arguments, the same for every device: checks, row layout, allocation.
#pragma once

#include <ATen/core/Tensor.h>

#include "layer_norm.h"
#include "layer_norm_args.h"

namespace fastnorm::ops {

// A kernel call ready to be made: its arguments, its results, and the tensors that must outlive it
// because a copy was made contiguous.
struct ForwardCall {
  ForwardArgs args;
  Tensors3 results;  // output, mean, rstd
  at::Tensor input, weight, bias;
};

struct BackwardCall {
  BackwardArgs args;
  Tensors3 results;  // dx, dw, db; undefined where not asked for
  at::Tensor grad_out, input, mean, rstd, weight;
};

// `statistics`: whether mean and rstd are wanted; else they stay undefined, and null.
ForwardCall prepare_forward(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                            const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                            std::optional<at::ScalarType> out_dtype, bool statistics = true);

BackwardCall prepare_backward(const at::Tensor& grad_out, const at::Tensor& input,
                              c10::SymIntArrayRef normalized_shape, const at::Tensor& mean,
                              const at::Tensor& rstd, const OptionalTensor& weight,
                              const OptionalTensor& bias, std::array<bool, 3> output_mask);

}  // namespace fastnorm::ops
