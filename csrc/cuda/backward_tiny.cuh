// The backward of rows of a few columns that end within a chunk, or fill one (see tiny.cuh). As in
// backward_ring.cuh blocks stay, tiles of rows are under way while others are worked on, and dw and
// db come from the same read; dx leaves by way of shared memory in whole granules.
#pragma once

#include "backward_parameters.cuh"
#include "partial_sums.cuh"
#include "row_sums.cuh"
#include "tiny.cuh"

namespace fastnorm::cuda {

template <class X, int kCount>
constexpr int kTinyBackwardRows = tiny_backward_rows(kCount, sizeof(X));

constexpr int kTinyStages = 3;  // tiles of a warp that are under way or worked on

template <class X, int kLanes, int kCount>
__global__ void __launch_bounds__(kTinyThreads, tiny_backward_blocks(kCount))
    backward_tiny_rows(const RingParameters<X> p) {
  if (!kStreams) return;
  constexpr int kRows = kTinyBackwardRows<X, kCount>;
  using Run = TinyRun<X, kLanes, kCount>;
  using Tile = TinyTile<X, kLanes, kCount, kRows>;
  using Tiles = TinyTiles<Tile>;
  using Values = typename Run::Values;
  constexpr int kSize = static_cast<int>(sizeof(X));
  constexpr int kWarps = kTinyThreads / kWarpSize;
  struct Storage {
    uint4 x[kTinyStages][Tile::kGranules], dy[kTinyStages][Tile::kGranules], dx[Tile::kGranules];
  };
  constexpr unsigned kStageBytes = Tile::kGranules * kChunkBytes;
  __shared__ Storage memory[kWarps];

  const int warp = warp_index();
  const int team = threadIdx.x % kWarpSize / kLanes;
  const int cols = static_cast<int>(p.cols);
  const bool single = kCount == 2 && cols == 1;
  Run run(cols);
  Storage& storage = memory[warp];
  const int x_offset = Tile::offset_of(p.x, p.x_row_stride == cols);
  const int dy_offset = Tile::offset_of(p.dy, p.dy_row_stride == cols);
  const int dx_offset = Tile::put_offset_of(p.dx);
  run.granules = cols == kLanes * kCount && (x_offset | dy_offset | dx_offset) == 0;
  // Where this lane's first column of its first row lies.
  const int mine = (team * cols + run.begin) * kSize;
  const unsigned x_place = shared_address(storage.x) + x_offset + mine;
  const unsigned dy_place = shared_address(storage.dy) + dy_offset + mine;
  const unsigned dx_place = shared_address(storage.dx) + dx_offset + mine;
  const int next_row = Run::kTeams * cols * kSize;

  const bool dense = p.x_row_stride == cols && p.dy_row_stride == cols;
  const Tiles tiles(p.rows, static_cast<int>(blockIdx.x) * kWarps + warp,
                    static_cast<int>(gridDim.x) * kWarps, Tiles::count_of(p.rows), dense);
  const int64_t begin = Tiles::first_row(tiles.tile) * cols;
  TinyGranules<Tile, const X> x_granules(p.x + begin, cols, false);
  TinyGranules<Tile, const X> dy_granules(p.dy + begin, cols, false);
  TinyGranules<Tile, X> dx_granules(p.dx + begin, cols, true);
  const int next_tile = tiles.step * Tile::kTileRows * cols;
  const auto fetch = [&](int stage, int tile) {
    if (tile < tiles.whole) {
      x_granules.copy_in(storage.x[stage]);
      dy_granules.copy_in(storage.dy[stage]);
    } else if (tile < tiles.end) {
      const int64_t first = Tiles::first_row(tile);
      Tile::copy(storage.x[stage], p.x, p.x_row_stride, first, p.rows, cols);
      Tile::copy(storage.dy[stage], p.dy, p.dy_row_stride, first, p.rows, cols);
    }
    x_granules.next += next_tile;
    dy_granules.next += next_tile;
    commit_copies();
  };
  float next_mean[kRows], next_rstd[kRows];
  const auto load_statistics = [&](int tile) {
    if (tile >= tiles.end) return;
    const int64_t first = Tiles::first_row(tile) + team;
    const int rows = tiles.rows_of(tile);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool exists = r * Run::kTeams + team < rows;
      next_mean[r] = exists ? __ldg(p.mean + first + r * Run::kTeams) : 0.f;
      next_rstd[r] = exists ? __ldg(p.rstd + first + r * Run::kTeams) : 0.f;
    }
  };
  load_statistics(tiles.tile);
  Values weight;
  if (kIs16Bit<X> && p.weight_dtype == DType::kFloat32) {
    run.load_parameter(weight, static_cast<const float*>(p.weight), 1.f);
  } else {
    run.load_parameter(weight, static_cast<const X*>(p.weight), 1.f);
  }
#pragma unroll 1
  for (int s = 0; s < kTinyStages; ++s) fetch(s, tiles.tile + s * tiles.step);
  Values dw = {}, db = {};
  let_next_kernel_start();

  int stage = 0;
#pragma unroll 1
  for (int tile = tiles.tile; tile < tiles.end; tile += tiles.step) {
    float mean[kRows], rstd[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      mean[r] = next_mean[r];
      rstd[r] = next_rstd[r];
    }
    load_statistics(tile + tiles.step);
    wait_copies<kTinyStages - 1>();
    __syncwarp();  // the lanes' copies have arrived
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Values x, dy;
      run.load(x, x_place + stage * kStageBytes + r * next_row);
      run.load(dy, dy_place + stage * kStageBytes + r * next_row);
      Sums<float> sums;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float wdy = dy[i] * weight[i];
        x[i] -= mean[r];
        sums.xhat_wdy = fma(x[i], wdy, sums.xhat_wdy);
        sums.wdy += wdy;
      }
      const RowGradient gradient(mean[r], rstd[r], sum_row_lanes(sums, kLanes), p.inverse_cols);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float scaled = dy[i] * rstd[r];
        dw[i] = fma(scaled, x[i], dw[i]);
        db[i] += dy[i];
        x[i] = single ? gradient.dx_of_single(x[i]) : gradient.dx(x[i], scaled, weight[i]);
      }
      run.store(x, dx_place + r * next_row);
    }
    __syncwarp();
    if (tile < tiles.whole && dx_granules.aligned) {
      dx_granules.copy_out(storage.dx);
    } else {
      Tile::write(p.dx + Tiles::first_row(tile) * cols, storage.dx, tiles.rows_of(tile) * cols);
    }
    dx_granules.next += next_tile;
    __syncwarp();  // before the places are filled again
    fetch(stage, tile + kTinyStages * tiles.step);
    stage = stage == kTinyStages - 1 ? 0 : stage + 1;
  }
  wait_copies<0>();
  if (p.dw_partials == nullptr) return;
#pragma unroll
  for (int offset = kLanes; offset < kWarpSize; offset *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      dw[i] += __shfl_xor_sync(kAllLanes, dw[i], offset);
      db[i] += __shfl_xor_sync(kAllLanes, db[i], offset);
    }
  }
  const int width = (cols + 3) / 4 * 4;
  float* const staging = reinterpret_cast<float*>(memory);
  __syncthreads();
  if (team == 0) {
    float* const target = staging + warp * width + run.begin;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (run.has(i)) {
        target[i] = dw[i];
        target[kWarps * width + i] = db[i];
      }
    }
  }
  leave_partials<false>(p, staging, width, 0, 1, 1);
}

template <class X>
cudaError_t launch_tiny_rows(RingParameters<X> p, const BackwardPlan& plan, cudaStream_t stream) {
  p.groups = kTinyThreads / kWarpSize;
  return with_tiny_run<X, false>(plan, [&](auto lanes, auto columns) {
    return Launch(plan.blocks, dim3(kTinyThreads), stream)(
        backward_tiny_rows<X, decltype(lanes)::value, decltype(columns)::value>, p);
  });
}

}  // namespace fastnorm::cuda
