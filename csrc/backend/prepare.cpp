// From tensors to kernel arguments; see prepare.h.
#include "backend/prepare.h"

#include <ATen/ops/empty.h>

#include <optional>

namespace fastnorm::ops {
namespace {

DType dtype_tag(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kDouble:
      return DType::kFloat64;
    default:
      TORCH_INTERNAL_ASSERT(false, "no kernel for dtype ", dtype);
  }
}

struct Rows {
  int64_t rows = 1;
  int64_t cols = 1;
};

Rows count_rows(const at::Tensor& input, size_t normalized_ndim) {
  Rows result;
  const auto sizes = input.sizes();
  for (size_t d = 0; d < sizes.size(); ++d) {
    (d + normalized_ndim < sizes.size() ? result.rows : result.cols) *= sizes[d];
  }
  return result;
}

// Elements from one row to the next where every row is dense and the rows are evenly spaced, as in
// a slice of a wider tensor or an expanded one; nothing otherwise.
std::optional<int64_t> find_row_stride(const at::Tensor& tensor, size_t normalized_ndim) {
  const int64_t leading = tensor.dim() - static_cast<int64_t>(normalized_ndim);
  int64_t dense = 1;
  for (int64_t d = tensor.dim() - 1; d >= leading; --d) {
    if (tensor.size(d) != 1 && tensor.stride(d) != dense) return std::nullopt;
    dense *= tensor.size(d);
  }
  std::optional<int64_t> row_stride;
  int64_t next = 0;
  for (int64_t d = leading - 1; d >= 0; --d) {
    if (tensor.size(d) == 1) continue;
    if (!row_stride) {
      row_stride = tensor.stride(d);
    } else if (tensor.stride(d) != next) {
      return std::nullopt;
    }
    next = tensor.stride(d) * tensor.size(d);
  }
  return row_stride.value_or(dense);
}

// `tensor` itself where its rows can be read in place, else a contiguous copy.
at::Tensor with_dense_rows(const at::Tensor& tensor, size_t normalized_ndim, int64_t cols,
                           int64_t& row_stride) {
  if (!tensor.is_contiguous()) {
    if (const auto stride = find_row_stride(tensor, normalized_ndim)) {
      row_stride = *stride;
      return tensor;
    }
  }
  row_stride = cols;
  return tensor.contiguous();
}

at::Tensor contiguous_or_undefined(const OptionalTensor& tensor) {
  return given(tensor) ? tensor->contiguous() : at::Tensor();
}

const void* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

void* mutable_data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

at::Tensor empty_like_contiguous(const at::Tensor& tensor, at::ScalarType dtype) {
  return at::empty(tensor.sizes(), tensor.options().dtype(dtype));
}

}  // namespace

ForwardCall prepare_forward(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                            const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                            std::optional<at::ScalarType> out_dtype, bool statistics) {
  const at::ScalarType output_dtype =
      check_forward(input, normalized_shape, weight, bias, out_dtype);
  const auto [rows, cols] = count_rows(input, normalized_shape.size());
  ForwardCall call;
  ForwardArgs& args = call.args;
  call.input = with_dense_rows(input, normalized_shape.size(), cols, args.x_row_stride);
  call.weight = contiguous_or_undefined(weight);
  call.bias = contiguous_or_undefined(bias);
  auto& [output, mean, rstd] = call.results;
  output = empty_like_contiguous(input, output_dtype);
  if (statistics) {
    const auto options = input.options().dtype(statistics_dtype(input.scalar_type()));
    const c10::SymDimVector shape = statistics_shape(input, normalized_shape.size());
    mean = at::empty_symint(shape, options);
    rstd = at::empty_symint(shape, options);
  }

  args.rows = rows;
  args.cols = cols;
  args.eps = eps;
  args.x_dtype = dtype_tag(input.scalar_type());
  args.y_dtype = dtype_tag(output_dtype);
  args.weight_dtype = dtype_tag(given(weight) ? weight->scalar_type() : input.scalar_type());
  args.bias_dtype = dtype_tag(given(bias) ? bias->scalar_type() : input.scalar_type());
  args.x = data_or_null(call.input);
  args.weight = data_or_null(call.weight);
  args.bias = data_or_null(call.bias);
  args.y = mutable_data_or_null(output);
  args.mean = mutable_data_or_null(mean);
  args.rstd = mutable_data_or_null(rstd);
  return call;
}

BackwardCall prepare_backward(const at::Tensor& grad_out, const at::Tensor& input,
                              c10::SymIntArrayRef normalized_shape, const at::Tensor& mean,
                              const at::Tensor& rstd, const OptionalTensor& weight,
                              const OptionalTensor& bias, std::array<bool, 3> output_mask) {
  check_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias);
  const size_t ndim = normalized_shape.size();
  const auto [rows, cols] = count_rows(input, ndim);
  BackwardCall call;
  BackwardArgs& args = call.args;
  call.grad_out = with_dense_rows(grad_out, ndim, cols, args.dy_row_stride);
  call.input = with_dense_rows(input, ndim, cols, args.x_row_stride);
  call.mean = mean.contiguous();
  call.rstd = rstd.contiguous();
  call.weight = contiguous_or_undefined(weight);
  auto& [dx, dw, db] = call.results;
  if (output_mask[0]) dx = empty_like_contiguous(input, input.scalar_type());
  if (output_mask[1] && given(weight)) dw = empty_like_contiguous(*weight, weight->scalar_type());
  if (output_mask[2] && given(bias)) db = empty_like_contiguous(*bias, bias->scalar_type());

  args.rows = rows;
  args.cols = cols;
  args.dy_dtype = dtype_tag(grad_out.scalar_type());
  args.x_dtype = dtype_tag(input.scalar_type());
  args.weight_dtype = dtype_tag(given(weight) ? weight->scalar_type() : input.scalar_type());
  args.bias_dtype = dtype_tag(given(bias) ? bias->scalar_type() : input.scalar_type());
  args.dy = data_or_null(call.grad_out);
  args.x = data_or_null(call.input);
  args.mean = data_or_null(call.mean);
  args.rstd = data_or_null(call.rstd);
  args.weight = data_or_null(call.weight);
  args.dx = mutable_data_or_null(dx);
  args.dw = mutable_data_or_null(dw);
  args.db = mutable_data_or_null(db);
  return call;
}

}  // namespace fastnorm::ops
