// The composite operator, the typed handles, the public C++ functions and the checks of the inputs.
#include "layer_norm.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <sstream>

#include "fastnorm/layer_norm.h"

namespace fastnorm::ops {
namespace {

template <class Function>
c10::TypedOperatorHandle<Function> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

// Whether the tensors are dense ones of a CUDA device, nobody differentiates what is made of them,
// in either direction, and nobody looks on: no mode, subclass, tracer or transform.
bool is_cuda_inference(const at::Tensor& input, const OptionalTensor& weight,
                       const OptionalTensor& bias) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet kPlain({DispatchKey::CUDA, DispatchKey::AutogradCUDA,
                                        DispatchKey::ADInplaceOrView, DispatchKey::BackendSelect});
  c10::DispatchKeySet keys = input.key_set();
  const bool records = at::GradMode::is_enabled();
  const auto is_differentiated = [&](const at::Tensor& tensor) {
    return (records && tensor.requires_grad()) || tensor._fw_grad(0).defined();
  };
  if (!input.is_cuda() || is_differentiated(input)) return false;
  for (const OptionalTensor* parameter : {&weight, &bias}) {
    if (!given(*parameter)) continue;
    if (is_differentiated(**parameter)) return false;
    keys = keys | (*parameter)->key_set();
  }
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  const c10::DispatchKeySet others = (keys | local.included_) - local.excluded_ - kPlain;
  return others.highestFunctionalityKey() == DispatchKey::Undefined;
}

// What the user calls: the first of the primitive's results. Being composite it needs no autograd
// formula, batching rule or fake kernel of its own. Inference on CUDA devices takes a shorter way:
// mean and rstd are neither allocated nor written.
at::Tensor layer_norm_composite(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                                const OptionalTensor& weight, const OptionalTensor& bias,
                                double eps, std::optional<at::ScalarType> out_dtype) {
  if (is_cuda_inference(input, weight, bias)) {
    return layer_norm_output_cuda(input, normalized_shape, weight, bias, eps, out_dtype);
  }
  return std::get<0>(layer_norm_forward(input, normalized_shape, weight, bias, eps, out_dtype));
}

bool is_16_or_32_bit_float(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

void check_shape_of_parameter(const char* name, const OptionalTensor& parameter,
                              c10::SymIntArrayRef normalized_shape) {
  TORCH_CHECK(!given(parameter) || parameter->sym_sizes().equals(normalized_shape), "Expected ",
              name, " to be of same shape as normalized_shape, but got ", name, " of shape ",
              parameter->sym_sizes(), " and normalized_shape = ", normalized_shape);
}

void check_shapes(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                  const OptionalTensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK(!normalized_shape.empty(),
              "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least "
              "one element, but got normalized_shape = ",
              normalized_shape);
  check_shape_of_parameter("weight", weight, normalized_shape);
  check_shape_of_parameter("bias", bias, normalized_shape);
  const auto sizes = input.sym_sizes();
  const size_t ndim = normalized_shape.size();
  if (sizes.size() < ndim || !sizes.slice(sizes.size() - ndim).equals(normalized_shape)) {
    std::ostringstream expected;
    for (const c10::SymInt& size : normalized_shape) expected << ", " << size;
    TORCH_CHECK(false, "Given normalized_shape=", normalized_shape,
                ", expected input with shape [*", expected.str(), "], but got input of size",
                sizes);
  }
}

void check_device(const char* name, const at::Tensor& tensor, const at::Tensor& input) {
  TORCH_CHECK(tensor.device() == input.device(), "Expected ", name, " on the input's device ",
              input.device(), ", but it is on ", tensor.device());
}

void check_parameter(const char* name, const OptionalTensor& parameter, const at::Tensor& input) {
  if (!given(parameter)) return;
  check_device(name, *parameter, input);
  const at::ScalarType dtype = parameter->scalar_type();
  TORCH_CHECK(
      dtype == input.scalar_type() ||
          (dtype == at::kFloat && is_16_or_32_bit_float(input.scalar_type())),
      "Expected ", name, " to have the input's dtype ", input.scalar_type(),
      input.scalar_type() == at::kDouble || input.scalar_type() == at::kFloat ? "" : " or Float",
      ", but got ", dtype);
}

void check_inputs(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                  const OptionalTensor& weight, const OptionalTensor& bias) {
  check_shapes(input, normalized_shape, weight, bias);
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_16_or_32_bit_float(input.scalar_type()) || input.scalar_type() == at::kDouble,
      "Expected input to have dtype Float, Half, BFloat16 or Double, but got ",
      input.scalar_type());
  check_parameter("weight", weight, input);
  check_parameter("bias", bias, input);
}

void check_statistics(const char* name, const at::Tensor& statistics, const at::Tensor& input,
                      size_t normalized_ndim) {
  check_device(name, statistics, input);
  TORCH_CHECK(statistics.scalar_type() == statistics_dtype(input.scalar_type()), "Expected ", name,
              " to have dtype ", statistics_dtype(input.scalar_type()), " for an input of dtype ",
              input.scalar_type(), ", but got ", statistics.scalar_type());
  const auto shape = statistics_shape(input, normalized_ndim);
  TORCH_CHECK(statistics.sym_sizes().equals(shape), "Expected ", name, " to have shape ",
              c10::SymIntArrayRef(shape), ", but got ", statistics.sym_sizes());
}

}  // namespace

at::Tensor layer_norm(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                      const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                      std::optional<at::ScalarType> out_dtype) {
  static const auto op = find_operator<decltype(layer_norm)>("fastnorm::layer_norm");
  return op.call(input, normalized_shape, weight, bias, eps, out_dtype);
}

Tensors3 layer_norm_forward(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                            const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                            std::optional<at::ScalarType> out_dtype) {
  static const auto op =
      find_operator<decltype(layer_norm_forward)>("fastnorm::layer_norm_forward");
  return op.call(input, normalized_shape, weight, bias, eps, out_dtype);
}

Tensors3 layer_norm_backward(const at::Tensor& grad_out, const at::Tensor& input,
                             c10::SymIntArrayRef normalized_shape, const at::Tensor& mean,
                             const at::Tensor& rstd, const OptionalTensor& weight,
                             const OptionalTensor& bias, double eps,
                             std::array<bool, 3> output_mask) {
  static const auto op =
      find_operator<decltype(layer_norm_backward)>("fastnorm::layer_norm_backward");
  return op.call(grad_out, input, normalized_shape, mean, rstd, weight, bias, eps, output_mask);
}

c10::SymDimVector statistics_shape(const at::Tensor& input, size_t normalized_ndim) {
  const auto sizes = input.sym_sizes();
  c10::SymDimVector shape(sizes.begin(), sizes.end() - static_cast<ptrdiff_t>(normalized_ndim));
  shape.resize(sizes.size(), 1);
  return shape;
}

at::ScalarType check_forward(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                             const OptionalTensor& weight, const OptionalTensor& bias,
                             std::optional<at::ScalarType> out_dtype) {
  check_inputs(input, normalized_shape, weight, bias);
  const at::ScalarType input_dtype = input.scalar_type();
  const at::ScalarType dtype = out_dtype.value_or(input_dtype);
  if (input_dtype == at::kDouble) {
    TORCH_CHECK(dtype == at::kDouble,
                "Expected out_dtype to be None or Double for an input of dtype Double, but got ",
                dtype);
  } else {
    TORCH_CHECK(is_16_or_32_bit_float(dtype),
                "Expected out_dtype to be None, Float, Half or BFloat16 for an input of dtype ",
                input_dtype, ", but got ", dtype);
  }
  return dtype;
}

void check_backward(const at::Tensor& grad_out, const at::Tensor& input,
                    c10::SymIntArrayRef normalized_shape, const at::Tensor& mean,
                    const at::Tensor& rstd, const OptionalTensor& weight,
                    const OptionalTensor& bias) {
  check_inputs(input, normalized_shape, weight, bias);
  check_device("grad_out", grad_out, input);
  TORCH_CHECK(grad_out.sym_sizes().equals(input.sym_sizes()),
              "Expected grad_out to have the input's shape ", input.sym_sizes(), ", but got ",
              grad_out.sym_sizes());
  const bool is_double = input.scalar_type() == at::kDouble;
  TORCH_CHECK(is_double ? grad_out.scalar_type() == at::kDouble
                        : is_16_or_32_bit_float(grad_out.scalar_type()),
              "Expected grad_out to have dtype ", is_double ? "Double" : "Float, Half or BFloat16",
              " for an input of dtype ", input.scalar_type(), ", but got ", grad_out.scalar_type());
  check_statistics("mean", mean, input, normalized_shape.size());
  check_statistics("rstd", rstd, input, normalized_shape.size());
}

TORCH_LIBRARY_IMPL(fastnorm, CompositeImplicitAutograd, m) {
  m.impl("layer_norm", layer_norm_composite);
}

// vmap takes the composite operator apart, too, instead of calling it sample by sample. Not by the
// alias key FuncTorchBatchedDecomposition, which torch 2.7 heeds for its own operators alone.
TORCH_LIBRARY_IMPL(fastnorm, FuncTorchBatched, m) { m.impl("layer_norm", layer_norm_composite); }

}  // namespace fastnorm::ops

namespace fastnorm {

at::Tensor layer_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                      const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps,
                      std::optional<at::ScalarType> out_dtype) {
  return ops::layer_norm(input, c10::fromIntArrayRefSlow(normalized_shape), weight, bias, eps,
                         out_dtype);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward(
    const at::Tensor& input, at::IntArrayRef normalized_shape,
    const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps,
    std::optional<at::ScalarType> out_dtype) {
  return ops::layer_norm_forward(input, c10::fromIntArrayRefSlow(normalized_shape), weight, bias,
                                 eps, out_dtype);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& grad_out, const at::Tensor& input, at::IntArrayRef normalized_shape,
    const at::Tensor& mean, const at::Tensor& rstd, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, double eps, std::array<bool, 3> output_mask) {
  return ops::layer_norm_backward(grad_out, input, c10::fromIntArrayRefSlow(normalized_shape), mean,
                                  rstd, weight, bias, eps, output_mask);
}

}  // namespace fastnorm
