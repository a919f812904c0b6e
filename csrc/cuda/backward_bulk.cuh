// The backward of many short 16-bit rows that end within a chunk and lie one behind the other: as
// they lie in memory. Blocks stay. One warp of each copies tiles of rows into a ring of stages in
// shared memory, by bulk copies, and what the others have put in the place of x back, as dx. These
// take two rows at a time, column by column, and add up in the order of backward_elements.cuh.
//
// Of an elementwise sum on an H200, 134 MB of bfloat16, as there and so: 67 columns .725 and .87,
// 90 .845 and .895, 129 .725 and .89, 191 .855 and .895, 250 .855 and .88, 257 .81 and .895, 333
// .865 and .89, 449 .83 and .89, 500 .855 and .88, 511 .85 and .885.
#pragma once

#include "backward_parameters.cuh"
#include "element_columns.cuh"
#include "partial_sums.cuh"

namespace fastnorm::cuda {

// Where a tile of `rows` rows lies in a stage: x, dy, mean and rstd, one behind the other.
struct BulkTile {
  int rows;
  int row_bytes;

  __device__ __forceinline__ int tensor_bytes() const { return rows * row_bytes; }
  __device__ __forceinline__ int statistic_bytes() const {
    return rows * static_cast<int>(sizeof(float));
  }
  __device__ __forceinline__ int bytes() const { return 2 * (tensor_bytes() + statistic_bytes()); }
};

// The ring's barriers: `full` when a tile has arrived, `written` when dx has taken the place of x.
struct BulkBarriers {
  unsigned full, written;

  __device__ __forceinline__ unsigned full_of(int stage) const {
    return full + stage * static_cast<int>(sizeof(uint64_t));
  }
  __device__ __forceinline__ unsigned written_of(int stage) const {
    return written + stage * static_cast<int>(sizeof(uint64_t));
  }
};

// A stage of the ring, and how often all of them have been used.
struct BulkTurn {
  int stage = 0, parity = 0;

  // Whether the ring begins anew.
  __device__ __forceinline__ bool advance(int stages) {
    if (++stage < stages) return false;
    stage = 0;
    parity ^= 1;
    return true;
  }
};

// Of `count` elements from `source` on those behind the last whole granule, by a warp, and zeros
// for what is missing of `capacity`.
template <class T>
__device__ __forceinline__ void fill_rest(T* target, const T* source, int count, int capacity) {
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(T));
  const int lane = threadIdx.x % kWarpSize;
  for (int at = count / kElements * kElements + lane; at < capacity; at += kWarpSize) {
    target[at] = at < count ? source[at] : T();
  }
}

// What the warp that copies does: `count` tiles, from row `first` on and each `step` rows behind
// the one before.
template <class X>
__device__ __forceinline__ void copy_tiles(const RingParameters<X>& p, const BulkTile& tile,
                                           const BulkBarriers& barriers, unsigned char* memory,
                                           int stages, int64_t first, int64_t step, int count) {
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(X));
  const int lane = threadIdx.x % kWarpSize;
  const int cols = static_cast<int>(p.cols);
  const auto rows_from = [&](int64_t row) {
    return static_cast<int>(min(p.rows - row, static_cast<int64_t>(tile.rows)));
  };
  const auto fetch = [&](int64_t row, int s) {
    const int rows = rows_from(row);
    unsigned char* const stage = memory + s * tile.bytes();
    const auto each = [&](const auto& visit) {
      float* const means = reinterpret_cast<float*>(stage + 2 * tile.tensor_bytes());
      visit(reinterpret_cast<X*>(stage), p.x + row * cols, cols);
      visit(reinterpret_cast<X*>(stage + tile.tensor_bytes()), p.dy + row * cols, cols);
      visit(means, p.mean + row, 1);
      visit(means + tile.rows, p.rstd + row, 1);
    };
    if (rows < tile.rows) {  // rows that do not exist add zeros
      each([&](auto* target, const auto* source, int width) {
        fill_rest(target, source, rows * width, tile.rows * width);
      });
      __syncwarp();
    }
    if (lane != 0) return;
    const unsigned barrier = barriers.full_of(s);
    const auto whole = [&](const auto* source, int width) {
      return rows * width * static_cast<int>(sizeof(*source)) / kChunkBytes * kChunkBytes;
    };
    int bytes = 0;
    each([&](auto*, const auto* source, int width) { bytes += whole(source, width); });
    arrive_and_expect(barrier, bytes);
    each([&](auto* target, const auto* source, int width) {
      const int part = whole(source, width);
      if (part > 0) copy_bulk(shared_address(target), source, part, barrier);
    });
  };

  for (int s = 0; s < min(stages, count); ++s) fetch(first + s * step, s);
  BulkTurn turn;
  int64_t row = first;
  for (int i = 0; i < count; ++i) {
    const X* const staged = reinterpret_cast<const X*>(memory + turn.stage * tile.bytes());
    X* const dx = p.dx + row * cols;
    const int end = rows_from(row) * cols, whole = end / kElements * kElements;
    wait_barrier<false>(barriers.written_of(turn.stage), turn.parity);
    if (lane == 0) {
      store_bulk(dx, shared_address(staged), whole * static_cast<int>(sizeof(X)));
      wait_bulk_reads();
    }
    if (whole + lane < end) dx[whole + lane] = staged[whole + lane];
    __syncwarp();
    if (i + stages < count) fetch(row + stages * step, turn.stage);
    turn.advance(stages);
    row += step;
  }
}

// The sums of two rows over the kLanes lanes of each team, by one chain of shuffles, in the order
// of sum_row_lanes: from the farthest lane on where the team is a warp, from the nearest one else.
// First those of each row go to different lanes, then the rows.
template <int kLanes>
__device__ __forceinline__ void sum_two_rows(Sums<float> (&sums)[kBulkRows]) {
  constexpr bool kWarp = kLanes == kWarpSize;
  constexpr int kFirst = kWarp ? kLanes / 2 : 1, kSecond = kWarp ? kLanes / 4 : 2;
  const bool other_sum = threadIdx.x & kFirst, other_row = threadIdx.x & kSecond;
  float rows[kBulkRows];
#pragma unroll
  for (int r = 0; r < kBulkRows; ++r) {
    const float given = other_sum ? sums[r].xhat_wdy : sums[r].wdy;
    rows[r] = other_sum ? sums[r].wdy : sums[r].xhat_wdy;
    rows[r] += __shfl_xor_sync(kAllLanes, given, kFirst);
  }
  float mine = other_row ? rows[1] : rows[0];
  mine += __shfl_xor_sync(kAllLanes, other_row ? rows[0] : rows[1], kSecond);
#pragma unroll
  for (int i = 4; i < kLanes; i *= 2) {
    mine += __shfl_xor_sync(kAllLanes, mine, kWarp ? kLanes / 2 / i : i);
  }
#pragma unroll
  for (int r = 0; r < kBulkRows; ++r) {
    sums[r].xhat_wdy = __shfl_sync(kAllLanes, mine, r * kSecond, kLanes);
    sums[r].wdy = __shfl_sync(kAllLanes, mine, r * kSecond + kFirst, kLanes);
  }
}

// kEven: rows of an even number of columns, which all begin at whole words. Of others the first of
// two does.
template <class X, int kLanes, int kPairs, bool kEven>
__global__ void __launch_bounds__((bulk_warps(kLanes, 2 * kPairs) + 1) * kWarpSize, 1)
    backward_bulk(const RingParameters<X> p, int stages) {
  if (!kStreams) return;
  constexpr int kStep = 2 * kLanes;
  constexpr int kTeams = kWarpSize / kLanes;
  constexpr int kWarps = bulk_warps(kLanes, 2 * kPairs);
  constexpr int kSize = static_cast<int>(sizeof(X));
  using Columns = ElementColumns<X, kPairs, kPairs - 2, kStep, true>;
  using Second = ElementColumns<X, kPairs, kPairs - 2, kStep, kEven>;
  using Values = typename Columns::Values;
  extern __shared__ __align__(16) unsigned char bulk_memory[];
  __shared__ uint64_t full[kMostBulkStages], written[kMostBulkStages];

  const BulkBarriers barriers{shared_address(full), shared_address(written)};
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      init_barrier(barriers.full_of(s), 1);
      init_barrier(barriers.written_of(s), kWarps);
    }
    publish_barriers();
  }
  __syncthreads();
  let_next_kernel_start();
  const int cols = static_cast<int>(p.cols);
  const BulkTile tile{kWarps * kTeams * kBulkRows, cols * kSize};
  const int64_t tiles = (p.rows + tile.rows - 1) / tile.rows;
  const int count = static_cast<int>((tiles - 1 - blockIdx.x + gridDim.x) / gridDim.x);
  const int warp = warp_index();
  const int team = threadIdx.x % kWarpSize / kLanes;
  const int column = threadIdx.x % kLanes * 2;
  const int left = cols - column;

  Values dw = {}, db = {};
  if (warp == kWarps) {
    copy_tiles(p, tile, barriers, bulk_memory, stages, int64_t{blockIdx.x} * tile.rows,
               int64_t{gridDim.x} * tile.rows, count);
  } else {
    Values weight;
    Columns::load_weight(weight, p.weight, p.weight_dtype, column, left);
    // The rows of a warp's teams are as far apart as puts them into different banks of shared
    // memory, if so many warps can.
    int apart = kLanes / (cols & -cols);
    while (kWarps % apart != 0) apart /= 2;
    const int pair = warp / apart * (apart * kTeams) + team * apart + warp % apart;
    const int own = pair * kBulkRows;  // the first of this lane's rows in a tile
    const unsigned memory = shared_address(bulk_memory);
    unsigned mine = memory + own * tile.row_bytes + column * kSize;
    unsigned mine_of_statistics =
        memory + 2 * tile.tensor_bytes() + own * static_cast<int>(sizeof(float));
    BulkTurn turn;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      wait_barrier<false>(barriers.full_of(turn.stage), turn.parity);
      float mean[kBulkRows], rstd[kBulkRows];
#pragma unroll
      for (int r = 0; r < kBulkRows; ++r) {
        const unsigned statistic = mine_of_statistics + r * static_cast<int>(sizeof(float));
        mean[r] = load_element<float>(statistic);
        rstd[r] = load_element<float>(statistic + tile.statistic_bytes());
      }
      const unsigned second = mine + tile.row_bytes;
      Values x[kBulkRows], dy[kBulkRows];
      if constexpr (kEven) {
        Columns::template load<false>(x[0], mine, left);
        Columns::template load<false>(dy[0], mine + tile.tensor_bytes(), left);
      } else {
        Columns::load_odd(x[0], mine, left);
        Columns::load_odd(dy[0], mine + tile.tensor_bytes(), left);
      }
      Second::template load<false>(x[1], second, left);
      Second::template load<false>(dy[1], second + tile.tensor_bytes(), left);
      Sums<float> sums[kBulkRows];
#pragma unroll
      for (int r = 0; r < kBulkRows; ++r) sums[r] = Columns::sum(x[r], dy[r], weight, mean[r]);
      sum_two_rows<kLanes>(sums);
#pragma unroll
      for (int r = 0; r < kBulkRows; ++r) {
        const RowGradient gradient(mean[r], rstd[r], sums[r], p.inverse_cols);
        Values dx;
        Columns::finish(dx, dw, db, x[r], dy[r], weight, gradient);
        if (r > 0) {
          Second::store(dx, second, left);
        } else if constexpr (kEven) {
          Columns::store(dx, mine, left);
        } else {
          Columns::store_odd(dx, mine, left);
        }
      }
      publish_to_copies();
      __syncwarp();
      if (threadIdx.x % kWarpSize == 0) arrive(barriers.written_of(turn.stage));
      const bool anew = turn.advance(stages);
      const int further = (anew ? 1 - stages : 1) * tile.bytes();
      mine += further;
      mine_of_statistics += further;
    }
  }
  if (p.dw_partials == nullptr) return;

  // ---- one row of partial sums per block

  Columns::template sum_teams<kLanes>(dw);
  Columns::template sum_teams<kLanes>(db);
  const int width = (cols + 3) / 4 * 4;
  float* const staging = reinterpret_cast<float*>(bulk_memory);
  __syncthreads();
  if (team == 0 && warp < kWarps) {
    Columns::put_sums(dw, staging + warp * width + column, left);
    Columns::put_sums(db, staging + (kWarps + warp) * width + column, left);
  }
  leave_partials<false>(p, staging, width, 0, p.merged, 1);
}

template <class X, int kLanes, int kPairs>
cudaError_t launch_backward_bulk(const RingParameters<X>& p, const BackwardPlan& plan,
                                 cudaStream_t stream) {
  const auto launch = [&](auto even) {
    const auto kernel = backward_bulk<X, kLanes, kPairs, decltype(even)::value>;
    static std::atomic<uint64_t> prepared{0};  // a bit per device
    const cudaError_t error =
        allow_blocks(reinterpret_cast<const void*>(kernel), kMostBulkBytes, false, prepared);
    if (error != cudaSuccess) return error;
    return Launch(plan.blocks, dim3(block_threads(plan) + kWarpSize), stream)
        .with_shared(plan.bulk_stages * bulk_stage_bytes(plan.rows_per_block, p.cols))
        .in_clusters(plan.merged)(kernel, p, plan.bulk_stages);
  };
  return p.cols % 2 == 0 ? launch(std::true_type()) : launch(std::false_type());
}

}  // namespace fastnorm::cuda
