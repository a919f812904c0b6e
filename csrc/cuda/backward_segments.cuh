// The backward of rows of any width, cut into segments: backward_segment_sums, then
// backward_segment_apply, which reads x and dy again; dw and db come from weight_grads.cuh.
#pragma once

#include "backward_rows.cuh"

namespace fastnorm::cuda {

template <class X, class DY, class W, bool kVectorized>
__global__ void __launch_bounds__(kSegmentThreads)
    backward_segment_sums(const BackwardParameters<X, DY, W> p) {
  using A = Accumulator<X>;
  using Reducer = RowReducer<Sums<A>, false>;
  __shared__ typename Reducer::Storage storage;
  Reducer reducer(storage, kSegmentThreads, 1);
  const Segment<X, kBackwardChunks<X>, kVectorized> segment(p.cols, p.segments);
  const W* const weights = p.weight == nullptr ? nullptr : p.weight + segment.begin;
  const auto weight = [&](int k) {
    return load_weight_chunk<kVectorized>(weights, segment.share, k);
  };
  BackwardTile<X, DY, kVectorized> tile;
  tile.x.load_by_warps(p.x + segment.row * p.x_row_stride + segment.begin, segment.share, p.x_end);
  tile.dy.load_by_warps(p.dy + segment.row * p.dy_row_stride + segment.begin, segment.share,
                        p.dy_end);
  const Sums<A> mine = tile.sums(segment.share, p.mean[segment.row], p.rstd[segment.row], weight);
  const Sums<A> sums = reducer.reduce(sum_lanes(mine, kWarpSize));
  if (threadIdx.x == 0) p.segment_sums[blockIdx.x] = sums;
}

template <class X, class DY, class W, bool kVectorized>
__global__ void __launch_bounds__(kSegmentThreads)
    backward_segment_apply(const BackwardParameters<X, DY, W> p) {
  using A = Accumulator<X>;
  const Segment<X, kBackwardChunks<X>, kVectorized> segment(p.cols, p.segments);
  // The last rows first, of which x and dy may still be in the L2 cache.
  const int64_t row = p.rows - 1 - segment.row;
  const W* const weights = p.weight == nullptr ? nullptr : p.weight + segment.begin;
  const auto weight = [&](int k) {
    return load_weight_chunk<kVectorized>(weights, segment.share, k);
  };
  BackwardTile<X, DY, kVectorized> tile;
  tile.x.load_by_warps(p.x + row * p.x_row_stride + segment.begin, segment.share, p.x_end);
  tile.dy.load_by_warps(p.dy + row * p.dy_row_stride + segment.begin, segment.share, p.dy_end);
  const Sums<A> sums =
      reduce_array(p.segment_sums + row * p.segments, static_cast<int>(p.segments));
  const Sums<A> means = sums.scaled(p.inverse_cols);
  const A mean = p.mean[row], rstd = p.rstd[row];
  using Writer = RowWriter<X, kBackwardChunks<X>, kChunkColumns<X>, kVectorized>;
  __shared__ typename Writer::Storage writer_storage;
  const Writer writer{writer_storage};
  writer.write(p.dx + row * p.cols + segment.begin, true, segment.share,
               [&](int k) { return tile.dx(k, mean, rstd, means, weight(k)); });
}

}  // namespace fastnorm::cuda
