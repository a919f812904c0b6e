// fastnorm::nn::LayerNorm: parameters as torch::nn::LayerNorm has them, the forward by fastnorm.
#include <torch/nn/init.h>
#include <torch/types.h>

#include <utility>

#include "fastnorm/layer_norm.h"
#include "fastnorm/nn.h"

namespace fastnorm::nn {

LayerNormOptions::LayerNormOptions(std::vector<int64_t> normalized_shape)
    : normalized_shape_(std::move(normalized_shape)) {}

LayerNormOptions::LayerNormOptions(const torch::nn::LayerNormOptions& options)
    : normalized_shape_(options.normalized_shape()),
      eps_(options.eps()),
      elementwise_affine_(options.elementwise_affine()) {}

LayerNormImpl::LayerNormImpl(std::vector<int64_t> normalized_shape)
    : LayerNormImpl(LayerNormOptions(std::move(normalized_shape))) {}

LayerNormImpl::LayerNormImpl(LayerNormOptions options) : options(std::move(options)) {
  LayerNormImpl::reset();
}

void LayerNormImpl::reset() {
  const auto& shape = options.normalized_shape();
  const bool has_weight = options.elementwise_affine();
  const bool has_bias = has_weight && options.bias();
  weight = register_parameter("weight", has_weight ? torch::empty(shape) : torch::Tensor(),
                              /*requires_grad=*/has_weight);
  bias = register_parameter("bias", has_bias ? torch::empty(shape) : torch::Tensor(),
                            /*requires_grad=*/has_bias);
  reset_parameters();
}

void LayerNormImpl::reset_parameters() {
  if (weight.defined()) torch::nn::init::ones_(weight);
  if (bias.defined()) torch::nn::init::zeros_(bias);
}

void LayerNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "fastnorm::nn::LayerNorm("
         << torch::IntArrayRef(options.normalized_shape()) << ", eps=" << options.eps()
         << ", elementwise_affine=" << options.elementwise_affine() << ", bias=" << options.bias();
  if (options.out_dtype()) stream << ", out_dtype=" << *options.out_dtype();
  stream << ")";
}

torch::Tensor LayerNormImpl::forward(const torch::Tensor& input) {
  return layer_norm(input, options.normalized_shape(), weight, bias, options.eps(),
                    options.out_dtype());
}

}  // namespace fastnorm::nn
