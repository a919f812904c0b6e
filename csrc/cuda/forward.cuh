// The forward kernels: y, mean and rstd of rows of X.
//
// forward_rows reads each row once: it stays packed in the registers of the threads that hold it,
// each thread takes the two-pass moments of its own columns, and one reduction merges them.
// Rows too long for that are cut into segments: forward_segment_moments reads them and leaves their
// moments in the workspace, forward_segment_apply merges those and reads the row again.
#pragma once

#include "launch.cuh"
#include "pieces.cuh"
#include "reduce.cuh"
#include "tile.cuh"

namespace fastnorm::cuda {

template <class X, class Y, class W>
struct ForwardParameters {
  using A = Accumulator<X>;
  int64_t rows, cols;
  A eps;
  const X* x;
  int64_t x_row_stride;
  const W* weight;
  const W* bias;
  Y* y;
  A* mean;
  A* rstd;
  Moments<A>* segment_moments;  // [rows, segments], of kSplit
  int64_t segments;
  int cluster_size;
};

// Mean and sum of squared differences of a thread's own columns, in two passes over registers. The
// second pass adds up the differences too, which corrects the rounding of the first one's mean: a
// constant row has exactly its value as mean and exactly no variance.
template <class A, class X, int kChunks, bool kVectorized>
__device__ __forceinline__ Moments<A> tile_moments(const Tile<X, kChunks, kChunkColumns<X>>& tile,
                                                   const Share<X, kVectorized>& share) {
  constexpr int kColumns = kChunkColumns<X>;
  int count = 0;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) count += share.count(k);
  if (count == 0) return {};
  const A inverse = A(1) / static_cast<A>(count);
  A mean = 0;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    A sum = 0;  // columns that do not exist are zero
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum += tile.template get<A>(k, i);
    mean = fma(sum, inverse, mean);  // divided first: the sum of all columns might overflow
  }
  A m1 = 0, m2 = 0;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const int existing = share.count(k);
    A sum = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      A delta = tile.template get<A>(k, i) - mean;
      // A column that does not exist must not count: zero differs from the mean.
      if constexpr (!kVectorized) delta = i < existing ? delta : A(0);
      sum += delta;
      squares = fma(delta, delta, squares);
    }
    m1 += existing > 0 ? sum : A(0);
    m2 += existing > 0 ? squares : A(0);
  }
  const A correction = m1 * inverse;
  const A remaining = fma(-m1, correction, m2);
  return {mean + correction, remaining < 0 ? A(0) : remaining, static_cast<A>(count)};
}

template <class A>
__device__ __forceinline__ A rstd_of(const Moments<A>& moments, A eps) {
  return rsqrt(moments.m2 / moments.count + eps);
}

// Writes y for a tile. The pointers are those of the row, or of the piece of it that `share` counts
// within. A missing weight is one and a missing bias zero: exact, and without a branch.
template <class A, class X, class Y, class W, int kChunks, bool kVectorized>
__device__ __forceinline__ void apply_tile(const Tile<X, kChunks, kChunkColumns<X>>& tile,
                                           const Share<X, kVectorized>& share, A mean, A rstd,
                                           const W* weight, const W* bias, Y* y) {
  constexpr int kColumns = kChunkColumns<X>;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const int count = share.count(k);
    const int column = share.column(k);
    Pack<W, kColumns> w = fill_pack<W, kColumns>(1);
    Pack<W, kColumns> b = fill_pack<W, kColumns>(0);
    load_pack<kVectorized>(w, weight + column, weight == nullptr ? 0 : count);
    load_pack<kVectorized>(b, bias + column, bias == nullptr ? 0 : count);
    Pack<Y, kColumns> out;
    const auto value = [&](int i) {
      const A xhat = (tile.template get<A>(k, i) - mean) * rstd;
      return fma(xhat, w.template get<A>(i), b.template get<A>(i));
    };
#pragma unroll
    for (int i = 0; i < kColumns; i += 2) out.set_pair(i, value(i), value(i + 1));
    store_pack<kVectorized>(y + column, out, count);
  }
}

template <class X, class Y, class W, int kChunks, bool kCluster, bool kVectorized>
__global__ void __launch_bounds__(kMaxThreadsPerRow)
    forward_rows(const ForwardParameters<X, Y, W> p) {
  using A = Accumulator<X>;
  constexpr int kColumns = kChunkColumns<X>;
  using Reducer = RowReducer<Moments<A>, kCluster>;
  __shared__ typename Reducer::Storage storage;
  Reducer reducer(storage, p.cluster_size);

  const int64_t row =
      static_cast<int64_t>(kCluster ? blockIdx.x / p.cluster_size : blockIdx.x) * blockDim.y +
      threadIdx.y;
  const bool active = row < p.rows;
  const Piece piece = block_piece<kColumns, kChunks, kCluster>(p.cols);
  const Share<X, kVectorized> share{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                                    piece.cols};

  Tile<X, kChunks, kColumns> x;
  x.load(active ? p.x + row * p.x_row_stride + piece.begin : nullptr, share);
  const Moments<A> moments = reducer.reduce(tile_moments<A>(x, share));
  if (!active) return;
  const A rstd = rstd_of(moments, p.eps);
  apply_tile<A>(
      x, share, moments.mean, rstd, p.weight == nullptr ? nullptr : p.weight + piece.begin,
      p.bias == nullptr ? nullptr : p.bias + piece.begin, p.y + row * p.cols + piece.begin);
  if (threadIdx.x == 0 && piece.begin == 0) {
    p.mean[row] = moments.mean;
    p.rstd[row] = rstd;
  }
}

template <class X, class Y, class W, bool kVectorized>
__global__ void __launch_bounds__(kSegmentThreads)
    forward_segment_moments(const ForwardParameters<X, Y, W> p) {
  using A = Accumulator<X>;
  using Reducer = RowReducer<Moments<A>, false>;
  __shared__ typename Reducer::Storage storage;
  Reducer reducer(storage, 1);
  const Segment<X, kForwardChunks, kVectorized> segment(p.cols, p.segments);
  Tile<X, kForwardChunks, kChunkColumns<X>> x;
  x.load(p.x + segment.row * p.x_row_stride + segment.begin, segment.share);
  const Moments<A> moments = reducer.reduce(tile_moments<A>(x, segment.share));
  if (threadIdx.x == 0) p.segment_moments[blockIdx.x] = moments;
}

template <class X, class Y, class W, bool kVectorized>
__global__ void __launch_bounds__(kSegmentThreads)
    forward_segment_apply(const ForwardParameters<X, Y, W> p) {
  using A = Accumulator<X>;
  const Segment<X, kForwardChunks, kVectorized> segment(p.cols, p.segments);
  Tile<X, kForwardChunks, kChunkColumns<X>> x;
  x.load(p.x + segment.row * p.x_row_stride + segment.begin, segment.share);
  const Moments<A> moments =
      reduce_array(p.segment_moments + segment.row * p.segments, static_cast<int>(p.segments));
  const A rstd = rstd_of(moments, p.eps);
  apply_tile<A>(x, segment.share, moments.mean, rstd,
                p.weight == nullptr ? nullptr : p.weight + segment.begin,
                p.bias == nullptr ? nullptr : p.bias + segment.begin,
                p.y + segment.row * p.cols + segment.begin);
  if (threadIdx.x == 0 && segment.index == 0) {
    p.mean[segment.row] = moments.mean;
    p.rstd[segment.row] = rstd;
  }
}

template <bool kVectorized, class X, class Y, class W>
cudaError_t launch_forward(const ForwardParameters<X, Y, W>& p, const ForwardPlan& plan,
                           cudaStream_t stream) {
  const dim3 threads(plan.threads_per_row, plan.rows_per_block);
  const auto launch_rows = [&](auto kernel) {
    return launch(kernel, plan.blocks, threads, plan.cluster_size, stream, p);
  };
  switch (plan.kernel) {
    case Kernel::kRows:
      switch (plan.chunks_per_thread) {
        case 1:
          return launch_rows(forward_rows<X, Y, W, 1, false, kVectorized>);
        case 2:
          return launch_rows(forward_rows<X, Y, W, 2, false, kVectorized>);
        case 4:
          return launch_rows(forward_rows<X, Y, W, 4, false, kVectorized>);
        case kForwardChunks:
          return launch_rows(forward_rows<X, Y, W, kForwardChunks, false, kVectorized>);
        default:
          return cudaErrorInvalidValue;
      }
    case Kernel::kCluster:
      return launch_rows(forward_rows<X, Y, W, kForwardChunks, true, kVectorized>);
    case Kernel::kSplit: {
      const cudaError_t error = launch_rows(forward_segment_moments<X, Y, W, kVectorized>);
      if (error != cudaSuccess) return error;
      return launch_rows(forward_segment_apply<X, Y, W, kVectorized>);
    }
  }
  return cudaErrorInvalidValue;
}

// Rows of X: finds the types of y and the parameters, and launches.
template <class X>
cudaError_t forward_of(const ForwardArgs& args, const ForwardPlan& plan, void* workspace,
                       cudaStream_t stream) {
  using A = Accumulator<X>;
  const DType parameter_dtype = args.weight != nullptr ? args.weight_dtype : args.bias_dtype;
  return visit_other<X>(args.y_dtype, [&](auto y_type) {
    using Y = typename decltype(y_type)::type;
    return visit_parameter<X>(parameter_dtype, [&](auto parameter_type) {
      using W = typename decltype(parameter_type)::type;
      ForwardParameters<X, Y, W> p;
      p.rows = args.rows;
      p.cols = args.cols;
      p.eps = static_cast<A>(args.eps);
      p.x = static_cast<const X*>(args.x);
      p.x_row_stride = args.x_row_stride;
      p.weight = static_cast<const W*>(args.weight);
      p.bias = static_cast<const W*>(args.bias);
      p.y = static_cast<Y*>(args.y);
      p.mean = static_cast<A*>(args.mean);
      p.rstd = static_cast<A*>(args.rstd);
      p.segment_moments = static_cast<Moments<A>*>(workspace);
      p.segments = plan.segments;
      p.cluster_size = plan.cluster_size;
      return plan.vectorized ? launch_forward<true>(p, plan, stream)
                             : launch_forward<false>(p, plan, stream);
    });
  });
}

// One instantiation file per dtype of x.
extern template cudaError_t forward_of<float>(const ForwardArgs&, const ForwardPlan&, void*,
                                              cudaStream_t);
extern template cudaError_t forward_of<Half>(const ForwardArgs&, const ForwardPlan&, void*,
                                             cudaStream_t);
extern template cudaError_t forward_of<BFloat16>(const ForwardArgs&, const ForwardPlan&, void*,
                                                 cudaStream_t);
extern template cudaError_t forward_of<double>(const ForwardArgs&, const ForwardPlan&, void*,
                                               cudaStream_t);

}  // namespace fastnorm::cuda
