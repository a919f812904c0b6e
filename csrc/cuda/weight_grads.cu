// The last stage of dw and db.
#include "weight_grads.cuh"

namespace fastnorm::cuda {
namespace {

template <class A>
__device__ void store_element(void* target, DType dtype, int64_t i, A value) {
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(target)[i] = static_cast<float>(value);
      break;
    case DType::kFloat16:
      static_cast<Half*>(target)[i] = __float2half_rn(static_cast<float>(value));
      break;
    case DType::kBFloat16:
      static_cast<BFloat16*>(target)[i] = __float2bfloat16_rn(static_cast<float>(value));
      break;
    case DType::kFloat64:
      static_cast<double*>(target)[i] = static_cast<double>(value);
      break;
  }
}

// A block adds up 32 columns; its threadIdx.y take the partial sums in turn.
template <class A>
__global__ void __launch_bounds__(kFinishColumns* kFinishRows)
    finish_kernel(const FinishParameters<A> p) {
  __shared__ A staging[2][kFinishRows][kFinishColumns];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kFinishColumns + threadIdx.x;
  A dw = 0, db = 0;
  if (column < p.cols) {
    for (int64_t row = threadIdx.y; row < p.partials; row += kFinishRows) {
      dw += p.dw_partials[row * p.cols + column];
      db += p.db_partials[row * p.cols + column];
    }
  }
  staging[0][threadIdx.y][threadIdx.x] = dw;
  staging[1][threadIdx.y][threadIdx.x] = db;
  __syncthreads();
  if (threadIdx.y < 2 && column < p.cols) {
    A sum = 0;
    for (int row = 0; row < kFinishRows; ++row) sum += staging[threadIdx.y][row][threadIdx.x];
    void* const target = threadIdx.y == 0 ? p.dw : p.db;
    const DType dtype = threadIdx.y == 0 ? p.dw_dtype : p.db_dtype;
    if (target != nullptr) store_element(target, dtype, column, sum);
  }
}

}  // namespace

template <class A>
cudaError_t finish_weight_grads(const FinishParameters<A>& p, cudaStream_t stream) {
  return launch(finish_kernel<A>, (p.cols + kFinishColumns - 1) / kFinishColumns,
                dim3(kFinishColumns, kFinishRows), 1, 0, stream, p);
}

template cudaError_t finish_weight_grads<float>(const FinishParameters<float>&, cudaStream_t);
template cudaError_t finish_weight_grads<double>(const FinishParameters<double>&, cudaStream_t);

}  // namespace fastnorm::cuda
