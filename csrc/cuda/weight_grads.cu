// The last stage of dw and db.
#include "async.cuh"
#include "weight_grads.cuh"

namespace fastnorm::cuda {
namespace {

// Of the kernels that add up the `partials` rows of partial sums and write dw and db, each in its
// own dtype, where they are asked for.
template <class A>
struct FinishParameters {
  int64_t cols;
  int64_t partials;
  const A* dw_partials;
  const A* db_partials;
  void* dw;
  void* db;
  DType dw_dtype, db_dtype;
};

template <class A, int kVector>
struct alignas(sizeof(A) * kVector) Vector {
  A values[kVector];

  __device__ __forceinline__ void add(const Vector& other) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] += other.values[i];
  }
};

template <class A>
struct FinishTarget {
  const A* partials;
  void* result;
  DType dtype;

  // Of dw (blockIdx.y 0) or db (1).
  __device__ __forceinline__ explicit FinishTarget(const FinishParameters<A>& p)
      : partials(blockIdx.y == 0 ? p.dw_partials : p.db_partials),
        result(blockIdx.y == 0 ? p.dw : p.db),
        dtype(blockIdx.y == 0 ? p.dw_dtype : p.db_dtype) {}

  __device__ __forceinline__ void store(int64_t column, const Vector<A, 1>& sums) const {
    store_element(result, dtype, column, sums.values[0]);
  }
  __device__ __forceinline__ void store(int64_t column, const Vector<A, 4>& sums) const {
    const auto store_as = [&](auto element) {
      using T = decltype(element);
      Pack<T, 4> pack;
#pragma unroll
      for (int i = 0; i < 4; i += 2) pack.set_pair(i, sums.values[i], sums.values[i + 1]);
      store_pack(static_cast<T*>(result) + column, pack);
    };
    if (dtype == DType::kFloat32) {
      store_as(float());
    } else if (dtype == DType::kFloat16) {
      store_as(Half());
    } else {
      store_as(BFloat16());
    }
  }
};

// A block adds up blockDim.x * kVector columns; its threadIdx.y take the partial sums in turn.
template <class A, int kVector>
__global__ void __launch_bounds__(kFinishThreads, 4) finish_kernel(const FinishParameters<A> p) {
  using Vector = Vector<A, kVector>;
  __shared__ Vector staging[kFinishThreads];
  wait_for_previous_kernel();
  const FinishTarget<A> target(p);
  if (target.result == nullptr) return;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kVector;
  Vector sum = {};
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
          others[u] = *reinterpret_cast<const Vector*>(target.partials + (row + u * step) * p.cols +
                                                       column);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) sum.add(others[u]);
    }
  }
  staging[threadIdx.y * blockDim.x + threadIdx.x] = sum;
  __syncthreads();
  const A* const staged = reinterpret_cast<const A*>(staging);
  const int width = static_cast<int>(blockDim.x) * kVector;
  const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  for (int i = thread; i < width; i += kFinishThreads) {
    const int64_t to = static_cast<int64_t>(blockIdx.x) * width + i;
    const A total = sum_column(staged + i, width, blockDim.y);
    if (to < p.cols) store_element(target.result, target.dtype, to, total);
  }
}

// Each thread adds up all partial sums of some columns, in the order in which four threads of
// finish_kernel and then sum_column do.
template <class A, int kVector, int kVectors>
__global__ void __launch_bounds__(kFinishThreads)
    finish_by_thread_kernel(const FinishParameters<A> p) {
  using Vector = Vector<A, kVector>;
  constexpr int kChains = kFinishThreads / kMostFinishThreads;
  wait_for_previous_kernel();
  const FinishTarget<A> target(p);
  if (target.result == nullptr) return;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kVectors * kFinishThreads + threadIdx.x;
  const auto column = [&](int v) { return (first + v * kFinishThreads) * kVector; };
  constexpr int kUnroll = kVectors == 1 ? 8 : kChains;  // rows in flight
  Vector sums[kVectors][kChains] = {};
  for (int64_t row = 0; row < p.partials; row += kUnroll) {
    Vector others[kVectors][kUnroll];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        others[v][u] = {};
        if (column(v) < p.cols && row + u < p.partials) {
          others[v][u] =
              *reinterpret_cast<const Vector*>(target.partials + (row + u) * p.cols + column(v));
        }
      }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) sums[v][u % kChains].add(others[v][u]);
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int step = kChains / 2; step > 0; step /= 2) {
#pragma unroll
      for (int c = 0; c < step; ++c) sums[v][c].add(sums[v][c + step]);
    }
    if (column(v) < p.cols) target.store(column(v), sums[v][0]);
  }
}

template <class A, int kVector>
cudaError_t launch_finish(const FinishParameters<A>& p, const BackwardPlan& plan,
                          cudaStream_t stream) {
  const auto blocks = [&](int64_t vectors) {
    const int64_t columns = vectors * kVector;
    return dim3(static_cast<unsigned>((p.cols + columns - 1) / columns), 2);
  };
  const auto launch_by_thread = [&](auto kernel) {
    return Launch(blocks(plan.finish_vectors * kFinishThreads), dim3(kFinishThreads), stream)
        .overlapping(plan.overlap_launches)(kernel, p);
  };
  constexpr int kMostVectors = most_finish_vectors(kVector);
  if (plan.finish_vectors == kMostVectors) {
    return launch_by_thread(finish_by_thread_kernel<A, kVector, kMostVectors>);
  }
  if (plan.finish_vectors == 1) return launch_by_thread(finish_by_thread_kernel<A, kVector, 1>);
  // By shared memory that they do not need fewer blocks find a place on a multiprocessor.
  constexpr int kSpreadBytes = 80'000;
  static std::atomic<uint64_t> prepared{0};  // a bit per device
  if (plan.finish_spreads) {
    const cudaError_t error = allow_blocks(reinterpret_cast<const void*>(finish_kernel<A, kVector>),
                                           kSpreadBytes, false, prepared);
    if (error != cudaSuccess) return error;
  }
  const int side_by_side = plan.finish_threads;
  return Launch(blocks(side_by_side), dim3(side_by_side, kFinishThreads / side_by_side), stream)
      .with_shared(plan.finish_spreads ? kSpreadBytes : 0)
      .overlapping(plan.overlap_launches)(finish_kernel<A, kVector>, p);
}

}  // namespace

template <class A>
cudaError_t finish_weight_grads(const BackwardArgs& args, const BackwardPlan& plan,
                                const A* dw_partials, const A* db_partials, cudaStream_t stream) {
  const FinishParameters<A> p{args.cols, plan.partials, dw_partials,       db_partials,
                              args.dw,   args.db,       args.weight_dtype, args.bias_dtype};
  if constexpr (sizeof(A) == 4) {
    if (finish_vector(DType::kFloat32, p.cols) == 4) return launch_finish<A, 4>(p, plan, stream);
  }
  return launch_finish<A, 1>(p, plan, stream);
}

template cudaError_t finish_weight_grads(const BackwardArgs&, const BackwardPlan&, const float*,
                                         const float*, cudaStream_t);
template cudaError_t finish_weight_grads(const BackwardArgs&, const BackwardPlan&, const double*,
                                         const double*, cudaStream_t);

}  // namespace fastnorm::cuda
