// The operators' schemas, and nothing else. Each dispatch key registers its own kernels.
#include <torch/library.h>

TORCH_LIBRARY(fastnorm, m) {
  // What people call.
  m.def(
      "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-05, *, ScalarType? out_dtype=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  // The primitives that carry kernels, autograd and fake kernels.
  m.def(
      "layer_norm_forward(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, "
      "float eps, ScalarType? out_dtype) -> (Tensor output, Tensor mean, Tensor rstd)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "layer_norm_backward(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean, "
      "Tensor rstd, Tensor? weight, Tensor? bias, float eps, bool[3] output_mask) "
      "-> (Tensor dx, Tensor dw, Tensor db)",
      {at::Tag::pt2_compliant_tag});
}
