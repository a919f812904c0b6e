// The forward of rows that end within a chunk, column by column: wherever such rows begin, no chunk
// of theirs need be shifted into place. y passes through shared memory and leaves it in whole
// granules.
//
// A lane has neighbouring pairs of columns of a 16-bit row, or single ones of float32, kLanes of
// them apart; where pairs lie in whole words of memory they move as such. Short rows have few
// lanes, for sums over lanes take their time: as many that each has at most kMostElementColumns
// columns. Longer rows are shared out evenly among warps. (Wide ones: forward_wide.cuh and
// forward_wide_stream.cuh.)
#pragma once

#include "forward_bulk.cuh"
#include "forward_tiny.cuh"
#include "forward_wide.cuh"

namespace fastnorm::cuda {

// Blocks that a multiprocessor holds at least: eight, of 64 registers, where they do. 257 columns
// of bfloat16 .851 of a copy on an H200 in 71 of them, .868 so. (Of ten steps float16 spills in 64,
// of twelve both.)
template <class X, int kSteps, Pairing kPairing>
constexpr int kElementBlocks =
    std::is_same_v<X, __nv_bfloat16> && kSteps == 10 && kPairing == Pairing::kAlternate ? 8 : 1;

template <class X, class W, int kLanes, int kSteps, int kRows, Pairing kPairing>
__global__ void __launch_bounds__(kElementRowThreads, (kElementBlocks<X, kSteps, kPairing>))
    forward_elements(const ForwardParameters<X, X, W> p) {
  // Rows are planned so that the last two pairs of columns may be missing, and no others.
  constexpr int kWhole = kSteps - 4 / kSideBySide<X>;
  using Tile = ElementTile<X, kLanes, kSteps, kWhole, kRows, kPairing>;
  constexpr int kTeams = kWarpSize / kLanes;  // rows side by side
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(X));
  constexpr int kCapacity = kTeams * kRows * kSteps * Tile::kStep;
  __shared__ alignas(16) X stages[kElementRowThreads / kWarpSize][kCapacity + kElements];

  start_block(p);
  const int warp = threadIdx.x / kWarpSize;
  const int team = threadIdx.x % kWarpSize / kLanes;
  constexpr int kWarpRows = kTeams * kRows;
  const int64_t first_row =
      (static_cast<int64_t>(blockIdx.x) * (kElementRowThreads / kWarpSize) + warp) * kWarpRows;
  if (first_row >= p.rows) return;
  const int cols = static_cast<int>(p.cols);
  const auto row_of = [&](int r) { return first_row + team * kRows + r; };

  Tile tile(cols);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // Beyond the last row, that one again, or the last that begins as this one does.
    const int64_t last = kPairing == Pairing::kAlternate ? (p.rows - 1) / 2 * 2 : p.rows - 1;
    tile.load(r, p.x + (row_of(r) < p.rows ? row_of(r) : last) * p.x_row_stride);
  }
  send_for_late_parameters(p);
  SetMoments<float> sets[kRows];
  float rstd[kRows];
  tile.moments(sets, cols, p.inverse_cols);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rstd[r] = rstd_of(sets[r], p.inverse_cols, p.eps);
    if (threadIdx.x % kLanes == 0 && row_of(r) < p.rows) {
      put_statistics(p, row_of(r), sets[r].mean, rstd[r]);
    }
  }
  X* const y = p.y + first_row * p.cols;
  X* const staged =
      stages[warp] + reinterpret_cast<uintptr_t>(y) % kChunkBytes / sizeof(X) + team * kRows * cols;
  tile.put(sets, rstd, p.weight, p.bias, 0, [&](int r) { return staged + r * cols; });
  __syncwarp();
  const int64_t rows = p.rows - first_row;
  write_staged<kCapacity>(y, stages[warp],
                          static_cast<int>(rows < kWarpRows ? rows : kWarpRows) * cols);
}

// Rows that the warps of a block hold together.
template <class X, class W, int kSteps, int kRows, Pairing kPairing>
__global__ void __launch_bounds__(kMaxThreadsPerRow)
    forward_long_elements(const ForwardParameters<X, X, W> p) {
  constexpr int kWhole = kSteps - 4 / kSideBySide<X>;
  using Tile = ElementTile<X, kWarpSize, kSteps, kWhole, kRows, kPairing>;
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(X));
  constexpr int kCapacity = kSteps * Tile::kStep;
  using Runs = ElementRuns<X, W, kRows>;
  extern __shared__ uint4 element_stages[];
  __shared__ typename Runs::Storage warp_moments;

  start_block(p);
  const int warp = threadIdx.x / kWarpSize;
  const Runs runs{p};
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRows;
  const int begin = runs.begin_of(warp), cols = runs.begin_of(warp + 1) - begin;

  Tile tile(cols);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // Beyond the last row, that one again.
    const int64_t row = first_row + r < p.rows ? first_row + r : p.rows - 1;
    tile.load(r, p.x + row * p.x_row_stride + begin);
  }
  send_for_late_parameters(p);
  SetMoments<float> sets[kRows];
  tile.moments(sets, cols, quotient(1.f, static_cast<float>(cols)));
  float rstd[kRows];
  runs.merge(sets, rstd, warp_moments, first_row);
  X* const stages = reinterpret_cast<X*>(element_stages) + warp * kRows * (kCapacity + kElements);
  const auto stage_of = [&](int r) { return stages + r * (kCapacity + kElements); };
  const auto y_of = [&](int r) { return p.y + (first_row + r) * p.cols + begin; };
  X* staged[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    staged[r] = stage_of(r) + reinterpret_cast<uintptr_t>(y_of(r)) % kChunkBytes / sizeof(X);
  }
  tile.put(sets, rstd, p.weight, p.bias, begin, [&](int r) { return staged[r]; });
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first_row + r < p.rows) write_staged<kCapacity>(y_of(r), stage_of(r), cols);
  }
}

template <class X, class W, int kSteps, int kRows, Pairing kPairing>
cudaError_t launch_long_elements(ForwardParameters<X, X, W> p, const ForwardPlan& plan,
                                 cudaStream_t stream) {
  share_out_runs(p, plan.threads_per_row / kWarpSize);
  const auto launch = [&](auto kernel, std::atomic<uint64_t>& prepared) {
    const int most_bytes = kMaxThreadsPerRow / kWarpSize *
                           element_stage_bytes(plan.columns_per_thread, kRows, sizeof(X));
    const cudaError_t error =
        allow_blocks(reinterpret_cast<const void*>(kernel), most_bytes, false, prepared);
    if (error != cudaSuccess) return error;
    return launch_in_turns(kernel, dim3(plan.threads_per_row), p, plan, stream);
  };
  if constexpr (kIs16Bit<X> && kPairing != Pairing::kNone) {
    static std::atomic<uint64_t> bulk_prepared{0};  // a bit per device
    if (plan.in_bulk) {
      return launch(forward_bulk_long_elements<X, W, kSteps, kRows, kPairing>, bulk_prepared);
    }
  }
  static std::atomic<uint64_t> prepared{0};
  return launch(forward_long_elements<X, W, kSteps, kRows, kPairing>, prepared);
}

// Whether any plan has `columns` of a row in each of its lanes, of a warp or of several. Half the
// lanes hold shorter rows; rows whose whole chunks fill warps are in chunks (chunks_fill_warps).
template <class X>
constexpr bool holds_elements(int lanes, int columns) {
  constexpr bool kIsFloat = std::is_same_v<X, float>;
  if (lanes == kLeastElementLanes) return !kIsFloat || columns < kMostElementColumns;
  if (kIsFloat && lanes == 2 * kLeastElementLanes && columns == kMostElementColumns / 2)
    return true;
  if (columns <= kMostElementColumns / 2) return false;
  if (kIsFloat && lanes == kWarpSize) return columns == 28;
  return !kIsFloat || lanes > kWarpSize || columns < kMostElementColumns;
}

template <class X, class W>
Pairing find_pairing(const ForwardParameters<X, X, W>& p) {
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.y);
  if (!kIs16Bit<X> || addresses % 4 != 0 || (p.x_row_stride - p.cols) % 2 != 0) {
    return Pairing::kNone;
  }
  return p.cols % 2 == 0 ? Pairing::kAll : Pairing::kAlternate;
}

template <class X, class W>
cudaError_t launch_elements(const ForwardParameters<X, X, W>& p, const ForwardPlan& plan,
                            cudaStream_t stream) {
  if (is_tiny_forward(p.cols, sizeof(X))) return launch_tiny_rows(p, plan, stream);
  if (plan.rows_per_block == 1) return launch_wide_elements(p, plan, stream);
  const auto launch_lanes = [&](auto lanes, auto pairs, auto pairing) {
    constexpr int kLanes = decltype(lanes)::value, kColumns = 2 * decltype(pairs)::value;
    constexpr Pairing kPairing = decltype(pairing)::value;
    if constexpr (holds_elements<X>(kLanes, kColumns)) {
      constexpr int kSteps = kColumns / kSideBySide<X>;
      if constexpr (kIs16Bit<X> && kPairing != Pairing::kNone) {
        if (plan.in_bulk) {
          return launch_in_turns(
              forward_bulk_elements<X, W, kLanes, kSteps, kElementRows, kPairing>,
              dim3(kElementRowThreads), p, plan, stream);
        }
      }
      return launch_in_turns(forward_elements<X, W, kLanes, kSteps, kElementRows, kPairing>,
                             dim3(kElementRowThreads), p, plan, stream);
    } else {
      return cudaErrorInvalidValue;
    }
  };
  const auto launch_run = [&](auto pairs, auto pairing) {
    constexpr int kColumns = 2 * decltype(pairs)::value;
    constexpr Pairing kPairing = decltype(pairing)::value;
    if constexpr (holds_elements<X>(kMaxThreadsPerRow, kColumns)) {
      if (plan.threads_per_row > kWarpSize) {
        constexpr int kSteps = kColumns / kSideBySide<X>;
        return launch_long_elements<X, W, kSteps, kElementRows, kPairing>(p, plan, stream);
      }
    }
    switch (plan.threads_per_row) {
      case kLeastElementLanes:
        return launch_lanes(std::integral_constant<int, kLeastElementLanes>(), pairs, pairing);
      case 16:
        return launch_lanes(std::integral_constant<int, 16>(), pairs, pairing);
      case 32:
        return launch_lanes(std::integral_constant<int, 32>(), pairs, pairing);
    }
    return cudaErrorInvalidValue;
  };
  const auto launch_pairs = [&](auto pairs) {
    if constexpr (kIs16Bit<X>) {
      switch (find_pairing(p)) {
        case Pairing::kAll:
          return launch_run(pairs, std::integral_constant<Pairing, Pairing::kAll>());
        case Pairing::kAlternate:
          return launch_run(pairs, std::integral_constant<Pairing, Pairing::kAlternate>());
        case Pairing::kNone:
          break;
      }
    }
    return launch_run(pairs, std::integral_constant<Pairing, Pairing::kNone>());
  };
  return visit_number<6, kMostElementColumns / 2, 2>(plan.columns_per_thread / 2, launch_pairs);
}

}  // namespace fastnorm::cuda
