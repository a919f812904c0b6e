// The columns that each warp has of a row that ends within a chunk: steps of pairs of columns.
#pragma once

#include "numeric.cuh"

namespace fastnorm::cuda {

// The first warps have p.warp_steps steps each, those from p.first_longer_warp on one more.
template <class Parameters>
void share_out_runs(Parameters& p, int warps) {
  constexpr int64_t kStep = 2 * kWarpSize;
  const int steps = static_cast<int>((p.cols + kStep - 1) / kStep);
  p.warp_steps = steps / warps;
  p.first_longer_warp = warps - steps % warps;
}

// The column where the run of the row's warp w begins.
template <class Parameters>
__device__ __forceinline__ int begin_of_warp_run(const Parameters& p, int w) {
  const int steps = w * p.warp_steps + max(0, w - p.first_longer_warp);
  return min(static_cast<int>(p.cols), steps * 2 * kWarpSize);
}

}  // namespace fastnorm::cuda
