// The last stage of dw and db.
#include "async.cuh"
#include "weight_grads.cuh"

namespace fastnorm::cuda {
namespace {

// A block adds up blockDim.x * kVector columns of dw (blockIdx.y 0) or db (1); its threadIdx.y take
// the partial sums in turn, or a thread does so for kChains of them.
template <class A, int kVector, int kChains>
__global__ void __launch_bounds__(kFinishThreads, 4) finish_kernel(const FinishParameters<A> p) {
  struct alignas(sizeof(A) * kVector) Vector {
    A values[kVector];
  };
  __shared__ Vector staging[kFinishThreads];
  wait_for_previous_kernel();
  const bool bias = blockIdx.y == 1;
  void* const target = bias ? p.db : p.dw;
  if (target == nullptr) return;
  const A* const partials = bias ? p.db_partials : p.dw_partials;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kVector;
  Vector sums[kChains] = {};
  if (column < p.cols) {
    // All loads of a turn in flight together, the last ones too: one after the other they took 2.6
    // us at 4096 columns on an H200.
    constexpr int kUnroll = 8;
    const int64_t step = blockDim.y;
    for (int64_t row = threadIdx.y; row < p.partials; row += kUnroll * step) {
      Vector others[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        others[u] = {};
        if (row + u * step < p.partials) {
          others[u] =
              *reinterpret_cast<const Vector*>(partials + (row + u * step) * p.cols + column);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) sums[u % kChains].values[i] += others[u].values[i];
      }
    }
  }
  // In the order of sum_column.
#pragma unroll
  for (int step = kChains / 2; step > 0; step /= 2) {
#pragma unroll
    for (int c = 0; c < step; ++c) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[c].values[i] += sums[c + step].values[i];
    }
  }
  staging[threadIdx.y * blockDim.x + threadIdx.x] = sums[0];
  __syncthreads();
  const A* const staged = reinterpret_cast<const A*>(staging);
  const int width = static_cast<int>(blockDim.x) * kVector;
  const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  const DType dtype = bias ? p.db_dtype : p.dw_dtype;
  for (int i = thread; i < width; i += kFinishThreads) {
    const int64_t to = static_cast<int64_t>(blockIdx.x) * width + i;
    const A total = sum_column(staged + i, width, blockDim.y);
    if (to < p.cols) store_element(target, dtype, to, total);
  }
}

template <class A, int kVector, int kChains>
cudaError_t launch_finish(const FinishParameters<A>& p, unsigned across, cudaStream_t stream) {
  const int64_t columns = int64_t{across} * kVector;
  const dim3 blocks(static_cast<unsigned>((p.cols + columns - 1) / columns), 2);
  // No more than two on a multiprocessor, by shared memory that they do not need, or eight would
  // wait on each of the few that the kernel before leaves free, and read all partial sums: 262144 x
  // 512 bfloat16 .7 us less on an H200, 16384 x 4096 .4, 8192 x 16384 .7. Of more blocks some would
  // wait for others to end: 2048 x 65536 .6 us more.
  constexpr int kSpreadBytes = 80'000;
  const bool spreads = p.overlap && blocks.x * blocks.y <= 2u * p.sm_count;
  static std::atomic<uint64_t> prepared{0};  // a bit per device
  if (spreads) {
    const cudaError_t error =
        allow_blocks(reinterpret_cast<const void*>(finish_kernel<A, kVector, kChains>),
                     kSpreadBytes, false, prepared);
    if (error != cudaSuccess) return error;
  }
  return Launch(blocks, dim3(across, kFinishThreads / across), stream)
      .with_shared(spreads ? kSpreadBytes : 0)
      .overlapping(p.overlap)(finish_kernel<A, kVector, kChains>, p);
}

template <class A, int kVector>
cudaError_t launch_across(const FinishParameters<A>& p, cudaStream_t stream) {
  // As many threads side by side as leave a block for every multiprocessor at the most, so that all
  // can wait beside the blocks of the kernel before; no fewer than read 32 bytes in a row.
  constexpr unsigned kMost = kFinishThreads / 4;
  unsigned across = 32 / (sizeof(A) * kVector);
  while (across < kMost && 2 * p.cols > int64_t{across} * kVector * p.sm_count) across *= 2;
  // Where that leaves more blocks than run at once, with little to do for each, and partial sums
  // are few, a thread does what four do else, to the bit, in a quarter of the blocks. H200,
  // backward of bfloat16: 447 x 300001 279 -> 265 us, 192 x 1000000 310 -> 301, 64 x 262144 45.2
  // -> 43.5, 2048 x 65537 217.7 -> 215.1, 1024 x 131072 207.4 -> 206.5; but 2048 x 65536, all of
  // whose blocks run at once, 202.1 -> 203.5.
  constexpr int64_t kFew = 16, kAtOnce = 6;
  const int64_t blocks = 2 * p.cols / (int64_t{kMost} * kVector);
  if (p.partials <= kFew && blocks > kAtOnce * p.sm_count) {
    return launch_finish<A, kVector, 4>(p, kFinishThreads, stream);
  }
  return launch_finish<A, kVector, 1>(p, across, stream);
}

}  // namespace

template <class A>
cudaError_t finish_weight_grads(const FinishParameters<A>& p, cudaStream_t stream) {
  if constexpr (sizeof(A) == 4) {
    if (p.cols % 4 == 0) return launch_across<A, 4>(p, stream);
  }
  return launch_across<A, 1>(p, stream);
}

template cudaError_t finish_weight_grads<float>(const FinishParameters<float>&, cudaStream_t);
template cudaError_t finish_weight_grads<double>(const FinishParameters<double>&, cudaStream_t);

}  // namespace fastnorm::cuda
