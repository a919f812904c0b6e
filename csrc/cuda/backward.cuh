// The backward of one dtype of x and dy: launches the kernels that a plan names, for dx and for dw
// and db.
#pragma once

#include "backward_ahead.cuh"
#include "backward_segments.cuh"
#include "weight_grads.cuh"

namespace fastnorm::cuda {

template <bool kVectorized, class X, class DY, class W>
cudaError_t launch_dx(const BackwardParameters<X, DY, W>& p, const BackwardPlan& plan,
                      cudaStream_t stream) {
  const dim3 threads(plan.threads_per_row, plan.rows_per_block);
  const auto launch_rows = [&](auto kernel) {
    return Launch(plan.blocks, threads, stream).in_clusters(plan.cluster_size)(kernel, p);
  };
  const bool fused = plan.weight_grads == WeightGrads::kFused;
  if constexpr (std::is_same_v<X, double>) {
    if (plan.copies_ahead) return launch_rows_ahead<kVectorized>(p, plan, stream);
  }
  switch (plan.kernel) {
    case Kernel::kShortRows:  // of the forward alone
    case Kernel::kElements:   // launched elsewhere
    case Kernel::kFewRows:
    case Kernel::kFewElements:
    case Kernel::kRing:
      return cudaErrorInvalidValue;
    case Kernel::kRows:
      return launch_rows(fused ? backward_rows<X, DY, W, true, false, kVectorized>
                               : backward_rows<X, DY, W, false, false, kVectorized>);
    case Kernel::kCluster:
      return launch_rows(fused ? backward_rows<X, DY, W, true, true, kVectorized>
                               : backward_rows<X, DY, W, false, true, kVectorized>);
    case Kernel::kSplit: {
      const cudaError_t error = launch_rows(backward_segment_sums<X, DY, W, kVectorized>);
      if (error != cudaSuccess) return error;
      return launch_rows(backward_segment_apply<X, DY, W, kVectorized>);
    }
  }
  return cudaErrorInvalidValue;
}

// The lanes or warps of a block that hold a row of kFewRows or kRing.
template <class Parameters>
void set_span(Parameters& p, const BackwardPlan& plan) {
  const bool several_warps = plan.cluster_size > 1 || plan.threads_per_row > kWarpSize;
  p.lanes = several_warps ? kWarpSize : plan.threads_per_row;
  p.teams = rows_per_warp(plan);
  p.pitch = kWarpSize / p.teams;
  p.warps = several_warps ? plan.threads_per_row / kWarpSize : 1;
  p.by_pitch = Divisor(p.pitch);
  p.by_warps = Divisor(p.warps);
  p.run_columns = plan.run_columns;
  p.cluster_size = plan.cluster_size;
}

template <class X>
FewRowsParameters<X> few_rows_parameters(const BackwardArgs& args, const BackwardPlan& plan) {
  FewRowsParameters<X> p;
  p.rows = args.rows;
  p.cols = args.cols;
  p.inverse_cols = 1.0f / static_cast<float>(args.cols);
  p.x = static_cast<const X*>(args.x);
  p.x_row_stride = args.x_row_stride;
  p.dy = static_cast<const X*>(args.dy);
  p.dy_row_stride = args.dy_row_stride;
  p.mean = static_cast<const float*>(args.mean);
  p.rstd = static_cast<const float*>(args.rstd);
  p.weight = args.weight;
  p.dx = static_cast<X*>(args.dx);
  p.dw = args.dw;
  p.db = args.db;
  p.weight_dtype = args.weight_dtype;
  p.dw_dtype = args.weight_dtype;
  p.db_dtype = args.bias_dtype;
  set_span(p, plan);
  p.slices = plan.slices;
  p.tile_lanes = plan.tile_lanes;
  p.column_blocks = static_cast<int>(plan.column_blocks);
  p.clusters_of_tiles = p.column_blocks / few_rows_cluster(plan);
  p.block_rows = plan.rows_per_block;
  p.slice_rows = (args.rows + p.slices - 1) / p.slices;
  return p;
}

// dx from the ring, and with kFused the partial sums of dw and db.
template <class X, class DY>
cudaError_t stream_rows(const BackwardArgs& args, const BackwardPlan& plan, float* dw_partials,
                        float* db_partials, uint4* exchange, cudaStream_t stream) {
  RingParameters<X, DY> p;
  p.exchange = exchange;
  p.rows = args.rows;
  p.cols = args.cols;
  p.inverse_cols = 1.0f / static_cast<float>(args.cols);
  p.x = static_cast<const X*>(args.x);
  p.x_row_stride = args.x_row_stride;
  p.x_end = p.x + (args.rows - 1) * args.x_row_stride + args.cols;
  p.dy = static_cast<const DY*>(args.dy);
  p.dy_row_stride = args.dy_row_stride;
  p.dy_end = p.dy + (args.rows - 1) * args.dy_row_stride + args.cols;
  p.mean = static_cast<const float*>(args.mean);
  p.rstd = static_cast<const float*>(args.rstd);
  p.weight = args.weight;
  p.weight_dtype = args.weight_dtype;
  p.dx = static_cast<X*>(args.dx);
  const bool fused = plan.weight_grads == WeightGrads::kFused;
  p.dw_partials = fused ? dw_partials : nullptr;
  p.db_partials = fused ? db_partials : nullptr;
  set_span(p, plan);
  p.by_cluster_size = Divisor(plan.cluster_size);
  p.relays = Turns(p.warps);
  if (plan.cluster_size > 1 && plan.blocks * plan.cluster_size >= Divisor::kMost &&
      plan.kernel != Kernel::kFewElements) {
    return cudaErrorInvalidValue;  // no device runs so many at once
  }
  p.groups = block_threads(plan) / (p.warps * kWarpSize);
  p.merged = plan.merged;
  const int64_t units = (args.rows + p.teams - 1) / p.teams;
  p.unit_stride = (plan.blocks - plan.column_blocks) / plan.cluster_size * p.groups;
  const int64_t stride = p.unit_stride * p.teams;
  p.x_step = stride * args.x_row_stride * static_cast<int64_t>(sizeof(X));
  p.dy_step = stride * args.dy_row_stride * static_cast<int64_t>(sizeof(DY));
  p.dx_step = stride * args.cols * static_cast<int64_t>(sizeof(X));
  p.full_turns = static_cast<int>(units / p.unit_stride);
  p.last_turn = static_cast<int>(units % p.unit_stride);
  p.shares = plan.shares;
  p.share_turns = p.full_turns / plan.shares;
  p.brakes = plan.brakes;
  p.most_ahead = plan.most_ahead;
  if (plan.kernel == Kernel::kRing) {
    return plan.vectorized ? launch_ring<true>(p, plan, stream)
                           : launch_ring<false>(p, plan, stream);
  }
  if constexpr (std::is_same_v<X, DY>) {
    share_out_runs(p, p.warps * p.cluster_size);
    return launch_backward_elements(p, few_rows_parameters<X>(args, plan), plan, stream);
  }
  return cudaErrorInvalidValue;
}

// The same in as many launches as the plan has shares, each with some of the rows, and partial sums
// of its own. (A grid leaves them in one.)
template <class X, class DY>
cudaError_t stream_shares(const BackwardArgs& args, const BackwardPlan& plan, float* dw_partials,
                          float* db_partials, uint4* exchange, cudaStream_t stream) {
  const int64_t launches = plan.in_grid ? 1 : plan.shares;
  for (int64_t i = 0; i < launches; ++i) {
    const int64_t begin = args.rows * i / launches;
    BackwardArgs share = args;
    share.rows = args.rows * (i + 1) / launches - begin;
    share.x = static_cast<const X*>(args.x) + begin * args.x_row_stride;
    share.dy = static_cast<const DY*>(args.dy) + begin * args.dy_row_stride;
    share.mean = static_cast<const float*>(args.mean) + begin;
    share.rstd = static_cast<const float*>(args.rstd) + begin;
    share.dx = static_cast<X*>(args.dx) + begin * args.cols;
    const int64_t partial = plan.partials / launches * i * args.cols;
    const cudaError_t error = stream_rows<X, DY>(share, plan, dw_partials + partial,
                                                 db_partials + partial, exchange, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Types of x and dy whose rows stream through shared memory.
template <class X, class DY>
constexpr bool kRowsStream =
    !std::is_same_v<X, double> && (std::is_same_v<X, DY> || sizeof(DY) > sizeof(X));

// Rows of X: finds the types of dy and the weight, and launches what the plan asks for. The
// workspace holds the words of a grid's blocks, the partial sums of dw, those of db, then the
// segments' sums.
template <class X>
cudaError_t backward_of(const BackwardArgs& args, const BackwardPlan& plan, void* workspace,
                        cudaStream_t stream) {
  using A = Accumulator<X>;
  uint4* const exchange = static_cast<uint4*>(workspace);
  A* const behind =
      reinterpret_cast<A*>(exchange + (plan.in_grid ? plan.blocks * kGridExchanges : 0));
  const bool direct = plan.sums_are_results;
  const int64_t partial_sums = direct ? 0 : plan.partials * args.cols;
  A* const dw_partials = direct ? static_cast<A*>(args.dw) : behind;
  A* const db_partials = direct ? static_cast<A*>(args.db) : behind + partial_sums;
  Sums<A>* const segment_sums = reinterpret_cast<Sums<A>*>(behind + 2 * partial_sums);
  return visit_other<X>(args.dy_dtype, [&](auto dy_type) {
    using DY = typename decltype(dy_type)::type;
    cudaError_t error = cudaSuccess;
    if constexpr (std::is_same_v<X, DY> && !std::is_same_v<X, double>) {
      if (plan.kernel == Kernel::kFewRows) {
        return launch_few_rows(few_rows_parameters<DY>(args, plan), plan, stream);
      }
    }
    if (plan.dx && (plan.kernel == Kernel::kRing || plan.kernel == Kernel::kElements ||
                    plan.kernel == Kernel::kFewElements)) {
      error = cudaErrorInvalidValue;
      if constexpr (kRowsStream<X, DY>) {
        error = stream_shares<X, DY>(args, plan, dw_partials, db_partials, exchange, stream);
      }
    } else if (plan.dx) {
      error = visit_parameter<X>(args.weight_dtype, [&](auto parameter_type) {
        using W = typename decltype(parameter_type)::type;
        BackwardParameters<X, DY, W> p;
        p.rows = args.rows;
        p.cols = args.cols;
        p.inverse_cols = A(1) / static_cast<A>(args.cols);
        p.dy = static_cast<const DY*>(args.dy);
        p.dy_row_stride = args.dy_row_stride;
        p.dy_end = p.dy + (args.rows - 1) * args.dy_row_stride + args.cols;
        p.x = static_cast<const X*>(args.x);
        p.x_row_stride = args.x_row_stride;
        p.x_end = p.x + (args.rows - 1) * args.x_row_stride + args.cols;
        p.mean = static_cast<const A*>(args.mean);
        p.rstd = static_cast<const A*>(args.rstd);
        p.weight = static_cast<const W*>(args.weight);
        p.dx = static_cast<X*>(args.dx);
        p.dw_partials = dw_partials;
        p.db_partials = db_partials;
        p.segment_sums = segment_sums;
        p.segments = plan.segments;
        p.cluster_size = plan.cluster_size;
        return plan.vectorized ? launch_dx<true>(p, plan, stream)
                               : launch_dx<false>(p, plan, stream);
      });
    }
    const bool fused = plan.weight_grads == WeightGrads::kFused;
    const bool by_columns = plan.weight_grads == WeightGrads::kColumns;
    if (error != cudaSuccess || (!fused && !by_columns)) return error;
    if (by_columns) {
      error = launch_column_sums<X, DY>(args, plan, dw_partials, db_partials, stream);
      if (error != cudaSuccess) return error;
    }
    if (direct) return cudaSuccess;
    return finish_weight_grads<A>(args, plan, dw_partials, db_partials, stream);
  });
}

// One instantiation file per dtype of x.
extern template cudaError_t backward_of<float>(const BackwardArgs&, const BackwardPlan&, void*,
                                               cudaStream_t);
extern template cudaError_t backward_of<Half>(const BackwardArgs&, const BackwardPlan&, void*,
                                              cudaStream_t);
extern template cudaError_t backward_of<BFloat16>(const BackwardArgs&, const BackwardPlan&, void*,
                                                  cudaStream_t);
extern template cudaError_t backward_of<double>(const BackwardArgs&, const BackwardPlan&, void*,
                                                cudaStream_t);

}  // namespace fastnorm::cuda
