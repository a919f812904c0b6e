// The backward of rows that end within a chunk, column by column. As in backward_ring.cuh blocks
// stay, rows stream through shared memory, and dw and db come from the same read; but lanes have
// single columns instead of chunks, which they read wherever the row begins, so that nothing need
// be shifted into place. dx passes through shared memory and leaves it in whole granules.
//
// Few rows are taken one by one as in few_rows.cuh, with dw and db from other blocks of the launch.
//
// A lane has neighbouring pairs of columns of a 16-bit row, or single ones of float32, kLanes of
// them apart. A row is held by 8, 16 or 32 lanes, or shared out evenly among warps: of a block or
// of a cluster.
#pragma once

#include "backward_bulk.cuh"
#include "backward_tiny.cuh"
#include "element_columns.cuh"
#include "few_rows.cuh"
#include "partial_sums.cuh"
#include "ring_exchange.cuh"

namespace fastnorm::cuda {

// Starts to copy the granules in which `bytes` bytes from `source` on lie, up to kChunks by each of
// kLanes lanes and one more by the first; `slot` is where this lane's first one goes. (By the
// ring's copy_granules, as that was by whole lines, with lanes of any number, 524288 x 257 bfloat16
// took 250 us on an H200, 8192 x 16385 342 us; 241 and 325 us so.)
template <int kChunks, int kLanes>
__device__ __forceinline__ void copy_team_granules(unsigned slot, const char* source, int bytes,
                                                   int lane) {
  const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(source) % kChunkBytes);
  const char* const granules =
      reinterpret_cast<const char*>(granule_of(source)) + static_cast<unsigned>(lane * kChunkBytes);
  const int left = offset + bytes - lane * kChunkBytes;
#pragma unroll
  for (int k = 0; k <= kChunks; ++k) {
    constexpr int kStep = kLanes * kChunkBytes;
    if (k * kStep < left && (k < kChunks || lane == 0)) {
      copy_async(slot + k * kStep, granules + k * kStep);
    }
  }
}

// Granules in which the columns of a team lie in a row, at most, and what the stages of a warp
// take.
template <class X, int kLanes, int kPairs>
constexpr int kElementGranules =
    kLanes * 2 * kPairs * static_cast<int>(sizeof(X)) / kChunkBytes + 1;

template <class X, RingSpan kSpan, int kLanes, int kPairs>
constexpr int kElementWarpBytes = kRingStages<X, kSpan> * 2 * (kWarpSize / kLanes) *
                                  kElementGranules<X, kLanes, kPairs> * kChunkBytes;

template <class X, RingSpan kSpan, int kLanes, int kPairs, bool kPaired>
__global__ void __launch_bounds__(kMaxThreadsPerRow, 1)
    backward_elements(const RingParameters<X> p) {
  if (!kStreams) return;
  constexpr int kSize = static_cast<int>(sizeof(X));
  constexpr bool kShort = kSpan == RingSpan::kWarp;
  constexpr bool kCluster = kSpan == RingSpan::kCluster;
  constexpr int kTeamGranules = kElementGranules<X, kLanes, kPairs>;
  constexpr int kChunks = (kTeamGranules - 2) / kLanes + 1;  // granules of a lane, at most
  constexpr int kStages = kRingStages<X, kSpan>;
  constexpr unsigned kTeamBytes = kTeamGranules * kChunkBytes;
  constexpr unsigned kTensorBytes = kWarpSize / kLanes * kTeamBytes;
  constexpr unsigned kStageBytes = 2 * kTensorBytes;
  constexpr int kCount = kSideBySide<X>;
  constexpr int kSteps = 2 * kPairs / kCount;
  constexpr int kWhole = kSteps - 4 / kCount;  // a row's last two pairs may be missing
  constexpr int kStep = kLanes * kCount;
  constexpr int kTeams = kWarpSize / kLanes;
  using Columns = ElementColumns<X, kSteps, kWhole, kStep, kPaired>;
  using Values = typename Columns::Values;
  using Exchange = RingExchange<kSpan>;
  extern __shared__ __align__(16) unsigned char ring_memory[];
  __shared__ typename Exchange::Storage storage;

  // Who owns what. A team's run begins at column `begin` of the row and has `run` columns; the
  // lane's first is `column` of it.
  const int warp = warp_index();
  const int team = kShort ? threadIdx.x % kWarpSize / kLanes : 0;
  const int lane =  // whichever spills less
      kShort || kCluster ? threadIdx.x % kLanes : lane_index();
  const int group = kShort ? warp : p.by_warps.quotient(warp);
  const int row_warp = kShort ? 0 : warp - group * p.warps;
  const int cluster_size = kCluster ? p.cluster_size : 1;
  const auto find_rank = [&] { return kCluster ? cluster_rank() % cluster_size : 0; };
  const auto begin_of = [&](int w) { return begin_of_run<kShort>(p, w); };
  const int place = find_rank() * p.warps + row_warp;
  const int begin = begin_of(place);
  const int run = keep(begin_of(place + 1) - begin);
  const int column = lane * kCount, left = run - column;

  // Rows of this team: `first`, first + stride, ...; `count` of them, beyond the last row perhaps.
  const int cluster = kCluster ? p.by_cluster_size.quotient(blockIdx.x) : blockIdx.x;
  const int64_t unit = static_cast<int64_t>(cluster) * p.groups + group;
  const int count = p.full_turns + (unit < p.last_turn ? 1 : 0);
  const int64_t first = unit * kTeams + team;
  const int64_t stride = p.unit_stride * kTeams;

  const unsigned ring =
      keep(shared_address(ring_memory) + warp * (kStages * kStageBytes) + team * kTeamBytes);
  const auto next_slot = [&](unsigned slot) {
    slot += kStageBytes;
    return slot == ring + kStages * kStageBytes ? ring : slot;
  };

  // ---- copies into the ring

  const int64_t x_step = stride * p.x_row_stride * kSize;
  const int64_t dy_step = stride * p.dy_row_stride * kSize;
  const char* x = reinterpret_cast<const char*>(p.x + first * p.x_row_stride + begin);
  const char* dy = reinterpret_cast<const char*>(p.dy + first * p.dy_row_stride + begin);
  unsigned x_low = static_cast<unsigned>(reinterpret_cast<uintptr_t>(x));  // of the row summed next
  unsigned dy_low = static_cast<unsigned>(reinterpret_cast<uintptr_t>(dy));
  int to_copy = count;
  // A team that has another row to come does not reach the end of the tensor.
  const bool apart = min(x_step, dy_step) >= kChunkBytes;
  const int careful = keep(apart ? (kShort ? 2 : 1) : count);  // rows to the end
  const auto copy_row = [&](unsigned slot) {
    if (to_copy > 0) {
      constexpr unsigned kGranules = kLanes * kChunkBytes;
      const unsigned mine = slot + lane * kChunkBytes;
      const int bytes = run * kSize;
      if (to_copy > careful) {
        copy_team_granules<kChunks, kLanes>(mine, x, bytes, lane);
        copy_team_granules<kChunks, kLanes>(mine + kTensorBytes, dy, bytes, lane);
      } else if (kShort && first + (count - to_copy) * stride >= p.rows) {
#pragma unroll 1
        for (int k = 0; k * kLanes + lane < kTeamGranules; ++k) {
          store_shared(mine + k * kGranules, Granule());
          store_shared(mine + kTensorBytes + k * kGranules, Granule());
        }
      } else {
        const int to_lane = lane * kChunkBytes;
        copy_last_granules<kSize, kChunks>(mine, kGranules, x + to_lane, p.x_end, bytes, lane,
                                           kLanes);
        copy_last_granules<kSize, kChunks>(mine + kTensorBytes, kGranules, dy + to_lane, p.dy_end,
                                           bytes, lane, kLanes);
      }
      x += x_step;
      dy += dy_step;
      --to_copy;
    }
    commit_copies();
  };

  // ---- the start: what is small first, for it would wait behind the copies that fill the ring

  Exchange exchange = [&] {
    if constexpr (kCluster) {
      return Exchange(storage, p.relays, cluster_size, false, row_warp);
    } else {
      return Exchange(storage, p.warps, cluster_size, group, row_warp);
    }
  }();
  if constexpr (kCluster) cluster_arrive();
  // Statistics of the rows of kTurns turns, one of a row per lane.
  constexpr int kTurns = kWarpSize / kTeams;
  float means, rstds, later_means, later_rstds;
  const auto load_statistics = [&](int turn) {
    const int in_warp = threadIdx.x % kWarpSize;
    const int64_t r =
        (unit + (turn + in_warp / kTeams) * p.unit_stride) * kTeams + in_warp % kTeams;
    const bool exists = turn + in_warp / kTeams < count && r < p.rows;
    later_means = exists ? __ldg(p.mean + r) : 0;
    later_rstds = exists ? __ldg(p.rstd + r) : 0;
  };
  // In the order of the turns.
  const auto statistics_of = [&](int turn, float& mean, float& rstd) {
    if (turn % kTurns == 0) {
      means = later_means;
      rstds = later_rstds;
      load_statistics(turn + kTurns);
    }
    const int source = turn % kTurns * kTeams + team;
    mean = __shfl_sync(kAllLanes, means, source);
    rstd = __shfl_sync(kAllLanes, rstds, source);
  };
  load_statistics(0);
  Values weight;
  Columns::load_weight(weight, p.weight, p.weight_dtype, begin + column, left);
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) copy_row(ring + s * kStageBytes);
  Values dw = {}, db = {};
  let_next_kernel_start();

  // ---- a row

  const auto load_row = [&](Values& x_values, Values& dy_values, unsigned slot, unsigned x_offset,
                            unsigned dy_offset) {
    const unsigned mine = slot + column * kSize;
    Columns::template load<true>(x_values, mine + x_offset % kChunkBytes, left);
    Columns::template load<true>(dy_values, mine + kTensorBytes + dy_offset % kChunkBytes, left);
  };

  int64_t row = first;
  int64_t dx_step = stride * p.cols * kSize;
  dx_step = static_cast<int64_t>(keep(static_cast<int>(dx_step >> 32))) << 32 |
            static_cast<unsigned>(keep(static_cast<int>(dx_step)));
  char* dx = reinterpret_cast<char*>(p.dx + first * p.cols + begin);
  // `amid`: what is done when dx has been worked out.
  const auto finish_row = [&](const Values& x_values, const Values& dy_values, unsigned slot,
                              float mean, float rstd, const Sums<float>& sums, const auto& amid) {
    const RowGradient gradient(mean, rstd, sums, p.inverse_cols);
    const unsigned shifted = reinterpret_cast<uintptr_t>(dx) % kChunkBytes;
    const unsigned mine = slot + shifted + column * kSize;  // in the place of x
    __syncwarp();                                           // all lanes have read x
    Values out;
    Columns::finish(out, dw, db, x_values, dy_values, weight, gradient);
    amid();
    Columns::store(out, mine, left);
    __syncwarp();
    if (!kShort || row < p.rows) {
      const unsigned end = shifted + run * kSize;
      char* const origin = reinterpret_cast<char*>(granule_of(dx));  // places as in `slot`
      const unsigned staged = slot + lane * kChunkBytes;
      char* const granules = origin + static_cast<unsigned>(lane * kChunkBytes);
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        constexpr int kStep = kLanes * kChunkBytes;
        const bool whole = k * kStep + (lane + 1) * kChunkBytes <= static_cast<int>(end);
        if (whole && (k > 0 || lane > 0 || shifted == 0)) {
          const Granule granule = load_shared(staged + k * kStep);
          *reinterpret_cast<uint4*>(granules + k * kStep) =
              make_uint4(granule.words[0], granule.words[1], granule.words[2], granule.words[3]);
        }
      }
      // The elements before the first whole granule, and those after the last one.
      constexpr int kColumns = kChunkColumns<X>;
      const unsigned last = end / kChunkBytes * kChunkBytes;
      const auto store = [&](bool after) {
        const unsigned at = lane % kColumns * kSize + (after ? last : 0);
        const bool outside = after ? last > 0 || shifted == 0 : shifted > 0 && at >= shifted;
        if (outside && at < end) store_element<kSize>(origin + at, slot + at);
      };
      if constexpr (kLanes >= 2 * kColumns) {
        if (lane < 2 * kColumns) store(lane >= kColumns);
      } else {
        store(false);
        store(true);
      }
    }
    __syncwarp();  // before the slot is filled again
    dx += dx_step;
    row += stride;
  };

  // ---- all rows

  unsigned slot = ring;
  float mean, rstd;
  if constexpr (kShort) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      statistics_of(i, mean, rstd);
      wait_copies<kStages - 1>();
      __syncwarp();  // the lanes' copies have arrived
      Values x_values, dy_values;
      load_row(x_values, dy_values, slot, x_low, dy_low);
      const Sums<float> sums =
          sum_row_lanes(Columns::sum(x_values, dy_values, weight, mean), kLanes);
      finish_row(x_values, dy_values, slot, mean, rstd, sums, [] {});
      copy_row(slot);
      slot = next_slot(slot);
      x_low += static_cast<unsigned>(x_step);
      dy_low += static_cast<unsigned>(dy_step);
    }
  } else {
    float next_mean, next_rstd;
    unsigned next_x_low = x_low, next_dy_low = dy_low;
    // This lane's sums of row i. `amid`: what is done before the arithmetic.
    const auto sum_row = [&](int i, unsigned from, const auto& amid) {
      statistics_of(i, next_mean, next_rstd);
      __syncwarp();  // the lanes' copies have arrived
      Values x_values, dy_values;
      load_row(x_values, dy_values, from, next_x_low, next_dy_low);
      next_x_low += static_cast<unsigned>(x_step);
      next_dy_low += static_cast<unsigned>(dy_step);
      amid();
      return Columns::sum(x_values, dy_values, weight, next_mean);
    };
    if constexpr (kCluster) {
      cluster_wait();
    } else {
      __syncthreads();
    }
    if (count > 0) {
      wait_copies<kStages - 1>();
      const Sums<float> mine = sum_row(0, slot, [] {});
      exchange.post(0, sum_halves(mine.xhat_wdy, mine.wdy));
      exchange.relay(0);
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const unsigned next = next_slot(slot);
      mean = next_mean;
      rstd = next_rstd;
      Sums<float> mine, sums;
      const auto sum_next = [&](const auto& amid) {
        if (i + 1 < count) {
          wait_copies<kStages - 2>();
          mine = sum_row(i + 1, next, amid);
        } else {
          amid();
        }
      };
      const auto post_next = [&](float half) {
        if (i + 1 < count) exchange.post(i + 1, half);
      };
      const auto finish = [&](const auto& amid) {
        Values x_values, dy_values;
        load_row(x_values, dy_values, slot, x_low, dy_low);
        x_low += static_cast<unsigned>(x_step);
        dy_low += static_cast<unsigned>(dy_step);
        finish_row(x_values, dy_values, slot, mean, rstd, sums, amid);
      };
      if constexpr (kSpan == RingSpan::kBlock) {  // as in the ring
        const auto fetched = exchange.fetch(i);
        sum_next([&] { sums = exchange.merge(fetched); });
        const float half = sum_halves(mine.xhat_wdy, mine.wdy);
        finish([&] { post_next(half); });
      } else {
        sum_next([] {});
        post_next(sum_halves(mine.xhat_wdy, mine.wdy));
        sums = exchange.fetch_sums(i);
        finish([] {});
      }
      copy_row(slot);
      if (kCluster && i + 1 < count) exchange.relay(i + 1);
      slot = next;
    }
  }
  wait_copies<0>();
  if constexpr (kCluster) {
    cluster_arrive();  // no block leaves before all have sent and received their sums
    cluster_wait();
  }
  if (p.dw_partials == nullptr) return;

  // ---- one row of partial sums per cluster

  Columns::template sum_teams<kLanes>(dw);
  Columns::template sum_teams<kLanes>(db);
  const int last_rank = find_rank();  // anew, or it would be kept in a register through all rows
  const int block_begin = begin_of(last_rank * p.warps);
  const int block_columns = begin_of((last_rank + 1) * p.warps) - block_begin;
  const int width = (block_columns + 3) / 4 * 4;
  float* const staging = reinterpret_cast<float*>(ring_memory);
  float* const mine = staging + group * width + begin - block_begin + column;
  __syncthreads();
  if (team == 0) {
    Columns::put_sums(dw, mine, left);
    Columns::put_sums(db, mine + p.groups * width, left);
  }
  leave_partials<false>(p, staging, width, block_begin, p.merged, cluster_size);
}

// A row per group, added up in the same order; and before those, blocks of tiles of columns. Memory
// is read and written column by column: rows are few, and time goes by waiting.
template <class X, RingSpan kSpan, int kLanes, int kPairs>
__global__ void __launch_bounds__(kMaxThreadsPerRow, 1)
    backward_few_elements(const RingParameters<X> p, const FewRowsParameters<X> tiles) {
  if (!kStreams) return;
  constexpr bool kShort = kSpan == RingSpan::kWarp;
  constexpr bool kCluster = kSpan == RingSpan::kCluster;
  constexpr int kCount = kSideBySide<X>;
  constexpr int kSteps = 2 * kPairs / kCount;
  constexpr int kWhole = kSteps - 4 / kCount;
  constexpr int kTeams = kWarpSize / kLanes;
  using Columns = ElementColumns<X, kSteps, kWhole, kLanes * kCount, false>;
  using Values = typename Columns::Values;
  using Tiles =
      std::conditional_t<kCluster, ColumnTiles<X, kSpan>, ColumnTile<X, kMinTileLanes, true>>;
  __shared__ union alignas(16) {
    typename Tiles::Storage tiles;
    typename RowSumsExchange<kSpan>::Storage sums;
  } storage;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (static_cast<int>(blockIdx.x) < tiles.column_blocks) {
    Tiles::template sum<false>(tiles, storage.tiles);
    return;
  }
  RowSumsExchange<kSpan>::begin(storage.sums);
  const int warp = threadIdx.x / kWarpSize;
  const int team = kShort ? threadIdx.x % kWarpSize / kLanes : 0;
  const int group = p.by_warps.quotient(warp);
  const int row_warp = warp - group * p.warps;
  const int rank = kCluster ? cluster_rank() : 0;
  const int begin = begin_of_run<kShort>(p, rank * p.warps + row_warp);
  const int run = begin_of_run<kShort>(p, rank * p.warps + row_warp + 1) - begin;
  const int column = threadIdx.x % kLanes * kCount;
  const int64_t unit =
      kCluster ? cluster_index() - tiles.clusters_of_tiles : blockIdx.x - tiles.column_blocks;
  const int64_t row = (unit * p.groups + group) * kTeams + team;
  const bool active = row < p.rows;
  const int left = run - column;

  Values x = {}, dy = {}, weight;
  float mean = 0, rstd = 0;
  if (active) {
    Columns::load_global(x, p.x + row * p.x_row_stride + begin + column, left);
    Columns::load_global(dy, p.dy + row * p.dy_row_stride + begin + column, left);
    mean = p.mean[row];
    rstd = p.rstd[row];
  }
  Columns::load_weight(weight, p.weight, p.weight_dtype, begin + column, left);
  const Sums<float> mine = Columns::sum(x, dy, weight, mean);
  const Sums<float> sums = RowSumsExchange<kSpan>::sum(storage.sums, mine, kLanes, p.warps, group,
                                                       row_warp, p.cluster_size);
  if (!active) return;
  const RowGradient gradient(mean, rstd, sums, p.inverse_cols);
  X* const dx = p.dx + row * p.cols + begin + column;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const auto value = [&](int i) {
      return gradient.dx(x[s][i] - mean, dy[s][i] * rstd, weight[s][i]);
    };
    Pack<X, 2> pair;
    pair.set_pair(0, value(0), value(kCount - 1));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (Columns::has(s, i, left)) dx[s * kLanes * kCount + i] = pair.element(i);
    }
  }
}

// Whether pairs of columns lie in words, in x, dy and dx.
template <class X>
bool has_paired_columns(const RingParameters<X>& p) {
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.dy) |
                              reinterpret_cast<uintptr_t>(p.dx);
  return addresses % 4 == 0 && (p.x_row_stride | p.dy_row_stride | p.cols) % 2 == 0;
}

template <class X>
cudaError_t launch_backward_elements(const RingParameters<X>& p, const FewRowsParameters<X>& tiles,
                                     const BackwardPlan& plan, cudaStream_t stream) {
  if (is_tiny(p.cols, sizeof(X))) return launch_tiny_rows(p, plan, stream);
  if constexpr (kIs16Bit<X>) {
    if (plan.is_wide) return launch_backward_wide(p, plan, stream);
  }
  const auto launch_run = [&](auto span, auto lanes, auto pairs) {
    constexpr RingSpan kSpan = decltype(span)::value;
    constexpr int kLanes = decltype(lanes)::value, kPairs = decltype(pairs)::value;
    const int threads = plan.threads_per_row * plan.rows_per_block;
    if (plan.kernel == Kernel::kFewElements) {
      return Launch(plan.blocks, dim3(threads), stream)
          .in_clusters(few_rows_cluster(plan))
          .overlapping(plan.overlap_launches)(backward_few_elements<X, kSpan, kLanes, kPairs>, p,
                                              tiles);
    }
    if constexpr (kIs16Bit<X>) {
      if (plan.bulk_stages > 0) {
        return launch_backward_bulk<X, kSpan, kLanes, kPairs>(p, plan, stream);
      }
    }
    if (threads > kMaxThreadsPerRow) return cudaErrorInvalidValue;
    const auto launch = [&](auto paired) {
      const auto kernel = backward_elements<X, kSpan, kLanes, kPairs, decltype(paired)::value>;
      constexpr int kWarpBytes = kElementWarpBytes<X, kSpan, kLanes, kPairs>;
      static std::atomic<uint64_t> prepared{0};  // a bit per device
      const cudaError_t error =
          allow_blocks(reinterpret_cast<const void*>(kernel), kRingRowWarps * kWarpBytes,
                       kSpan == RingSpan::kCluster, prepared,
                       sizeof(X) == 2 ? cudaSharedmemCarveoutDefault : kCachedShare);
      if (error != cudaSuccess) return error;
      return Launch(plan.blocks, dim3(threads), stream)
          .with_shared(threads / kWarpSize * kWarpBytes)
          .in_clusters(plan.cluster_size * plan.merged)(kernel, p);
    };
    if constexpr (kIs16Bit<X>) {
      if (has_paired_columns(p)) return launch(std::true_type());
    }
    return launch(std::false_type());
  };
  const auto launch_pairs = [&](auto pairs) {
    using Pairs = decltype(pairs);
    const auto of_warp = [&](auto lanes) {
      return launch_run(std::integral_constant<RingSpan, RingSpan::kWarp>(), lanes, Pairs());
    };
    const std::integral_constant<int, kWarpSize> whole_warp;
    if (plan.cluster_size > 1) {
      if constexpr (!kIs16Bit<X>) {  // of which wider rows are in the ring, or by backward_wide
        return launch_run(std::integral_constant<RingSpan, RingSpan::kCluster>(), whole_warp,
                          Pairs());
      }
      return cudaErrorInvalidValue;
    }
    if (plan.threads_per_row > kWarpSize) {
      return launch_run(std::integral_constant<RingSpan, RingSpan::kBlock>(), whole_warp, Pairs());
    }
    if (plan.threads_per_row == kWarpSize) return of_warp(whole_warp);
    if (plan.threads_per_row == kWarpSize / 2) {
      return of_warp(std::integral_constant<int, kWarpSize / 2>());
    }
    if (plan.threads_per_row == kLeastElementLanes) {
      return of_warp(std::integral_constant<int, kLeastElementLanes>());
    }
    return cudaErrorInvalidValue;
  };
  return visit_number<kLeastElementPairs + 1, 2 * kLeastElementPairs>(plan.columns_per_thread / 2,
                                                                      launch_pairs);
}

}  // namespace fastnorm::cuda
