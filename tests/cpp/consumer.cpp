// A user's C++ library on fastnorm, with a C interface for one_process.py.
#include <fastnorm/fastnorm.h>
#include <torch/types.h>

// The sum of squares of the LayerNorm of 0, 1, ..., n - 1.
extern "C" double sum_of_squares(int64_t n) {
  const auto x = torch::arange(n, torch::kDouble);
  return fastnorm::layer_norm(x, {n}, {}, {}, 0.0).square().sum().item<double>();
}
