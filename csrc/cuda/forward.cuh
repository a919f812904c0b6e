// The forward kernels: y, mean and rstd of rows of X. Each reads a row once: it stays packed in the
// registers of the threads that hold it.
//
// forward_short_rows: a row in the lanes of a warp or fewer; two sums over the lanes.
// forward_rows: a row in several warps, or a cluster of blocks; each thread takes the two-pass
// moments of its own columns, and one reduction merges them.
// Rows too long for that are cut into segments: forward_segment_moments reads them and leaves their
// moments in the workspace, forward_segment_apply merges those and reads the row again.
#pragma once

#include <algorithm>

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
  A inverse_cols;  // infinite for no columns: their variance is not a number
  A chunk_share;   // of a chunk in the mean; the mean of no columns is zero
  const X* x;
  const X* x_end;  // of the last row
  int64_t x_row_stride;
  const W* weight;
  const W* bias;
  Y* y;
  A* mean;
  A* rstd;
  Moments<A>* segment_moments;  // [rows, segments], of kSplit
  int64_t segments;
  int cluster_size;
  bool full;  // every thread has all of its chunks, whole
};

// The mean of 2, 4 or 8 numbers, as a tree: exact where all of them are equal, and safe from
// overflow, for they are divided first.
template <class A, int kCount>
__device__ __forceinline__ A tree_mean(A (&values)[kCount]) {
  constexpr A kShare = A(1.0 / kCount);
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    values[i] = fma(values[i], kShare, values[i + kCount / 2] * kShare);
  }
#pragma unroll
  for (int stride = kCount / 4; stride > 0; stride /= 2) {
#pragma unroll
    for (int i = 0; i < stride; ++i) values[i] += values[i + stride];
  }
  return values[0];
}

// Mean and sum of squared differences of a chunk that exists whole or not at all.
template <class A, class X, int kColumns>
__device__ __forceinline__ Moments<A> chunk_moments(const Pack<X, kColumns>& chunk, bool exists) {
  A values[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) values[i] = chunk.template get<A>(i);
  const A mean = tree_mean(values);
  A m2 = 0;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const A delta = chunk.template get<A>(i) - mean;
    m2 = fma(delta, delta, m2);
  }
  return {mean, m2, exists ? A(kColumns) : A(0)};
}

// The same where the first `left` of its columns exist, the end of a row. Differences from the
// first column, so that equal ones have no variance.
template <class A, class X, int kColumns>
__device__ __forceinline__ Moments<A> partial_chunk_moments(const Pack<X, kColumns>& chunk,
                                                            int left) {
  const A first = chunk.template get<A>(0);
  A sum = 0;
#pragma unroll
  for (int i = 1; i < kColumns; ++i) sum += i < left ? chunk.template get<A>(i) - first : A(0);
  const A mean = first + sum / static_cast<A>(left);
  A m2 = 0;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const A delta = i < left ? chunk.template get<A>(i) - mean : A(0);
    m2 = fma(delta, delta, m2);
  }
  return {mean, m2, static_cast<A>(left)};
}

// Moments of a thread's own columns: two passes over each chunk, merged as a tree. As a chain over
// all columns with a correction of its rounding, the same cost 13 % more time at 16384 x 4096
// bfloat16 on an H200.
template <class A, class X, int kChunks, bool kVectorized>
__device__ __forceinline__ Moments<A> tile_moments(const Tile<X, kChunks, kChunkColumns<X>>& tile,
                                                   const Share<X, kVectorized>& share) {
  Moments<A> moments[kChunks];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    moments[k] = chunk_moments<A>(tile.chunks[k], share.left(k) > 0);
  }
  if (share.template has_partial_chunk<kChunks>()) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int left = share.left(k);
      if (left > 0 && left < kChunkColumns<X>) {
        moments[k] = partial_chunk_moments<A>(tile.chunks[k], left);
      }
    }
  }
  if (share.left(kChunks - 1) >= kChunkColumns<X>) {
#pragma unroll
    for (int stride = kChunks / 2; stride > 0; stride /= 2) {
      const A half_count = A(kChunkColumns<X> / 2) * A(kChunks / 2 / stride);
#pragma unroll
      for (int k = 0; k < stride; ++k) {
        moments[k].merge_equal(moments[k + stride].mean, moments[k + stride].m2, half_count);
      }
    }
  } else {
#pragma unroll
    for (int stride = kChunks / 2; stride > 0; stride /= 2) {
#pragma unroll
      for (int k = 0; k < stride; ++k) moments[k].merge(moments[k + stride]);
    }
  }
  return moments[0];
}

template <class A>
__device__ __forceinline__ A rstd_of(const Moments<A>& moments, A eps) {
  return rsqrt(moments.m2 / moments.count + eps);
}

// A thread's chunks of weight and bias. A missing weight is one and a missing bias zero: exact, and
// without a branch.
template <class W, int kChunks, int kColumns>
struct ParameterTile {
  Pack<W, kColumns> weight[kChunks];
  Pack<W, kColumns> bias[kChunks];

  // Rows may be unaligned and the parameters not: whole chunks of them move by wide accesses then.
  template <class RowShare>
  __device__ __forceinline__ void load(const W* weights, const W* biases, const RowShare& share,
                                       int k) {
    load_wide_or_nothing(weights, biases, share, k);
    if constexpr (!RowShare::kWhole) {
      if (needs_more(weights, biases, share.left(k) > 0 && share.left(k) < kColumns)) {
        load_rest(weights, biases, share, k);
      }
    }
  }

  // All of them, behind one branch at the most.
  template <class RowShare>
  __device__ __forceinline__ void load(const W* weights, const W* biases, const RowShare& share) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) load_wide_or_nothing(weights, biases, share, k);
    if constexpr (!RowShare::kWhole) {
      if (needs_more(weights, biases, share.template has_partial_chunk<kChunks>())) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) load_rest(weights, biases, share, k);
      }
    }
  }

 private:
  static __device__ __forceinline__ bool is_aligned(const W* parameters) {
    return reinterpret_cast<uintptr_t>(parameters) % alignof(Pack<W, kColumns>) == 0;
  }

  static __device__ __forceinline__ bool needs_more(const W* weights, const W* biases,
                                                    bool partial) {
    return partial || !is_aligned(weights) || !is_aligned(biases);
  }

  template <class RowShare>
  __device__ __forceinline__ void load_wide_or_nothing(const W* weights, const W* biases,
                                                       const RowShare& share, int k) {
    const auto load = [&](const W* parameters, Accumulator<W> absent) {
      const bool wide = RowShare::kWhole ? share.left(k) > 0
                                         : share.left(k) >= kColumns && is_aligned(parameters);
      return load_wide<W, kColumns>(parameters + share.column(k), parameters != nullptr && wide,
                                    absent);
    };
    weight[k] = load(weights, 1);
    bias[k] = load(biases, 0);
  }

  template <class RowShare>
  __device__ __forceinline__ void load_rest(const W* weights, const W* biases,
                                            const RowShare& share, int k) {
    const int column = share.column(k), left = share.left(k);
    if (weights != nullptr) weight[k] = load_unaligned<W, kColumns>(weights + column, left);
    if (biases != nullptr) bias[k] = load_unaligned<W, kColumns>(biases + column, left);
  }
};

// Weight and bias can be fetched before the reduction's barrier if they take no more registers than
// a row of X: at 32768 x 4096 bfloat16 on an H200, 135 us instead of 138 us. With four chunks per
// thread instead of eight that loses (155 us instead of 134 us at 65536 x 2048): fewer blocks fit.
template <class X, class W>
constexpr bool kEarlyParameters = sizeof(W) <= sizeof(X);

// y of one chunk.
template <class Y, class A, class X, class W, int kColumns>
__device__ __forceinline__ Pack<Y, kColumns> normalize(const Pack<X, kColumns>& x, A mean, A rstd,
                                                       const Pack<W, kColumns>& weight,
                                                       const Pack<W, kColumns>& bias) {
  Pack<Y, kColumns> y;
  const auto value = [&](int i) {
    const A xhat = (x.template get<A>(i) - mean) * rstd;
    return fma(xhat, weight.template get<A>(i), bias.template get<A>(i));
  };
#pragma unroll
  for (int i = 0; i < kColumns; i += 2) y.set_pair(i, value(i), value(i + 1));
  return y;
}

// Blocks that an SM must hold: 80 registers per thread, or 128 where that would spill.
template <class X, class W, bool kVectorized>
constexpr int kShortRowBlocks = kVectorized && kEarlyParameters<X, W> ? 12 : 8;

// kLanes is a constant because the loops over it must unroll: with blockDim.x instead 174764 x 768
// bfloat16 took 148 us on an H200, so 135 us.
template <class X, class Y, class W, int kLanes, int kChunks, bool kVectorized>
__global__ void __launch_bounds__(kShortRowThreads, (kShortRowBlocks<X, W, kVectorized>))
    forward_short_rows(const ForwardParameters<X, Y, W> p) {
  using A = Accumulator<X>;
  constexpr int kColumns = kChunkColumns<X>;
  constexpr int kRows = kShortRowChunks / kChunks;  // four chunks in flight per thread
  constexpr int kTeams = kWarpSize / kLanes;        // rows side by side in a warp
  const int team = threadIdx.y % kTeams;
  const int warp = threadIdx.y / kTeams;
  const int warps = kShortRowThreads / kWarpSize;
  const int64_t warp_row = (static_cast<int64_t>(blockIdx.x) * warps + warp) * (kTeams * kRows);
  const Share<X, kVectorized> share{static_cast<int>(threadIdx.x), kLanes,
                                    static_cast<int>(p.cols)};

  Tile<X, kChunks, kColumns> x[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = warp_row + r * kTeams + team;
    x[r].load(row < p.rows ? p.x + row * p.x_row_stride : nullptr, share);
  }
  ParameterTile<W, kChunks, kColumns> parameters;
  // One by one: each team has a partial chunk, but only as its last one.
  const auto load_parameters = [&] {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) parameters.load(p.weight, p.bias, share, k);
  };
  if constexpr (kEarlyParameters<X, W>) load_parameters();

  // Means of chunks are taken relative to the row's first element, and so is their sum: a constant
  // row has exactly its value as mean and exactly no variance.
  A first[kRows], sums[kRows], mean[kRows], rstd[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    first[r] = __shfl_sync(kAllLanes, x[r].template get<A>(0, 0), 0, kLanes);
    sums[r] = 0;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int left = share.left(k);
      A values[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        values[i] = x[r].template get<A>(k, i);
        if constexpr (!kVectorized) values[i] = i < left ? values[i] : first[r];
      }
      const A difference = tree_mean(values) - first[r];
      sums[r] += left > 0 ? difference : A(0);
    }
  }
  sum_lanes<kLanes>(sums);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    mean[r] = fma(sums[r], p.chunk_share, first[r]);
    sums[r] = 0;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int left = share.left(k);
      A squares = 0;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        A delta = x[r].template get<A>(k, i) - mean[r];
        if constexpr (!kVectorized) delta = i < left ? delta : A(0);
        squares = fma(delta, delta, squares);
      }
      sums[r] += left > 0 ? squares : A(0);
    }
  }
  sum_lanes<kLanes>(sums);
#pragma unroll
  for (int r = 0; r < kRows; ++r) rstd[r] = rsqrt(fma(sums[r], p.inverse_cols, p.eps));

  if constexpr (!kEarlyParameters<X, W>) load_parameters();
  using Writer = ShortRowWriter<Y, kChunks, kColumns, kVectorized>;
  __shared__ typename Writer::Storage storage[kShortRowThreads / kWarpSize];
  const Writer writer{storage[warp], p.y, p.rows, kTeams, team};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t first_row = warp_row + r * kTeams;
    const int64_t row = first_row + team;
    writer.write(first_row, share, [&](int k) {
      return normalize<Y>(x[r].chunks[k], mean[r], rstd[r], parameters.weight[k],
                          parameters.bias[k]);
    });
    if (threadIdx.x == 0 && row < p.rows) {
      p.mean[row] = mean[r];
      p.rstd[row] = rstd[r];
    }
  }
}

template <int kThreads>
constexpr int kMostThreads = kThreads == 0 ? kMaxThreadsPerRow : kThreads;

// Threads that an SM must hold: 128 registers for each, or 168 where that would spill.
template <class X, class W, bool kVectorized>
constexpr int kResidentThreads = kVectorized && kEarlyParameters<X, W> ? 512 : 384;

// kThreads is the number of threads per block, or zero where it is known at run time only: with a
// constant, 32768 x 4096 bfloat16 took 134.5 us on an H200 instead of 139 us. Rows that are not
// aligned gain nothing by it.
template <class X, class Y, class W, int kThreads, int kChunks, bool kCluster, bool kVectorized>
__global__ void __launch_bounds__(kMostThreads<kThreads>,
                                  (std::max(1, kResidentThreads<X, W, kVectorized> /
                                                   kMostThreads<kThreads>)))
    forward_rows(const ForwardParameters<X, Y, W> p) {
  using A = Accumulator<X>;
  const int threads = kThreads == 0 ? blockDim.x : kThreads;
  constexpr int kColumns = kChunkColumns<X>;
  using Reducer = RowReducer<Moments<A>, kCluster, kCluster && kThreads != 0>;
  using Writer = RowWriter<Y, kChunks, kColumns, kVectorized>;
  __shared__ typename Reducer::Storage storage;
  __shared__ typename Writer::Storage writer_storage;
  Reducer reducer(storage, threads, p.cluster_size);

  const int64_t row = kCluster ? blockIdx.x / p.cluster_size : blockIdx.x;
  const Piece piece = block_piece<kColumns, kChunks, kCluster>(p.cols, threads);
  const Share<X, kVectorized> share{static_cast<int>(threadIdx.x), threads, piece.cols};
  const W* const weight = p.weight == nullptr ? nullptr : p.weight + piece.begin;
  const W* const bias = p.bias == nullptr ? nullptr : p.bias + piece.begin;

  Tile<X, kChunks, kColumns> x;
  x.load_by_warps(p.x + row * p.x_row_stride + piece.begin, share, p.x_end);
  ParameterTile<W, kChunks, kColumns> parameters;
  constexpr bool kEarly = kVectorized && kEarlyParameters<X, W> && kChunks == kForwardChunks;
  const auto load_early = [&] {
    if constexpr (kEarly) parameters.load(weight, bias, share);
  };
  const Moments<A> mine = tile_moments<A>(x, share);
  const Moments<A> moments =
      reducer.reduce(p.full ? reduce_warp_equal(mine) : reduce_warp(mine), load_early);
  const A rstd = rstd_of(moments, p.eps);
  Y* const y = p.y + row * p.cols + piece.begin;
  const Writer writer{writer_storage};
  writer.write(y, true, share, [&](int k) {
    if constexpr (!kEarly) parameters.load(weight, bias, share, k);
    return normalize<Y>(x.chunks[k], moments.mean, rstd, parameters.weight[k], parameters.bias[k]);
  });
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
  Reducer reducer(storage, kSegmentThreads, 1);
  const Segment<X, kForwardChunks, kVectorized> segment(p.cols, p.segments);
  Tile<X, kForwardChunks, kChunkColumns<X>> x;
  x.load_by_warps(p.x + segment.row * p.x_row_stride + segment.begin, segment.share, p.x_end);
  const Moments<A> mine = tile_moments<A>(x, segment.share);
  const Moments<A> moments = reducer.reduce(reduce_warp(mine), [] {});
  if (threadIdx.x == 0) p.segment_moments[blockIdx.x] = moments;
}

template <class X, class Y, class W, bool kVectorized>
__global__ void __launch_bounds__(kSegmentThreads)
    forward_segment_apply(const ForwardParameters<X, Y, W> p) {
  using A = Accumulator<X>;
  constexpr int kColumns = kChunkColumns<X>;
  using Writer = RowWriter<Y, kForwardChunks, kColumns, kVectorized>;
  __shared__ typename Writer::Storage writer_storage;
  const Segment<X, kForwardChunks, kVectorized> segment(p.cols, p.segments);
  Tile<X, kForwardChunks, kColumns> x;
  x.load_by_warps(p.x + segment.row * p.x_row_stride + segment.begin, segment.share, p.x_end);
  const Moments<A> moments =
      reduce_array(p.segment_moments + segment.row * p.segments, static_cast<int>(p.segments));
  const A rstd = rstd_of(moments, p.eps);
  const Writer writer{writer_storage};
  ParameterTile<W, kForwardChunks, kColumns> parameters;
  const auto y = [&](int k) {
    parameters.load(p.weight == nullptr ? nullptr : p.weight + segment.begin,
                    p.bias == nullptr ? nullptr : p.bias + segment.begin, segment.share, k);
    return normalize<Y>(x.chunks[k], moments.mean, rstd, parameters.weight[k], parameters.bias[k]);
  };
  writer.write(p.y + segment.row * p.cols + segment.begin, true, segment.share, y);
  if (threadIdx.x == 0 && segment.index == 0) {
    p.mean[segment.row] = moments.mean;
    p.rstd[segment.row] = rstd;
  }
}

template <bool kVectorized, class X, class Y, class W>
cudaError_t launch_forward(const ForwardParameters<X, Y, W>& p, const ForwardPlan& plan,
                           cudaStream_t stream) {
  const dim3 threads(plan.threads_per_row, plan.rows_per_block / plan.rows_per_thread);
  const auto launch_rows = [&](auto kernel) {
    return launch(kernel, plan.blocks, threads, plan.cluster_size, stream, p);
  };
  switch (plan.kernel) {
    case Kernel::kShortRows:
      switch (plan.threads_per_row * 10 + plan.chunks_per_thread) {
        case 11:
          return launch_rows(forward_short_rows<X, Y, W, 1, 1, kVectorized>);
        case 12:
          return launch_rows(forward_short_rows<X, Y, W, 1, 2, kVectorized>);
        case 14:
          return launch_rows(forward_short_rows<X, Y, W, 1, 4, kVectorized>);
        case 24:
          return launch_rows(forward_short_rows<X, Y, W, 2, 4, kVectorized>);
        case 44:
          return launch_rows(forward_short_rows<X, Y, W, 4, 4, kVectorized>);
        case 84:
          return launch_rows(forward_short_rows<X, Y, W, 8, 4, kVectorized>);
        case 164:
          return launch_rows(forward_short_rows<X, Y, W, 16, 4, kVectorized>);
        case 323:
          return launch_rows(forward_short_rows<X, Y, W, 32, 3, kVectorized>);
        case 324:
          return launch_rows(forward_short_rows<X, Y, W, 32, 4, kVectorized>);
        default:
          return cudaErrorInvalidValue;
      }
    case Kernel::kRows:
      if constexpr (kVectorized) {
        switch (plan.threads_per_row * 10 + plan.chunks_per_thread) {
          case 644:
            return launch_rows(forward_rows<X, Y, W, 64, 4, false, true>);
          case 648:
            return launch_rows(forward_rows<X, Y, W, 64, 8, false, true>);
          case 1288:
            return launch_rows(forward_rows<X, Y, W, 128, 8, false, true>);
          case 2568:
            return launch_rows(forward_rows<X, Y, W, 256, 8, false, true>);
          case 5128:
            return launch_rows(forward_rows<X, Y, W, 512, 8, false, true>);
        }
      }
      return launch_rows(plan.chunks_per_thread == kForwardChunks
                             ? forward_rows<X, Y, W, 0, kForwardChunks, false, kVectorized>
                             : forward_rows<X, Y, W, 0, kForwardChunks / 2, false, kVectorized>);
    case Kernel::kCluster:
      if constexpr (kVectorized) {
        if (plan.threads_per_row == 256) {
          return launch_rows(forward_rows<X, Y, W, 256, kForwardChunks, true, true>);
        }
      }
      return launch_rows(forward_rows<X, Y, W, 0, kForwardChunks, true, kVectorized>);
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
      p.inverse_cols = static_cast<A>(1.0 / static_cast<double>(args.cols));
      p.chunk_share = args.cols == 0 ? A(0) : kChunkColumns<X> * p.inverse_cols;
      p.x = static_cast<const X*>(args.x);
      p.x_row_stride = args.x_row_stride;
      p.x_end = p.x + (args.rows - 1) * args.x_row_stride + args.cols;
      p.weight = static_cast<const W*>(args.weight);
      p.bias = static_cast<const W*>(args.bias);
      p.y = static_cast<Y*>(args.y);
      p.mean = static_cast<A*>(args.mean);
      p.rstd = static_cast<A*>(args.rstd);
      p.segment_moments = static_cast<Moments<A>*>(workspace);
      p.segments = plan.segments;
      p.cluster_size = plan.cluster_size;
      p.full = plan.full;
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
