// The backward of many 16-bit rows that end within a chunk and lie one behind the other, of a part
// of a warp to 14 warps: as they lie in memory. Blocks stay. One warp of each copies tiles of rows
// into a ring of stages in shared memory, by bulk copies, and what the others have put in the place
// of x back, as dx. These take two rows at a time, column by column, and add up in the order of
// backward_elements.cuh. Long rows are shared by groups of warps, each with two rows of a tile.
//
// Of an elementwise sum on an H200, 134 MB of bfloat16, as there and so: 67 columns .725 and .87,
// 90 .845 and .895, 129 .725 and .89, 191 .855 and .895, 250 .855 and .88, 257 .81 and .895, 333
// .865 and .89, 449 .83 and .89, 500 .855 and .88, 511 .85 and .885, 769 .79 and .86, 1101 .80 and
// .87, 1601 .81 and .87, 2601 .765 and .855, 3001 .79 and .85, 4095 .82 and .86, 5001 .74 and .86,
// 6145 .73 and .83. Two rows at a time, which stay in registers between the sums and dx, take 19
// instructions for a column (511 columns); one that is read again 32 (4095), and 63 percent of the
// issue slots.
#pragma once

#include "backward_parameters.cuh"
#include "bulk_ring.cuh"
#include "element_columns.cuh"
#include "partial_sums.cuh"

namespace fastnorm::cuda {

// Where a tile of `rows` rows lies in a stage: x, dy, mean and rstd, one behind the other, x and dy
// as far behind a whole sector of shared memory as they are behind one of device memory.
//
// If they are not, bulk copies take longer, and with them everything: of an elementwise sum on an
// H200, from a whole granule on and so, bfloat16 1023 columns .80 and .88, 1101 .80 and .88, 4095
// .81 and .85, 5001 .81 and .855, 7001 .76 and .845.
struct BulkTile {
  int rows, tensor_bytes;  // of x, or of dy
  int bytes, stages;       // of all of a stage, and how many there are

  __device__ __forceinline__ int statistic_bytes() const {
    return rows * static_cast<int>(sizeof(float));
  }
};

// What the warp that copies does: `count` tiles, from row `first` on and each `step` rows behind
// the one before. kShort: tiles of at least 16 rows, which begin at whole sectors, with mean and
// rstd. Others begin anywhere, and are copied by the granules in which they lie.
template <bool kShort, class X>
__device__ __forceinline__ void copy_tiles(const RingParameters<X>& p, const BulkTile& tile,
                                           const BulkBarriers& barriers, unsigned char* memory,
                                           int64_t first, int64_t step, int count) {
  const int lane = threadIdx.x % kWarpSize;
  const int row_bytes = static_cast<int>(p.cols) * static_cast<int>(sizeof(X));
  const auto rows_from = [&](int64_t row) {
    return static_cast<int>(min(p.rows - row, static_cast<int64_t>(tile.rows)));
  };
  const auto offset_of = [&](int64_t row) {
    return kShort ? 0 : static_cast<int>(row * row_bytes % kSectorBytes);
  };
  const auto fetch = [&](int64_t row, int s) {
    const int rows = rows_from(row);
    unsigned char* const stage = memory + s * tile.bytes;
    // visit(place in the stage, place in memory, from where on, bytes of a row)
    const auto each = [&](const auto& visit) {
      const int offset = offset_of(row);
      const auto from_memory = [&](const auto* tensor, int width, int behind) {
        return reinterpret_cast<const unsigned char*>(tensor) + (row * width - behind);
      };
      visit(stage, from_memory(p.x, row_bytes, offset), offset, row_bytes);
      visit(stage + tile.tensor_bytes, from_memory(p.dy, row_bytes, offset), offset, row_bytes);
      if constexpr (kShort) {
        constexpr int kWidth = static_cast<int>(sizeof(float));
        unsigned char* const means = stage + 2 * tile.tensor_bytes;
        visit(means, from_memory(p.mean, kWidth, 0), 0, kWidth);
        visit(means + tile.statistic_bytes(), from_memory(p.rstd, kWidth, 0), 0, kWidth);
      }
    };
    const unsigned barrier = barriers.full_of(s);
    if (lane != 0) {
      if (!kShort) arrive(barrier);  // for what it has read of the stage
      return;
    }
    // What lies behind the last tile's last whole granule they put there who read it.
    const bool last = row + tile.rows >= p.rows;
    const auto bytes_of = [&](int offset, int width) {
      const int end = offset + rows * width;
      return (last ? round_down<kChunkBytes>(end) : round_up<kChunkBytes>(end)) -
             round_down<kChunkBytes>(offset);
    };
    int bytes = 0;
    each([&](unsigned char*, const unsigned char*, int offset, int width) {
      bytes += bytes_of(offset, width);
    });
    arrive_and_expect(barrier, bytes);
    each([&](unsigned char* target, const unsigned char* source, int offset, int width) {
      const int part = bytes_of(offset, width), from = round_down<kChunkBytes>(offset);
      if (part > 0) copy_bulk(shared_address(target + from), source + from, part, barrier);
    });
  };

  for (int s = 0; s < min(tile.stages, count); ++s) fetch(first + s * step, s);
  BulkTurn turn;
  int64_t row = first;
  for (int i = 0; i < count; ++i) {
    const int begin = offset_of(row), end = begin + rows_from(row) * row_bytes;
    const int from = round_up<kChunkBytes>(begin), to = round_down<kChunkBytes>(end);
    const unsigned char* const staged = memory + turn.stage * tile.bytes;
    unsigned char* const dx = reinterpret_cast<unsigned char*>(p.dx) + (row * row_bytes - begin);
    wait_barrier<false>(barriers.written_of(turn.stage), turn.parity);
    if (lane == 0) store_bulk(dx + from, shared_address(staged + from), to - from);
    const auto copy_element = [&](int place, int limit) {
      const int at = place + lane * static_cast<int>(sizeof(X));
      if (at < limit) {
        *reinterpret_cast<X*>(dx + at) = *reinterpret_cast<const X*>(staged + at);
      }
    };
    if constexpr (!kShort) {
      copy_element(begin, from);
      copy_element(to, end);
      publish_to_copies();  // they have been read, too
    }
    if (lane == 0) wait_bulk_reads();
    __syncwarp();
    if (i + tile.stages < count) fetch(row + tile.stages * step, turn.stage);
    turn.advance(tile.stages);
    row += step;
  }
}

// The sums of two rows over the kLanes lanes of each team, by one chain of shuffles, in the order
// of sum_row_lanes: from the farthest lane on where the team is a warp, from the nearest one else.
// First the sums of each row go to different lanes, then the rows.
template <int kLanes>
struct TwoRowLanes {
  static constexpr bool kWarp = kLanes == kWarpSize;
  static constexpr int kSecondSum = kWarp ? kLanes / 2 : 1, kSecondRow = kWarp ? kLanes / 4 : 2;

  // One of the four sums in each lane.
  static __device__ __forceinline__ float sum(const Sums<float> (&sums)[kBulkRows]) {
    const bool second_sum = threadIdx.x & kSecondSum, second_row = threadIdx.x & kSecondRow;
    float rows[kBulkRows];
#pragma unroll
    for (int r = 0; r < kBulkRows; ++r) {
      const float given = second_sum ? sums[r].xhat_wdy : sums[r].wdy;
      rows[r] = second_sum ? sums[r].wdy : sums[r].xhat_wdy;
      rows[r] += __shfl_xor_sync(kAllLanes, given, kSecondSum);
    }
    float mine = second_row ? rows[1] : rows[0];
    mine += __shfl_xor_sync(kAllLanes, second_row ? rows[0] : rows[1], kSecondRow);
    return sum_others(mine);
  }

  // The same over lanes that have one of the four already.
  static __device__ __forceinline__ float sum_others(float mine) {
#pragma unroll
    for (int i = 4; i < kLanes; i *= 2) {
      mine += __shfl_xor_sync(kAllLanes, mine, kWarp ? kLanes / 2 / i : i);
    }
    return mine;
  }

  static __device__ __forceinline__ void collect(Sums<float> (&sums)[kBulkRows], float mine) {
#pragma unroll
    for (int r = 0; r < kBulkRows; ++r) {
      sums[r].xhat_wdy = __shfl_sync(kAllLanes, mine, r * kSecondRow, kLanes);
      sums[r].wdy = __shfl_sync(kAllLanes, mine, r * kSecondRow + kSecondSum, kLanes);
    }
  }
};

// The sums of two rows over a group of up to 16 warps, in the order of sum_row_warps.
struct TwoRowWarps {
  // Of two turns, four numbers of each warp: as in TwoRowLanes.
  static constexpr int kTurn = 2 * kBulkRows * kRingRowWarps;
  using Slots = float[2 * kTurn];

  unsigned slots;  // of the group; zero but for its warps'
  int group, warps, warp;

  // `mine`: from TwoRowLanes. Meets the other warps. (They have read a turn's numbers before they
  // come to the next one, and so are free to write those of the one behind it.)
  __device__ __forceinline__ void sum(Sums<float> (&sums)[kBulkRows], float mine, int turn) const {
    using Lanes = TwoRowLanes<kWarpSize>;
    constexpr auto kFloat = static_cast<unsigned>(sizeof(float));
    constexpr int kQuarter = kWarpSize / 4;
    static_assert(kRingRowWarps == 2 * kQuarter);
    const int lane = threadIdx.x % kWarpSize;
    const unsigned quarter = slots + (turn % 2 * kTurn + lane / kQuarter * kRingRowWarps) * kFloat;
    if (lane % kQuarter == 0) put_element(quarter + warp * kFloat, mine);
    meet_group(group, warps);
    const unsigned place = quarter + lane % kQuarter * kFloat;
    mine = load_element<float>(place) + load_element<float>(place + kQuarter * kFloat);
    Lanes::collect(sums, Lanes::sum_others(mine));
  }
};

// Warps of a block that have rows, at most.
template <RingSpan kSpan, int kLanes, int kPairs>
constexpr int kBulkWarps =
    kSpan == RingSpan::kWarp ? bulk_warps(kLanes, 2 * kPairs) : most_bulk_warps(2 * kPairs);

// kEven: rows of an even number of columns, which all begin at whole words. Of others the first of
// two does.
template <class X, RingSpan kSpan, int kLanes, int kPairs, bool kEven>
__global__ void __launch_bounds__((kBulkWarps<kSpan, kLanes, kPairs> + 1) * kWarpSize, 1)
    backward_bulk(const RingParameters<X> p, const BulkTile tile) {
  if (!kStreams) return;
  constexpr bool kShort = kSpan == RingSpan::kWarp;
  constexpr int kStep = 2 * kLanes;
  constexpr int kTeams = kWarpSize / kLanes;
  constexpr int kSize = static_cast<int>(sizeof(X));
  constexpr auto kFloat = static_cast<unsigned>(sizeof(float));
  using Columns = ElementColumns<X, kPairs, kPairs - 2, kStep, true>;
  using Second = ElementColumns<X, kPairs, kPairs - 2, kStep, kEven>;
  using Values = typename Columns::Values;
  using Lanes = TwoRowLanes<kLanes>;
  extern __shared__ __align__(kSectorBytes) unsigned char bulk_memory[];
  __shared__ uint64_t full[kMostBulkStages], written[kMostBulkStages];
  __shared__ TwoRowWarps::Slots slots[kShort ? 1 : kBulkWarps<kSpan, kLanes, kPairs> / 2];

  const BulkBarriers barriers{shared_address(full), shared_address(written)};
  const int warp = warp_index();
  const int warps = kShort ? kBulkWarps<kSpan, kLanes, kPairs> : p.groups * p.warps;
  if (threadIdx.x == 0) {
    for (int s = 0; s < tile.stages; ++s) {
      init_barrier(barriers.full_of(s), kShort ? 1 : kWarpSize);
      init_barrier(barriers.written_of(s), kShort ? warps : kWarpSize * warps);
    }
    publish_barriers();
  }
  if constexpr (!kShort) {
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(slots) / kFloat); i += blockDim.x) {
      (&slots[0][0])[i] = 0;
    }
  }
  __syncthreads();
  let_next_kernel_start();
  const int group = kShort ? warp : p.by_warps.quotient(warp);
  const int row_warp = kShort ? 0 : warp - group * p.warps;
  const int begin = begin_of_run<kShort>(p, row_warp);
  const int team = threadIdx.x % kWarpSize / kLanes;
  const int column = threadIdx.x % kLanes * 2;
  const int left = begin_of_run<kShort>(p, row_warp + 1) - begin - column;
  const int cols = static_cast<int>(p.cols);
  const int64_t tiles = (p.rows + tile.rows - 1) / tile.rows;
  const int count = static_cast<int>((tiles - 1 - blockIdx.x + gridDim.x) / gridDim.x);
  const int64_t first = int64_t{blockIdx.x} * tile.rows;
  const int64_t step = int64_t{gridDim.x} * tile.rows;

  Values dw = {}, db = {};
  if (warp == warps) {
    copy_tiles<kShort>(p, tile, barriers, bulk_memory, first, step, count);
  } else {
    Values weight;
    Columns::load_weight(weight, p.weight, p.weight_dtype, begin + column, left);
    // The rows of a warp's teams are as far apart as puts them into different banks of shared
    // memory, if so many warps can.
    int apart = kLanes / (cols & -cols);
    while (warps % apart != 0) apart /= 2;
    const int pair = kShort ? warp / apart * (apart * kTeams) + team * apart + warp % apart : group;
    const int own = pair * kBulkRows;  // the first of this lane's rows in a tile
    const unsigned mine = shared_address(bulk_memory) + (own * cols + begin + column) * kSize;
    const TwoRowWarps exchange{shared_address(&slots[kShort ? 0 : group]), group, p.warps,
                               row_warp};
    // Of long rows, mean and rstd of 16 turns, one of a row per lane.
    constexpr int kTurns = kWarpSize / kBulkRows;
    float means, rstds, later_means, later_rstds;
    const auto load_statistics = [&](int i) {
      const int lane = threadIdx.x % kWarpSize;
      const int64_t row = first + own + (i + lane / kBulkRows) * step + lane % kBulkRows;
      later_means = row < p.rows ? __ldg(p.mean + row) : 0;
      later_rstds = row < p.rows ? __ldg(p.rstd + row) : 0;
    };
    if (!kShort) load_statistics(0);
    const unsigned statistics = shared_address(bulk_memory) + 2 * tile.tensor_bytes + own * kFloat;
    // The last tile's elements behind its last whole granule do not move in bulk: visit(element of
    // the tile, its place) for this lane's share of them, if the tile begins so far into a granule
    // and the warp's first row at `place`. No other warp comes to these places in any turn of rows
    // that a warp has alone. (Each warp going through whole rows for its part, 21505 x 6241
    // bfloat16 took 217 us on an H200, one row less 206.)
    const bool has_end = first + (count - 1) * step + tile.rows >= p.rows;
    const int64_t end_row = (tiles - 1) * tile.rows;
    const int end_rows = static_cast<int>(p.rows - end_row);
    const auto visit_end = [&](int offset, unsigned place, const auto& visit) {
      const int whole =
          (round_down<kChunkBytes>(offset + end_rows * cols * kSize) - offset) / kSize;
      const int end_of_run = begin + column + left;
#pragma unroll
      for (int r = 0; r < kBulkRows; ++r) {
        const int from = (own + r) * cols;
#pragma unroll 1
        for (int c = max(whole - from, begin) + threadIdx.x % kLanes; c < end_of_run; c += kLanes) {
          visit(from + c, place + (r * cols + c) * kSize);
        }
      }
    };
    BulkTurn turn;
    // Bytes from the tensor's begin to the tile's, as far as sectors are concerned.
    unsigned low = static_cast<unsigned>(first) * cols * kSize;
    const unsigned low_step = static_cast<unsigned>(step) * cols * kSize;
    // kEnd: of that tile.
    const auto take = [&](int i, auto end) {
      constexpr bool kEnd = decltype(end)::value;
      const unsigned stage = turn.stage * tile.bytes;
      const unsigned place = mine + stage + (kShort ? 0 : low % kSectorBytes);
      const unsigned second = place + cols * kSize;
      float mean[kBulkRows], rstd[kBulkRows];
      if constexpr (!kShort) {
        if (i % kTurns == 0) {
          means = later_means;
          rstds = later_rstds;
          load_statistics(i + kTurns);
        }
#pragma unroll
        for (int r = 0; r < kBulkRows; ++r) {
          mean[r] = __shfl_sync(kAllLanes, means, i % kTurns * kBulkRows + r);
          rstd[r] = __shfl_sync(kAllLanes, rstds, i % kTurns * kBulkRows + r);
        }
      }
      wait_barrier<false>(barriers.full_of(turn.stage), turn.parity);
      const int offset = kShort ? 0 : static_cast<int>(low % kSectorBytes);
      const unsigned rows_place = place - (begin + column) * kSize;
      if constexpr (kEnd) {
        visit_end(offset, rows_place, [&](int at, unsigned to) {
          const bool exists = at < end_rows * cols;
          const int64_t from = end_row * cols + at;
          put_element(to, exists ? p.x[from] : narrow<X>(0.0f));
          put_element(to + tile.tensor_bytes, exists ? p.dy[from] : narrow<X>(0.0f));
        });
        if constexpr (kShort) {
          constexpr auto kWhole = kChunkBytes / static_cast<int>(sizeof(float));
          const int r = threadIdx.x % kLanes;
          if (r < kBulkRows && own + r >= round_down<kWhole>(end_rows)) {
            const unsigned to = statistics + stage + r * kFloat;
            const bool exists = own + r < end_rows;
            put_element(to, exists ? p.mean[end_row + own + r] : 0.0f);
            put_element(to + tile.statistic_bytes(), exists ? p.rstd[end_row + own + r] : 0.0f);
          }
        }
        __syncwarp();
      }
      if constexpr (kShort) {
#pragma unroll
        for (int r = 0; r < kBulkRows; ++r) {
          mean[r] = load_element<float>(statistics + stage + r * kFloat);
          rstd[r] = load_element<float>(statistics + stage + r * kFloat + tile.statistic_bytes());
        }
      }
      Values x[kBulkRows], dy[kBulkRows];
      if constexpr (kEven) {
        Columns::template load<false>(x[0], place, left);
        Columns::template load<false>(dy[0], place + tile.tensor_bytes, left);
      } else {
        Columns::load_odd(x[0], place, left);
        Columns::load_odd(dy[0], place + tile.tensor_bytes, left);
      }
      Second::template load<false>(x[1], second, left);
      Second::template load<false>(dy[1], second + tile.tensor_bytes, left);
      Sums<float> sums[kBulkRows];
#pragma unroll
      for (int r = 0; r < kBulkRows; ++r) sums[r] = Columns::sum(x[r], dy[r], weight, mean[r]);
      const float one = Lanes::sum(sums);
      if constexpr (kShort) {
        Lanes::collect(sums, one);
      } else {
        exchange.sum(sums, one, i);
      }
#pragma unroll
      for (int r = 0; r < kBulkRows; ++r) {
        const RowGradient gradient(mean[r], rstd[r], sums[r], p.inverse_cols);
        Values dx;
        Columns::finish(dx, dw, db, x[r], dy[r], weight, gradient);
        if (r > 0) {
          Second::store(dx, second, left);
        } else if constexpr (kEven) {
          Columns::store(dx, place, left);
        } else {
          Columns::store_odd(dx, place, left);
        }
      }
      if constexpr (kShort && kEnd) {
        __syncwarp();
        visit_end(offset, rows_place, [&](int at, unsigned from) {
          if (at < end_rows * cols) p.dx[end_row * cols + at] = narrow<X>(load_element<X>(from));
        });
      }
      publish_to_copies();
      __syncwarp();
      if (!kShort || threadIdx.x % kWarpSize == 0) arrive(barriers.written_of(turn.stage));
      turn.advance(tile.stages);
      low += low_step;
    };
    // The last tile apart. Asked for in each turn, it cost, of an elementwise sum on an H200, 257
    // columns of bfloat16 .93 -> .89 (268 MB) and .89 -> .85 (134 MB), 129 .925 -> .895.
    const int others = has_end ? count - 1 : count;
#pragma unroll 1
    for (int i = 0; i < others; ++i) take(i, std::false_type());
    if (has_end) take(others, std::true_type());
  }
  if (p.dw_partials == nullptr) return;

  // ---- one row of partial sums per block

  Columns::template sum_teams<kLanes>(dw);
  Columns::template sum_teams<kLanes>(db);
  const int width = (cols + 3) / 4 * 4;
  float* const staging = reinterpret_cast<float*>(bulk_memory);
  __syncthreads();
  if (team == 0 && warp < warps) {
    float* const sums = staging + group * width + begin + column;
    Columns::put_sums(dw, sums, left);
    Columns::put_sums(db, sums + p.groups * width, left);
  }
  leave_partials<false>(p, staging, width, 0, p.merged, 1);
}

template <class X, RingSpan kSpan, int kLanes, int kPairs>
cudaError_t launch_backward_bulk(const RingParameters<X>& p, const BackwardPlan& plan,
                                 cudaStream_t stream) {
  const auto launch = [&](auto even) {
    const auto kernel = backward_bulk<X, kSpan, kLanes, kPairs, decltype(even)::value>;
    static std::atomic<uint64_t> prepared{0};  // a bit per device
    const cudaError_t error =
        allow_blocks(reinterpret_cast<const void*>(kernel), kMostBulkBytes, false, prepared);
    if (error != cudaSuccess) return error;
    const BulkTile tile{plan.rows_per_block, bulk_tensor_bytes(plan.rows_per_block, p.cols),
                        bulk_stage_bytes(plan.rows_per_block, p.cols), plan.bulk_stages};
    return Launch(plan.blocks, dim3(block_threads(plan) + kWarpSize), stream)
        .with_shared(tile.stages * tile.bytes)
        .in_clusters(plan.merged)(kernel, p, tile);
  };
  return p.cols % 2 == 0 ? launch(std::true_type()) : launch(std::false_type());
}

}  // namespace fastnorm::cuda
