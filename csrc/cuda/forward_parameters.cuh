// What the forward kernels take, and the launchers of those that have sources of their own.
#pragma once

#include "layer_norm_cuda.h"
#include "moments.cuh"

namespace fastnorm::cuda {

// The blocks of a launch that find a place at once begin in turns, if there are others; the first
// of all sends for weight and bias.
struct FirstBlocks {
  unsigned blocks = 0;  // none: nobody waits, or sends
  unsigned turn = 1;    // blocks that begin together
  unsigned cycles = 0;  // from one turn to the next
};

// No more than 128 bytes where A is float: with more, kernels of 40 registers spill (nvcc 13.0).
template <class X, class Y, class W>
struct ForwardParameters {
  using A = Accumulator<X>;
  int64_t rows, cols;
  A eps;
  A inverse_cols;
  int segments;  // of a row, of kSplit
  bool plain;    // weight and bias are there, and aligned
  const X* x;
  const X* x_end;  // of the last row
  int64_t x_row_stride;
  const W* weight;
  const W* bias;
  Y* y;
  A* mean;  // null, and so is rstd, where y alone is asked for
  A* rstd;
  SetMoments<A>* segment_moments;  // [rows, segments]
  int cluster_size;
  // Of kElements in long rows; warp_steps of very short ones, too: tiles of a warp.
  int warp_steps, first_longer_warp;
  FirstBlocks first;  // of kCluster one, which sends; not of kSplit
};

// Stores mean and rstd of a row, if they are asked for.
template <class P, class A>
__device__ __forceinline__ void put_statistics(const P& p, int64_t row, A mean, A rstd) {
  if (p.mean == nullptr) return;
  p.mean[row] = mean;
  p.rstd[row] = rstd;
}

// Of forward_elements.cuh.
template <class X, class W>
cudaError_t launch_elements(const ForwardParameters<X, X, W>& p, const ForwardPlan& plan,
                            cudaStream_t stream);

// Of forward_wide_stream.cuh: wide rows by blocks that stay.
template <class X>
cudaError_t launch_forward_wide(const ForwardArgs& args, const ForwardPlan& plan,
                                cudaStream_t stream);

// Of forward_ring.cuh.
template <class X>
cudaError_t launch_forward_ring(const ForwardArgs& args, const ForwardPlan& plan, void* workspace,
                                cudaStream_t stream);

}  // namespace fastnorm::cuda
