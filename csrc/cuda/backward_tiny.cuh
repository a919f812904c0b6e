// The backward of rows of a few columns that end within a chunk. A warp takes many of them at once,
// as they lie in memory, one behind the other, into shared memory, whence a few lanes each read
// their columns; dx leaves by way of shared memory as well. As in ring.cuh blocks stay, tiles of
// rows are under way while others are worked on, and dw and db come from the same read.
#pragma once

#include "backward_columns.cuh"
#include "ring.cuh"
#include "stage.cuh"

namespace fastnorm::cuda {

constexpr int kTinyStages = 3;  // tiles of a warp that are under way or worked on

// kRows rows of kLanes lanes, side by side and one after the other: of any width, a tile of them is
// a whole number of granules.
template <class X, int kLanes, int kPairs>
struct TinyTile {
  static constexpr int kTeams = kWarpSize / kLanes;
  static constexpr int kRows = tiny_tile_rows(sizeof(X), kLanes) / kTeams;  // of a lane
  static constexpr int kTileRows = kTeams * kRows;
  static_assert(kTileRows * sizeof(X) % kChunkBytes == 0);
  static constexpr int kCapacity = kTileRows * kLanes * 2 * kPairs;  // elements
  static constexpr int kGranules = kCapacity * static_cast<int>(sizeof(X)) / kChunkBytes + 1;

  // Of a warp. A tile begins as far into a granule as in device memory.
  struct Storage {
    uint4 x[kTinyStages][kGranules], dy[kTinyStages][kGranules], dx[kGranules];
  };

  // How far into a granule tiles of a tensor begin: all of them, where rows are dense. Others are
  // copied element by element.
  static __device__ __forceinline__ int offset_of(const X* tensor, bool dense) {
    return dense ? static_cast<int>(reinterpret_cast<uintptr_t>(tensor) % kChunkBytes) : 0;
  }

  // Starts to copy the rows from `first` on, zeros beyond the last one; `end` is the end of the
  // tensor's memory.
  static __device__ __forceinline__ void copy(uint4* target, const X* tensor, int64_t row_stride,
                                              const X* end, int64_t first, int64_t rows, int cols) {
    const int lane = threadIdx.x % kWarpSize;
    const bool dense = row_stride == cols;
    const int offset = offset_of(tensor, dense);
    const int elements = kTileRows * cols;
    const X* const source = tensor + first * row_stride;
    const char* const granules = reinterpret_cast<const char*>(source) - offset;
    const int count =
        (offset + elements * static_cast<int>(sizeof(X)) + kChunkBytes - 1) / kChunkBytes;
    if (dense && granules + count * kChunkBytes <= reinterpret_cast<const char*>(end)) {
#pragma unroll
      for (int i = lane; i < kGranules; i += kWarpSize) {
        if (i < count) copy_async(shared_address(target + i), granules + i * kChunkBytes);
      }
      return;
    }
    X* const place = reinterpret_cast<X*>(target) + offset / static_cast<int>(sizeof(X));
    for (int i = lane; i < elements; i += kWarpSize) {
      const int row = i / cols;
      place[i] = first + row < rows ? source[row * row_stride + (i - row * cols)] : X{};
    }
  }
};

template <class X, int kLanes, int kPairs>
__global__ void __launch_bounds__(kTinyThreads, kTinyBlocks)
    backward_tiny_rows(const RingParameters<X> p) {
  if (!kStreams) return;
  using Tile = TinyTile<X, kLanes, kPairs>;
  constexpr int kSize = static_cast<int>(sizeof(X));
  constexpr int kCount = kSideBySide<X>;
  constexpr int kSteps = 2 * kPairs / kCount;
  constexpr int kWhole = kSteps - 4 / kCount;  // a row's last two pairs may be missing
  constexpr int kTeams = Tile::kTeams, kRows = Tile::kRows;
  using Columns = ElementColumns<X, kSteps, kWhole, kLanes * kCount>;
  using Values = typename Columns::Values;
  extern __shared__ __align__(16) unsigned char tiny_memory[];

  const int warp = threadIdx.x / kWarpSize;
  const int warps = kTinyThreads / kWarpSize;
  const int team = threadIdx.x % kWarpSize / kLanes;
  const int cols = static_cast<int>(p.cols);
  const int column = threadIdx.x % kLanes * kCount, left = cols - column;
  auto& storage = reinterpret_cast<typename Tile::Storage*>(tiny_memory)[warp];
  const unsigned x_memory = shared_address(storage.x), dy_memory = shared_address(storage.dy);
  // Where this lane's first column of its first row lies.
  const int mine = (team * cols + column) * kSize;
  const int x_place = Tile::offset_of(p.x, p.x_row_stride == cols) + mine;
  const int dy_place = Tile::offset_of(p.dy, p.dy_row_stride == cols) + mine;
  const unsigned dx_place = shared_address(storage.dx) + Tile::offset_of(p.dx, true) + mine;
  const int next_rows = kTeams * cols * kSize;  // from there to its next row

  const int64_t stride = static_cast<int64_t>(gridDim.x) * warps * Tile::kTileRows;
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) * warps + warp) * Tile::kTileRows;
  int64_t to_copy = begin;
  const auto copy_tile = [&](int stage) {
    if (to_copy < p.rows) {
      Tile::copy(storage.x[stage], p.x, p.x_row_stride, p.x_end, to_copy, p.rows, cols);
      Tile::copy(storage.dy[stage], p.dy, p.dy_row_stride, p.dy_end, to_copy, p.rows, cols);
    }
    commit_copies();
    to_copy += stride;
  };
  float next_mean[kRows], next_rstd[kRows];
  const auto load_statistics = [&](int64_t first) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first + r * kTeams + team;
      next_mean[r] = row < p.rows ? __ldg(p.mean + row) : 0.f;
      next_rstd[r] = row < p.rows ? __ldg(p.rstd + row) : 0.f;
    }
  };
  load_statistics(begin);
  Values weight;
  Columns::load_weight(weight, p.weight, p.weight_dtype, column, left);
#pragma unroll 1
  for (int s = 0; s < kTinyStages; ++s) copy_tile(s);
  Values dw = {}, db = {};
  let_next_kernel_start();

  int stage = 0;
#pragma unroll 1
  for (int64_t first = begin; first < p.rows; first += stride) {
    float mean[kRows], rstd[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      mean[r] = next_mean[r];
      rstd[r] = next_rstd[r];
    }
    load_statistics(first + stride);
    wait_copies<kTinyStages - 1>();
    __syncwarp();  // the lanes' copies have arrived
    const unsigned of_stage = stage * Tile::kGranules * kChunkBytes;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Values x, dy, out;
      Columns::load(x, x_memory + of_stage + x_place + r * next_rows, left);
      Columns::load(dy, dy_memory + of_stage + dy_place + r * next_rows, left);
      const Sums<float> sums = sum_row_lanes(Columns::sum(x, dy, weight, mean[r]), kLanes);
      const RowGradient gradient(mean[r], rstd[r], sums, p.inverse_cols);
      Columns::finish(out, dw, db, x, dy, weight, gradient);
      Columns::store(out, dx_place + r * next_rows, left);
    }
    __syncwarp();
    const int64_t rows = p.rows - first;
    write_staged<Tile::kCapacity>(
        p.dx + first * cols, reinterpret_cast<const X*>(storage.dx),
        static_cast<int>(rows < Tile::kTileRows ? rows : Tile::kTileRows) * cols);
    __syncwarp();  // before the places are filled again
    copy_tile(stage);
    stage = stage == kTinyStages - 1 ? 0 : stage + 1;
  }
  wait_copies<0>();
  if (p.dw_partials == nullptr) return;
  Columns::template sum_teams<kLanes>(dw);
  Columns::template sum_teams<kLanes>(db);
  const int width = (cols + 3) / 4 * 4;
  float* const staging = reinterpret_cast<float*>(tiny_memory);
  __syncthreads();
  if (team == 0) {
    Columns::put(dw, staging + warp * width + column, left);
    Columns::put(db, staging + (warps + warp) * width + column, left);
  }
  leave_partials<false>(p, staging, width, 0, 1, 1);
}

template <class X>
cudaError_t launch_tiny_rows(RingParameters<X> p, const BackwardPlan& plan, cudaStream_t stream) {
  p.groups = kTinyThreads / kWarpSize;
  const auto launch = [&](auto lanes, auto pairs) {
    constexpr int kLanes = decltype(lanes)::value, kPairs = decltype(pairs)::value;
    const auto kernel = backward_tiny_rows<X, kLanes, kPairs>;
    constexpr int kBytes = kTinyThreads / kWarpSize *
                           static_cast<int>(sizeof(typename TinyTile<X, kLanes, kPairs>::Storage));
    static std::atomic<uint64_t> prepared{0};  // a bit per device
    const cudaError_t error =
        allow_blocks(reinterpret_cast<const void*>(kernel), kBytes, false, prepared);
    if (error != cudaSuccess) return error;
    return Launch(plan.blocks, dim3(kTinyThreads), stream).with_shared(kBytes)(kernel, p);
  };
  using TwoPairs = std::integral_constant<int, 2>;
  using FourPairs = std::integral_constant<int, 4>;
  switch (plan.threads_per_row) {
    case 1: {
      const std::integral_constant<int, 1> one;
      return plan.columns_per_thread == 4 ? launch(one, TwoPairs()) : launch(one, FourPairs());
    }
    case 2:
      return launch(std::integral_constant<int, 2>(), FourPairs());
    case 4:
      return launch(std::integral_constant<int, 4>(), FourPairs());
    case 8:
      return launch(std::integral_constant<int, 8>(), FourPairs());
  }
  return cudaErrorInvalidValue;
}

}  // namespace fastnorm::cuda
