// LayerNorm as a torch::nn module; the counterpart of torch::nn::LayerNorm.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/options/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <vector>

#include "fastnorm/export.h"

namespace fastnorm::nn {

// The options of torch::nn::LayerNorm, of which one can be made, and those that Python's module has
// beside them:
//   LayerNorm norm(LayerNormOptions({1024}).eps(1e-6).bias(false));
struct FASTNORM_API LayerNormOptions {
  /* implicit */ LayerNormOptions(std::vector<int64_t> normalized_shape);
  /* implicit */ LayerNormOptions(const torch::nn::LayerNormOptions& options);

  // The trailing dimensions of the input to normalize over.
  TORCH_ARG(std::vector<int64_t>, normalized_shape);
  // Added to the variance.
  TORCH_ARG(double, eps) = 1e-5;
  // Whether there is a learnable weight.
  TORCH_ARG(bool, elementwise_affine) = true;
  // Whether, besides the weight, there is a learnable bias.
  TORCH_ARG(bool, bias) = true;
  // The result's dtype, written by the kernel; none: the input's, or float32 under CUDA autocast.
  TORCH_ARG(std::optional<at::ScalarType>, out_dtype);
};

// torch::nn::LayerNorm that runs fastnorm's kernels: parameters of the same names, shapes and
// initial values, so that either loads what the other saved.
class FASTNORM_API LayerNormImpl : public torch::nn::Cloneable<LayerNormImpl> {
 public:
  explicit LayerNormImpl(std::vector<int64_t> normalized_shape);
  explicit LayerNormImpl(LayerNormOptions options);

  void reset() override;
  // Sets the weight to ones and the bias to zeros.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  // An input of shape (*, *normalized_shape); the result has the same shape.
  torch::Tensor forward(const torch::Tensor& input);

  LayerNormOptions options;
  torch::Tensor weight;  // undefined without elementwise_affine
  torch::Tensor bias;    // undefined without elementwise_affine or without bias
};

// A std::shared_ptr of LayerNormImpl.
TORCH_MODULE(LayerNorm);

}  // namespace fastnorm::nn
