// The forward of rows of a few columns that end within a chunk (see tiny.cuh). y takes the place of
// x in shared memory and leaves it in whole granules.
#pragma once

#include "forward_start.cuh"
#include "tiny.cuh"

namespace fastnorm::cuda {

template <class X, int kCount>
constexpr int kTinyForwardRows = tiny_forward_rows(kCount, sizeof(X));

template <class X, class W, int kLanes, int kCount>
__global__ void __launch_bounds__(kElementRowThreads)
    forward_tiny_rows(const ForwardParameters<X, X, W> p) {
  using Run = TinyRun<X, kLanes, kCount>;
  constexpr int kRows = kTinyForwardRows<X, kCount>;
  using Tile = TinyTile<X, kLanes, kCount, kRows>;
  using Values = typename Run::Values;
  constexpr int kSize = static_cast<int>(sizeof(X));
  constexpr int kWarps = kElementRowThreads / kWarpSize;
  __shared__ uint4 memory[kWarps][Tile::kGranules];

  start_block(p);
  const int warp = threadIdx.x / kWarpSize;
  const int team = threadIdx.x % kWarpSize / kLanes;
  const int cols = static_cast<int>(p.cols);
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * Tile::kTileRows;
  if (first >= p.rows) return;
  Tile::copy(memory[warp], p.x, p.x_row_stride, first, p.rows, cols);
  const Run run(cols);
  Values weight, bias;
  run.load_parameter(weight, p.weight, 1.f);
  run.load_parameter(bias, p.bias, 0.f);
  wait_for_copies();
  __syncwarp();

  const int offset = Tile::offset_of(p.x, p.x_row_stride == cols);
  const int y_offset = Tile::offset_of(p.y, true);
  const unsigned mine = shared_address(memory[warp]) + (team * cols + run.begin) * kSize;
  const unsigned next_row = Run::kTeams * cols * kSize;
  Values values[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) run.load(values[r], mine + offset + r * next_row);
  __syncwarp();  // before y comes in their place
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    Values& x = values[r];
    // Differences from the first column are averaged: it lies no farther from the mean than the
    // root of the number of columns times the standard deviation.
    const float reference = reference_point(__shfl_sync(kAllLanes, x[0], 0, kLanes));
    float sums[1] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float difference = x[i] - reference;
      sums[0] = fma(run.has(i) ? difference : 0.f, p.inverse_cols, sums[0]);
    }
    sum_lanes<kLanes>(sums);
    const float mean = reference + sums[0];
    sums[0] = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] -= mean;
      const float present = run.has(i) ? x[i] : 0.f;
      sums[0] = fma(present, present, sums[0]);
    }
    sum_lanes<kLanes>(sums);
    const float rstd = rsqrt(fma(sums[0], p.inverse_cols, p.eps));
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = fma(x[i] * rstd, weight[i], bias[i]);
    run.store(x, mine + y_offset + r * next_row);
    const int64_t row = first + r * Run::kTeams + team;
    if (threadIdx.x % kLanes == 0 && row < p.rows) {
      p.mean[row] = mean;
      p.rstd[row] = rstd;
    }
  }
  __syncwarp();
  const int64_t rows = min(p.rows - first, int64_t{Tile::kTileRows});
  write_staged<Tile::kCapacity>(p.y + first * cols, reinterpret_cast<const X*>(memory[warp]),
                                static_cast<int>(rows) * cols);
}

template <class X, class W>
cudaError_t launch_tiny_rows(const ForwardParameters<X, X, W>& p, const ForwardPlan& plan,
                             cudaStream_t stream) {
  return with_tiny_run<X, true>(plan, [&](auto lanes, auto columns) {
    const auto kernel = forward_tiny_rows<X, W, decltype(lanes)::value, decltype(columns)::value>;
    return launch_in_turns(kernel, dim3(kElementRowThreads), p, plan, stream);
  });
}

}  // namespace fastnorm::cuda
