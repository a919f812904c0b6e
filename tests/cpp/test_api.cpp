// The C++ API against ATen's and torch::nn's own LayerNorm: values, first and second derivatives,
// options, parameters, what is saved, errors.
//
//   test_api [cpu | cuda]
#include <fastnorm/fastnorm.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

using fastnorm::nn::LayerNorm;
using fastnorm::nn::LayerNormOptions;

namespace {

constexpr int kNoDevice = 77;

void check(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

void check_close(const torch::Tensor& found, const torch::Tensor& expected,
                 const std::string& what) {
  check(found.sizes() == expected.sizes(), what + ": another shape");
  check(found.dtype() == expected.dtype(), what + ": another dtype");
  const double tolerance = expected.dtype() == torch::kDouble ? 1e-11 : 1e-5;
  check(torch::allclose(found, expected, tolerance, tolerance), what + ": other values");
}

// A result, its first derivatives, and the derivatives of their squares' sum.
std::vector<torch::Tensor> derivatives(const torch::Tensor& y, const torch::Tensor& grad_out,
                                       const std::vector<torch::Tensor>& inputs) {
  const auto first = torch::autograd::grad({y}, inputs, {grad_out}, /*retain_graph=*/true,
                                           /*create_graph=*/true);
  torch::Tensor sum = torch::zeros({}, y.options());
  for (const auto& gradient : first) sum = sum + gradient.square().sum();
  const auto second = torch::autograd::grad({sum}, {inputs[0], inputs[1]});
  std::vector<torch::Tensor> all{y};
  all.insert(all.end(), first.begin(), first.end());
  all.insert(all.end(), second.begin(), second.end());
  return all;
}

void test_version() {
  check(std::strcmp(fastnorm_version(), FASTNORM_VERSION) == 0, "library and headers differ");
}

void test_function(torch::Device device) {
  const auto options = torch::dtype(torch::kDouble).device(device).requires_grad(true);
  const auto x = torch::randn({6, 5, 40}, options);
  const auto w = torch::randn({5, 40}, options);
  const auto b = torch::randn({5, 40}, options);
  const auto grad_out = torch::randn({6, 5, 40}, options.requires_grad(false));
  const auto found = derivatives(fastnorm::layer_norm(x, {5, 40}, w, b, 1e-5), grad_out, {x, w, b});
  const auto expected = derivatives(torch::layer_norm(x, {5, 40}, w, b, 1e-5), grad_out, {x, w, b});
  const char* names[] = {"y", "dx", "dw", "db", "second dx", "second dw"};
  for (size_t i = 0; i < expected.size(); ++i) check_close(found[i], expected[i], names[i]);
}

void test_primitives(torch::Device device) {
  const auto x = torch::randn({7, 33}, device);
  const auto w = torch::randn({33}, device);
  const auto [y, mean, rstd] = fastnorm::layer_norm_forward(x, {33}, w, {}, 1e-5);
  const auto expected = torch::native_layer_norm(x, {33}, w, {}, 1e-5);
  check_close(y, std::get<0>(expected), "output");
  check_close(mean, std::get<1>(expected), "mean");
  check_close(rstd, std::get<2>(expected), "rstd");
  const auto [dx, dw, db] = fastnorm::layer_norm_backward(torch::ones_like(y), x, {33}, mean, rstd,
                                                          w, {}, 1e-5, {true, true, true});
  check(dx.sizes() == x.sizes() && dw.sizes() == w.sizes(), "shapes of dx and dw");
  check(!db.defined(), "db of no bias");
}

void test_module(torch::Device device) {
  LayerNorm ours(LayerNormOptions({48}).eps(1e-3));
  torch::nn::LayerNorm theirs(torch::nn::LayerNormOptions({48}).eps(1e-3));
  {
    const torch::NoGradGuard no_grad;
    check(theirs->weight.equal(ours->weight) && theirs->bias.equal(ours->bias), "initial values");
    torch::nn::init::normal_(theirs->weight);
    torch::nn::init::normal_(theirs->bias);
  }
  check(ours->named_parameters().keys() == theirs->named_parameters().keys(), "names");

  // Saved by either, loaded by the other.
  std::stringstream from_theirs;
  torch::save(theirs, from_theirs);
  torch::load(ours, from_theirs);
  check(ours->weight.equal(theirs->weight) && ours->bias.equal(theirs->bias), "loaded values");
  std::stringstream from_ours;
  torch::save(ours, from_ours);
  torch::nn::LayerNorm copy(std::vector<int64_t>{48});
  torch::load(copy, from_ours);
  check(copy->weight.equal(theirs->weight), "values loaded by torch::nn::LayerNorm");

  ours->to(device);
  theirs->to(device);
  const auto x = torch::randn({9, 48}, torch::device(device).requires_grad(true));
  const auto y = ours(x);
  check_close(y, theirs(x), "module's output");
  y.square().sum().backward();
  check(ours->weight.grad().defined() && ours->bias.grad().defined(), "module's gradients");

  const auto clone = std::dynamic_pointer_cast<fastnorm::nn::LayerNormImpl>(ours->clone());
  check(clone != nullptr && clone->weight.equal(ours->weight), "clone's values");
  check(!clone->weight.is_same(ours->weight), "clone's own parameters");
  check_close(torch::nn::Sequential(ours)->forward(x), y, "in a Sequential");
}

void test_options(torch::Device device) {
  const auto x = torch::randn({4, 3, 16}, device);
  LayerNorm plain(LayerNormOptions({3, 16}).elementwise_affine(false));
  check(plain->parameters().empty() && !plain->weight.defined(), "no parameters");
  check_close(plain(x), torch::layer_norm(x, {3, 16}), "without parameters");

  LayerNorm no_bias(LayerNormOptions({16}).bias(false));
  check(no_bias->named_parameters().keys() == std::vector<std::string>{"weight"}, "no bias");
  no_bias->to(device);
  check_close(no_bias(x), torch::layer_norm(x, {16}), "without bias");

  LayerNorm widening(LayerNormOptions({16}).out_dtype(torch::kFloat));
  widening->to(device, torch::kHalf);
  check(widening(x.to(torch::kHalf)).dtype() == torch::kFloat, "out_dtype");

  LayerNorm converted(torch::nn::LayerNormOptions({16}).eps(0.5).elementwise_affine(false));
  check(converted->options.eps() == 0.5 && !converted->options.elementwise_affine(),
        "torch::nn's options");
  LayerNorm from_shape(std::vector<int64_t>{16});
  check(from_shape->options.normalized_shape() == std::vector<int64_t>{16}, "from a shape");

  std::ostringstream text;
  text << *no_bias;
  check(
      text.str() == "fastnorm::nn::LayerNorm([16], eps=1e-05, elementwise_affine=true, bias=false)",
      "printed as " + text.str());
}

void test_errors(torch::Device device) {
  try {
    LayerNorm norm(std::vector<int64_t>{16});
    norm->to(device);
    norm(torch::randn({2, 8}, device));
  } catch (const c10::Error& error) {
    check(std::strstr(error.what(), "expected input with shape [*, 16]") != nullptr, error.what());
    return;
  }
  check(false, "a wrong shape raised nothing");
}

}  // namespace

int main(int argc, char** argv) {
  const torch::Device device(argc > 1 ? argv[1] : "cpu");
  if (device.is_cuda() && !torch::cuda::is_available()) {
    std::printf("there is no CUDA device\n");
    return kNoDevice;
  }
  torch::manual_seed(0);
  try {
    test_version();
    test_function(device);
    test_primitives(device);
    test_module(device);
    test_options(device);
    test_errors(device);
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
  std::printf("all passed on %s\n", device.str().c_str());
  return 0;
}
