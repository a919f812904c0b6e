// The forward of rows of a few columns that end within a chunk (see tiny.cuh). y takes the place of
// x in shared memory and leaves it in whole granules.
#pragma once

#include "forward_start.cuh"
#include "tiny.cuh"

namespace fastnorm::cuda {

template <class X, int kCount>
constexpr int kTinyForwardRows = tiny_forward_rows(kCount, sizeof(X));
template <class X, int kLanes, int kCount>
constexpr int kTinyForwardTiles = tiny_forward_tiles(kLanes, kCount, sizeof(X));

// The moments of rows, each of a team.
template <class Run, int kCount, int kRows>
__device__ __forceinline__ void tiny_moments(SetMoments<float> (&sets)[kRows], const Run& run,
                                             const float (&values)[kRows][kCount],
                                             float inverse_cols) {
  constexpr int kLanes = kWarpSize / Run::kTeams;
  // Differences from the first column are averaged: it lies no farther from the mean than the root
  // of the number of columns times the standard deviation.
  const auto by_differences = [&](SetMoments<float>(&others)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float reference = reference_point(__shfl_sync(kAllLanes, values[r][0], 0, kLanes));
      float sums[1] = {};
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float difference = values[r][i] - reference;
        sums[0] = fma(run.has(i) ? difference : 0.f, inverse_cols, sums[0]);
      }
      sum_lanes<kLanes>(sums);
      const float mean = reference + sums[0];
      sums[0] = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float difference = values[r][i] - mean;
        const float present = run.has(i) ? difference : 0.f;
        sums[0] = fma(present, present, sums[0]);
      }
      sum_lanes<kLanes>(sums);
      others[r] = {mean, sums[0]};
    }
  };
  if constexpr (Run::kSize == 2 && kLanes > 1) {
    ThreadSums<float> threads[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) threads[r].add(values[r][i]);
    }
    merge_sums<kLanes>(sets, threads, inverse_cols, by_differences);
  } else {
    by_differences(sets);
  }
}

template <class X, class W, int kLanes, int kCount>
__global__ void __launch_bounds__(kElementRowThreads)
    forward_tiny_rows(const ForwardParameters<X, X, W> p) {
  using Run = TinyRun<X, kLanes, kCount>;
  constexpr int kRows = kTinyForwardRows<X, kCount>;
  using Tile = TinyTile<X, kLanes, kCount, kRows>;
  using Tiles = TinyTiles<Tile>;
  using Values = typename Run::Values;
  constexpr int kSize = static_cast<int>(sizeof(X));
  constexpr int kWarps = kElementRowThreads / kWarpSize;
  constexpr bool kLoops = kTinyForwardTiles<X, kLanes, kCount> > 1;
  constexpr int kStages = kLoops ? 2 : 1;  // tiles of a warp that are under way or worked on
  constexpr unsigned kStageBytes = Tile::kGranules * kChunkBytes;
  __shared__ uint4 memory[kWarps][kStages][Tile::kGranules];

  start_block(p);
  const int lane = threadIdx.x % kWarpSize, team = lane / kLanes, warp = warp_index();
  const int cols = static_cast<int>(p.cols);
  const bool dense = p.x_row_stride == cols;
  const int of_block = kWarps * (kLoops ? p.warp_steps : 1);
  const int first_tile = static_cast<int>(blockIdx.x) * of_block;
  const Tiles tiles(p.rows, first_tile + warp, kWarps,
                    min(first_tile + of_block, Tiles::count_of(p.rows)), dense);
  if (tiles.tile >= tiles.end) return;
  uint4(&stages)[kStages][Tile::kGranules] = memory[warp];
  const int64_t begin = Tiles::first_row(tiles.tile) * cols;
  TinyGranules<Tile, const X> x_granules(p.x + begin, cols, false);
  TinyGranules<Tile, X> y_granules(p.y + begin, cols, true);
  const int next_tile = kWarps * Tile::kTileRows * cols;
  const auto fetch = [&](int stage, int tile) {
    if (tile < tiles.end) {
      if (tile < tiles.whole) {
        x_granules.copy_in(stages[stage]);
      } else {
        Tile::copy(stages[stage], p.x, p.x_row_stride, Tiles::first_row(tile), p.rows, cols);
      }
    }
    x_granules.next += next_tile;
    commit_copies();
  };
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) fetch(s, tiles.tile + s * kWarps);
  const Run run(cols);
  Values weight, bias;
  run.load_parameter(weight, p.weight, 1.f);
  run.load_parameter(bias, p.bias, 0.f);

  const int offset = Tile::offset_of(p.x, dense), y_offset = Tile::put_offset_of(p.y);
  const unsigned mine = shared_address(stages) + (team * cols + run.begin) * kSize;
  const unsigned next_row = Run::kTeams * cols * kSize;
  const bool tells = p.mean != nullptr && lane % kLanes == 0;
  float* means = p.mean + Tiles::first_row(tiles.tile) + team;
  float* rstds = p.rstd + Tiles::first_row(tiles.tile) + team;
  int stage = 0;
#pragma unroll 1
  for (int tile = tiles.tile;;) {
    const unsigned place = mine + stage * kStageBytes;
    wait_copies<kStages - 1>();
    __syncwarp();  // the lanes' copies have arrived
    Values values[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) run.load(values[r], place + offset + r * next_row);
    __syncwarp();  // before y comes in their place
    const int rows = tiles.rows_of(tile);
    SetMoments<float> sets[kRows];
    tiny_moments<Run>(sets, run, values, p.inverse_cols);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Values& x = values[r];
      const float mean = sets[r].mean;
      const float rstd = rsqrt(fma(sets[r].m2, p.inverse_cols, p.eps));
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = fma((x[i] - mean) * rstd, weight[i], bias[i]);
      run.store(x, place + y_offset + r * next_row);
      if (tells && r * Run::kTeams + team < rows) {
        means[r * Run::kTeams] = mean;
        rstds[r * Run::kTeams] = rstd;
      }
    }
    __syncwarp();
    if (tile < tiles.whole && y_granules.aligned) {
      y_granules.copy_out(stages[stage]);
    } else {
      Tile::write(p.y + Tiles::first_row(tile) * cols, stages[stage], rows * cols);
    }
    if (!kLoops) break;
    __syncwarp();  // before the place is filled again
    fetch(stage, tile + kStages * kWarps);
    tile += kWarps;
    if (tile >= tiles.end) break;
    y_granules.next += next_tile;
    means += kWarps * Tile::kTileRows;
    rstds += kWarps * Tile::kTileRows;
    stage ^= 1;
  }
}

template <class X, class W>
cudaError_t launch_tiny_rows(ForwardParameters<X, X, W> p, const ForwardPlan& plan,
                             cudaStream_t stream) {
  const int rows_side_by_side = kElementRowThreads / plan.threads_per_row;
  p.warp_steps = plan.rows_per_block / (rows_side_by_side * plan.rows_per_thread);
  return with_tiny_run<X, true>(plan, [&](auto lanes, auto columns) {
    const auto kernel = forward_tiny_rows<X, W, decltype(lanes)::value, decltype(columns)::value>;
    return launch_in_turns(kernel, dim3(kElementRowThreads), p, plan, stream);
  });
}

}  // namespace fastnorm::cuda
