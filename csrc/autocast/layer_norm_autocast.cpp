// CUDA autocast: layer_norm returns float32, as PyTorch's does, but no float32 copy of the input is
// made: the kernel reads the input's dtype and writes float32. PyTorch's CPU autocast leaves
// layer_norm alone, and so it is here.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "layer_norm.h"

namespace fastnorm::ops {
namespace {

// A parameter that the kernels can read beside the input as it is; any other becomes float32.
OptionalTensor cast_parameter(const OptionalTensor& parameter, const at::Tensor& input) {
  if (!given(parameter) || parameter->scalar_type() == input.scalar_type()) return parameter;
  return at::autocast::cached_cast(at::kFloat, parameter, at::kCUDA);
}

at::Tensor layer_norm_autocast(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                               const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                               std::optional<at::ScalarType> out_dtype) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  if (!out_dtype && input.scalar_type() != at::kDouble) out_dtype = at::kFloat;
  return layer_norm(input, normalized_shape, cast_parameter(weight, input),
                    cast_parameter(bias, input), eps, out_dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(fastnorm, AutocastCUDA, m) { m.impl("layer_norm", layer_norm_autocast); }

}  // namespace fastnorm::ops
