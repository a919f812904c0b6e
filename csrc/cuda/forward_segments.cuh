// The forward of rows of any width, cut into segments: forward_segment_moments reads them and
// leaves their moments in the workspace, forward_segment_apply merges those and reads the row
// again.
#pragma once

#include "forward_parameters.cuh"
#include "row_tile.cuh"

namespace fastnorm::cuda {

// Segments of kSplit: kSegmentThreads threads with kForwardChunks chunks each. Offsets are of 64
// bits, spans are relative to the segment.
template <class X>
struct ForwardSegment {
  using RowSpan = Span<X, kForwardChunks>;
  static constexpr int64_t kSize = int64_t{kSegmentThreads} / kWarpSize * RowSpan::kSize;
  int64_t row, index, begin;
  int cols;
  RowSpan span;

  __device__ __forceinline__ ForwardSegment(int64_t row_cols, int64_t segments)
      : row(blockIdx.x / segments),
        index(blockIdx.x - row * segments),
        begin(index * kSize),
        cols(static_cast<int>(min(kSize, row_cols - begin))) {
    const int warp_begin = warp_index() * RowSpan::kSize;
    span = {warp_begin, cols - warp_begin, static_cast<int>(threadIdx.x % kWarpSize)};
  }
};

template <class X, class Y, bool kVectorized>
using SegmentTile =
    RowTile<X, Y, kForwardChunks, kForwardChunks - kRegisterChunks, kVectorized, false>;

template <class X, class Y, class W, bool kVectorized>
__global__ void __launch_bounds__(kSegmentThreads)
    forward_segment_moments(const ForwardParameters<X, Y, W> p) {
  using A = Accumulator<X>;
  using RowSpan = Span<X, kForwardChunks>;
  extern __shared__ uint4 shared_chunks[];
  __shared__ SetMoments<A> warp_moments[kSegmentThreads / kWarpSize];
  const ForwardSegment<X> segment(p.cols, p.segments);
  SegmentTile<X, Y, kVectorized> tile(shared_chunks, segment.span);
  tile.load(p.x + segment.row * p.x_row_stride + segment.begin, p.x_end);
  const SetMoments<A> moments = tile.moments();
  if (segment.span.lane == 0) warp_moments[threadIdx.x / kWarpSize] = moments;
  __syncthreads();
  if (threadIdx.x >= kWarpSize) return;
  const SetMoments<A> merged = merge_sets(warp_moments, segment.cols, RowSpan::kSize,
                                          quotient(A(1), static_cast<A>(segment.cols)));
  if (threadIdx.x == 0) p.segment_moments[blockIdx.x] = merged;
}

template <class X, class Y, class W, bool kVectorized>
__global__ void __launch_bounds__(kSegmentThreads)
    forward_segment_apply(const ForwardParameters<X, Y, W> p) {
  using A = Accumulator<X>;
  extern __shared__ uint4 shared_chunks[];
  const ForwardSegment<X> segment(p.cols, p.segments);
  SegmentTile<X, Y, kVectorized> tile(shared_chunks, segment.span);
  tile.load(p.x + segment.row * p.x_row_stride + segment.begin, p.x_end);
  const SetMoments<A> moments =
      merge_many_sets<A, int64_t>(p.segment_moments + segment.row * p.segments, p.segments, p.cols,
                                  ForwardSegment<X>::kSize, p.inverse_cols);
  const A rstd = rstd_of(moments, p.inverse_cols, p.eps);
  tile.wait();
  const Standardizer<A> standardizer{rstd, moments.mean};
  tile.write(p.y + segment.row * p.cols + segment.begin, standardizer,
             p.weight == nullptr ? nullptr : p.weight + segment.begin,
             p.bias == nullptr ? nullptr : p.bias + segment.begin, p.plain);
  if (threadIdx.x == 0 && segment.index == 0) put_statistics(p, segment.row, moments.mean, rstd);
}

}  // namespace fastnorm::cuda
