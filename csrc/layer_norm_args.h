// What the kernels of every device are called with: pointers, sizes, strides and dtype tags.
// Depends on nothing, so that kernels compile without ATen and can be lifted out.
#pragma once

#include <cstdint>

namespace fastnorm {

enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16, kFloat64 };

constexpr int64_t size_in_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      return 8;
  }
  return 0;
}

// Statistics, partial sums and all arithmetic: float64 for float64 rows, float32 for all others.
constexpr DType accumulation_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// y = (x - mean) * rstd * weight + bias for `rows` rows of `cols` columns.
// x's rows are dense and `x_row_stride` elements apart (0 and negative included); y, mean and rstd
// are dense. weight and bias hold `cols` elements or are null. No pointer need be aligned beyond
// its element.
struct ForwardArgs {
  int64_t rows = 0;
  int64_t cols = 0;
  double eps = 0;
  DType x_dtype = DType::kFloat32;
  DType y_dtype = DType::kFloat32;
  DType weight_dtype = DType::kFloat32;  // x's dtype or float32
  DType bias_dtype = DType::kFloat32;    // x's dtype or float32
  const void* x = nullptr;
  int64_t x_row_stride = 0;
  const void* weight = nullptr;
  const void* bias = nullptr;
  void* y = nullptr;
  // In accumulation_dtype(x_dtype). On CUDA devices both may be null: they are not wanted then.
  void* mean = nullptr;
  void* rstd = nullptr;
};

// dx (x's dtype), dw (weight's) and db (bias's) from dy, x and the forward's statistics.
// A null dx, dw or db is not asked for and costs nothing.
struct BackwardArgs {
  int64_t rows = 0;
  int64_t cols = 0;
  DType dy_dtype = DType::kFloat32;
  DType x_dtype = DType::kFloat32;
  DType weight_dtype = DType::kFloat32;  // of weight and dw
  DType bias_dtype = DType::kFloat32;    // of db
  const void* dy = nullptr;
  int64_t dy_row_stride = 0;
  const void* x = nullptr;
  int64_t x_row_stride = 0;
  const void* mean = nullptr;
  const void* rstd = nullptr;
  const void* weight = nullptr;
  void* dx = nullptr;
  void* dw = nullptr;
  void* db = nullptr;
};

}  // namespace fastnorm
