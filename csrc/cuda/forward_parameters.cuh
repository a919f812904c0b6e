// What the forward kernels take, and the launchers of those that have sources of their own.
#pragma once

#include "layer_norm_cuda.h"
#include "moments.cuh"

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
  SetMoments<A>* segment_moments;  // [rows, segments], of kSplit
  int64_t segments;
  int cluster_size;
  int warp_steps, first_longer_warp;  // of kElements, in long rows
};

// Of forward_elements.cuh.
template <class X, class W>
cudaError_t launch_elements(const ForwardParameters<X, X, W>& p, const ForwardPlan& plan,
                            cudaStream_t stream);

// Of forward_ring.cuh.
template <class X>
cudaError_t launch_forward_ring(const ForwardArgs& args, const ForwardPlan& plan, void* workspace,
                                cudaStream_t stream);

}  // namespace fastnorm::cuda
