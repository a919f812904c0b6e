// The backward of many rows in one read: dx, and dw and db along the way.
//
// Persistent blocks. Every thread copies its own chunks of x and dy of the rows to come into a ring
// in shared memory, reads them twice from there (for the two sums of the row, then for dx, dw and
// db) and refills the slot. As threads read only what they, or in unaligned rows their warp, copied
// themselves, the ring needs no barrier. Weight and the running dw and db are in registers.
//
// Warps that hold a row together exchange their sums through barriers in shared memory, one row
// ahead: a warp has its sums of row i + 1 before it uses those of all for row i, and has posted
// them before it waits for these, but for rows of a block that are not aligned. Rows that no
// cluster holds are shared by blocks of a grid that runs as a whole, whose sums go through device
// memory (grid_exchange.cuh), of a 16-bit type three rows ahead.
#pragma once

#include <cooperative_groups.h>

#include "pace.cuh"
#include "ring_exchange.cuh"
#include "ring_row.cuh"
#include "ring_sums.cuh"

namespace fastnorm::cuda {

// 96 let a block have 640 threads; where that spills, blocks have 512 at the most, or 384. (8 bytes
// of spills in a cluster's rows took 8 % more time, and 8 bytes in a block's, beside a wider dy,
// which has no block of more than 512 threads, 17 %: 65536 x 1024 158 us on an H200 for 135 us.)
template <class X, class DY, RingSpan kSpan, bool kVectorized, int kChunks>
constexpr int kRingRegisters =
    kChunks > kRingChunks<X> && !(kVectorized && std::is_same_v<X, DY>) ? 168
    : !kVectorized                                                      ? 128
    : kSpan == RingSpan::kBlock                                         ? 96
    : kSpan == RingSpan::kCluster                                       ? 112
                                                                        : 128;

// dy has x's dtype, or is float32 beside a 16-bit x, with two granules for a chunk of x. Those lie
// in the order of columns, and lanes copy them so that neighbours read neighbouring granules: a
// lane finds its own among those that others have copied. 65536 x 1024 bfloat16 took 171 us in
// registers on an H200, 146 us so. kCached: copies pass the L1 cache, for which there is room.
// kTail: each lane may have a column behind its warp's chunks, so that rows of a few columns more
// take no warp more. (All of them in the last warp of a row, for which the others then wait: the
// same to 1 percent.)
//
// kWholeWarps: ptxas knows that all lanes of a warp are there. Aligned rows of a block are limited
// by memory, and do better if it does not. It then has them wait for the statistics of the next row
// in each turn, and so ask for less at once: of the time that 131072 x 1024 bfloat16 takes on an
// H200 27 percent, 197 us in all. Without that wait they take 219 us, and by wait_copies for one
// more row 209 us. Others are up to 9 percent faster where ptxas knows, and so are, on an H100,
// such rows of which more stream than its memory wants, if they wait for those statistics before
// they finish a row: 32768 x 4096 took 284 us there without whole warps, 274 us so, 16384 x 8192
// 291 us and 279 us, of float32 16384 x 4096 283 us and 272 us. So do, where the plan says so
// (p.brakes), rows of a block that are not aligned, 16384 x 4095 157 us and 149 us, and aligned
// ones of clusters, 65536 columns .93 and .94 of an elementwise sum.
template <class X, class DY, RingSpan kSpan, bool kVectorized, bool kCached,
          int kChunks = kRingChunks<X>, bool kWholeWarps = true, bool kTail = false>
__global__ void __maxnreg__((kRingRegisters<X, DY, kSpan, kVectorized, kChunks>))
    backward_ring(const RingParameters<X, DY> p) {
  if (!kStreams) return;
  using Kind = RingKind<X, DY, kSpan, kVectorized, kCached, kChunks, kWholeWarps, kTail>;
  constexpr bool kGrid = Kind::kGrid, kCluster = Kind::kCluster;
  constexpr int kStages = Kind::kStages, kAhead = Kind::kAhead;
  static_assert(2 * kAhead + 2 <= (kGrid ? kGridExchanges : kExchanges));
  constexpr bool kBrakes = kWholeWarps && kVectorized && kSpan == RingSpan::kBlock;
  constexpr bool kMayBrake =
      std::is_same_v<X, DY> && kSpan == (kVectorized ? RingSpan::kCluster : RingSpan::kBlock);
  using Exchange = RingExchange<kSpan, Kind::kStays>;
  extern __shared__ __align__(16) unsigned char ring_memory[];
  __shared__ typename Exchange::Storage storage;

  const RingPlace<Kind> at(p);
  const RingSlots<Kind> slots(at, ring_memory);
  RingCopies<Kind> copies(p, at, slots);
  const int count = at.count;

  // ---- the start: what is small first, for it would wait behind the copies that fill the ring. In
  // the other order the first row was summed after 6.2 us, at 16384 x 8192 bfloat16 on an H200.

  [[maybe_unused]] const GridPlace place_in_grid{
      p.exchange + at.unit * (kGridExchanges * at.cluster_size), at.cluster_size, at.rank};
  Exchange exchange = [&] {
    if constexpr (kGrid) {
      return Exchange(storage, place_in_grid, at.row_warp, p.warps, at.lane);
    } else if constexpr (kCluster) {
      const bool served = blockDim.x > p.warps * kWarpSize;
      return Exchange(storage, p.relays, at.cluster_size, served, at.row_warp, at.lane);
    } else {
      return Exchange(storage, p.warps, at.cluster_size, at.group, at.row_warp, at.lane);
    }
  }();
  if constexpr (kCluster) cluster_arrive();
  if constexpr (kGrid || kCluster) {
    if (at.warp == p.warps) {
      if constexpr (kGrid) {
        cooperative_groups::this_grid().sync();
        exchange.serve(place_in_grid, kAhead, count);
      } else {
        cluster_wait();
        exchange.serve(count);
      }
      return;
    }
  }
  RingStatistics<Kind> statistics(p, at);
  float means[kAhead + 1], rstds[kAhead + 1];  // of the row that is finished next and later ones
#pragma unroll
  for (int a = 0; a <= kAhead; ++a) statistics.load(means[a], rstds[a]);
  const auto pass_statistics = [&](float later_mean, float later_rstd) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      means[a] = means[a + 1];
      rstds[a] = rstds[a + 1];
    }
    means[kAhead] = later_mean;
    rstds[kAhead] = later_rstd;
  };
  PackedWeight<X, kChunks, kVectorized> packed_weight;
  packed_weight.load(
      p.weight, p.weight_dtype, [&](int k) { return at.begin + at.column(k); },
      [&](int k) { return at.left(k); });
#pragma unroll 1
  for (int s = 0; s < Kind::kFirstStages; ++s) copies.copy_row(slots.stage(s));
  if constexpr (kVectorized) slots.clear_missing(at);
  const RingWeight<X, kChunks> weight(packed_weight, p.weight != nullptr, p.weight_dtype);
  RingSums<Kind> all;
  RingRow<Kind> row(p, at, slots, weight, all);
  // kGrid: leaves a row of partial sums, and begins another.
  [[maybe_unused]] int shares_left = p.dw_partials != nullptr ? p.shares : 0;
  [[maybe_unused]] int share_turns = p.share_turns;  // until then
  [[maybe_unused]] const auto leave_share = [&] {
    row.leave_sums((p.by_cluster_size.quotient(blockIdx.x) + 1) * p.shares - shares_left);
    --shares_left;
    share_turns = p.share_turns;
  };
  let_next_kernel_start();

  // ---- all rows

  // Float32 in clusters, a pause of .5 us for a row, where a turn of all takes 1.4 (see
  // ring_keeps_together in plan_backward.cpp).
  constexpr bool kMayPace =
      kCluster && kCached && kVectorized && sizeof(X) == sizeof(float) && std::is_same_v<X, DY>;
  __shared__ unsigned pace_start;
  const bool keeps = kMayPace && p.most_ahead > 0 && at.rank == 0 && threadIdx.x == 0;
  Pace<4> pace(pace_start, keeps, static_cast<int>(p.unit_stride), p.most_ahead, 1000);
  unsigned slot = slots.ring;
  const auto sum_mine = [&](const Sums<float>& mine) {
    return Kind::kStays ? sum_halves(mine.xhat_wdy, mine.wdy, at.lane)
                        : sum_halves(mine.xhat_wdy, mine.wdy);
  };
  if constexpr (Kind::kShort) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      float later_mean, later_rstd;
      statistics.load(later_mean, later_rstd);
      wait_copies<kStages - 1>();
      const float mean = means[0];
      const Sums<float> mine = row.sum(slot, mean, [] {});
      row.finish(slot, mean, rstds[0], sum_row_lanes(mine, at.lanes, at.lane), [] {});
      copies.copy_row(slot);
      slot = slots.next(slot);
      pass_statistics(later_mean, later_rstd);
    }
  } else {
    if constexpr (kCluster) {
      cluster_wait();
    } else if constexpr (kGrid) {
      cooperative_groups::this_grid().sync();
    } else {
      __syncthreads();
    }
    const auto post_first = [&](auto first, unsigned from) {
      constexpr int kFirst = decltype(first)::value;
      if (count > kFirst) {
        wait_copies<Kind::kFirstStages - 1 - kFirst>();
        const Sums<float> mine = row.sum(from, means[kFirst], [] {});
        exchange.post(kFirst, sum_mine(mine));
      }
    };
    post_first(std::integral_constant<int, 0>(), slot);
    if constexpr (kAhead > 1) {
      static_assert(kAhead == kGridAhead);
      post_first(std::integral_constant<int, 1>(), slots.next(slot));
      post_first(std::integral_constant<int, 2>(), slots.next(slots.next(slot)));
    }
#pragma unroll 1
    for (int s = Kind::kFirstStages; s < kStages; ++s) copies.copy_row(slots.stage(s));
    if constexpr (kCluster) {
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (count > a) exchange.relay(a);
      }
    }
    // Before a row is finished or after. On an H200 1024 x 131072 bfloat16, in clusters of 16, 215
    // us early and 228 us late, 4096 x 50257 415 and 422 us, but 16384 x 12288 300 and 296 us.
    const bool relays_early = !kVectorized || at.cluster_size > kMaxClusterSize;
    // Where there is no room for a warp that does nothing else.
    const bool serves = kGrid && at.warp == 0 && blockDim.x == p.warps * kWarpSize;
    if constexpr (kGrid) {
#pragma unroll 1
      for (int a = 0; a < kAhead; ++a) {
        if (serves) exchange.serve_turn(place_in_grid, a, -1, count);
      }
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      float later_mean, later_rstd;
      statistics.load(later_mean, later_rstd);
      const unsigned next = slots.next(slot);
      const unsigned ahead = kAhead > 1 ? slots.next(slots.next(next)) : next;  // of the row summed
      Sums<float> mine, sums;
      const auto sum_next = [&](const auto& amid) {
        if (i + kAhead < count) {
          wait_copies<kStages - 1 - kAhead>();
          mine = row.sum(ahead, means[kAhead], amid);
        } else {
          amid();
        }
      };
      const auto post_next = [&](float half) {
        if (i + kAhead < count) exchange.post(i + kAhead, half);
      };
      [[maybe_unused]] const auto relay_next = [&](bool early) {
        if constexpr (kCluster) {
          if (early == relays_early && i + kAhead < count) exchange.relay(i + kAhead);
        }
      };
      if constexpr (kSpan == RingSpan::kBlock && !kVectorized) {
        // Both chains of shuffles, of this row's sums and of the next one's, among arithmetic that
        // needs neither. (Clusters would wait longer for a row whose sums they fetch before they
        // post the next one's: 8192 x 16383 bfloat16 281 us on an H200 for 270 us.)
        const float fetched = exchange.fetch(i);
        sum_next([&] { sums = exchange.merge(fetched); });
        const float half = sum_mine(mine);
        if (kMayBrake && p.brakes) later_mean = keep(later_mean);
        row.finish(slot, means[0], rstds[0], sums, [&] { post_next(half); });
      } else {
        sum_next([] {});
        post_next(sum_mine(mine));
        if constexpr (kGrid) {
          if (serves) exchange.serve_turn(place_in_grid, i + kAhead, i, count);
        }
        sums = exchange.fetch_sums(i);
        relay_next(true);
        if (kBrakes || (kMayBrake && p.brakes)) later_mean = keep(later_mean);
        row.finish(slot, means[0], rstds[0], sums, [] {});
      }
      pace.keep(i + 1);
      copies.copy_row(slot);
      relay_next(false);
      if constexpr (kGrid) {
        if (--share_turns == 0 && shares_left > 1) leave_share();
      }
      slot = next;
      pass_statistics(later_mean, later_rstd);
    }
  }
  wait_copies<0>();
  if constexpr (kCluster) {
    cluster_arrive();  // no block leaves before all have sent and received their sums
    cluster_wait();
  }
  if (p.dw_partials == nullptr) return;
  if constexpr (kGrid) {
    leave_share();
    return;
  }

  leave_ring_sums(p, at, reinterpret_cast<float*>(ring_memory), all);
}

// How many clusters of the ring's blocks run side by side: of kLargeClusterSize of the largest, and
// of each smaller size, with a multiprocessor's threads in one block or several.
template <class X>
cudaError_t count_ring_clusters(DeviceProperties& properties) {
  const auto kernel = backward_ring<X, X, RingSpan::kCluster, true, true>;
  constexpr int kWarpBytes = kRingWarpBytes<X, RingSpan::kCluster, true>;
  std::atomic<uint64_t> prepared{0};
  const cudaError_t error = allow_blocks(reinterpret_cast<const void*>(kernel),
                                         kRingRowWarps * kWarpBytes, true, prepared);
  if (error != cudaSuccess) return error;
  const auto count = [&](int size, int together) {
    const int warps = kRingRowWarps / together;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(size);
    config.blockDim = dim3(warps * kWarpSize);
    config.dynamicSmemBytes = warps * kWarpBytes;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = size;
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
      clusters = 0;  // not on this device
      cudaGetLastError();
    }
    return clusters;
  };
  properties.large_clusters = count(kLargeClusterSize, 1);
  for (int size = 1; size <= kMaxClusterSize; ++size) {
    for (int together = 1; together <= kMostResident; ++together) {
      properties.clusters[size - 1][together - 1] = count(size, together);
    }
  }
  return cudaSuccess;
}

template <bool kVectorized, class X, class DY>
cudaError_t launch_ring(const RingParameters<X, DY>& p, const BackwardPlan& plan,
                        cudaStream_t stream) {
  constexpr bool kPlain = kVectorized && std::is_same_v<X, DY>;
  const auto launch_tail = [&](auto span, auto cached, auto chunks, auto whole_warps, auto tail) {
    constexpr RingSpan kSpan = decltype(span)::value;
    constexpr int kChunks = decltype(chunks)::value;
    constexpr bool kTail = decltype(tail)::value;
    const auto kernel = backward_ring<X, DY, kSpan, kVectorized, decltype(cached)::value, kChunks,
                                      decltype(whole_warps)::value, kTail>;
    constexpr int kWarpBytes = kRingWarpBytes<X, kSpan, kVectorized, kChunks, DY, kTail>;
    constexpr bool kLarge = kSpan == RingSpan::kBlock && kPlain && kIs16Bit<X>;
    constexpr bool kWideLanes = kChunks > kRingChunks<X> && !kPlain;
    constexpr bool kGrid = kSpan == RingSpan::kGrid;
    constexpr int kMostWarps = kLarge ? kRingWarps : kWideLanes ? kWideLaneWarps : kRingRowWarps;
    const int threads = block_threads(plan);
    if (threads > kMostWarps * kWarpSize) return cudaErrorInvalidValue;
    const int bytes = threads / kWarpSize * kWarpBytes;
    static std::atomic<uint64_t> prepared{0};  // a bit per device
    const cudaError_t error = allow_blocks(
        reinterpret_cast<const void*>(kernel), kMostWarps * kWarpBytes, kSpan == RingSpan::kCluster,
        prepared, sizeof(DY) == 2 ? cudaSharedmemCarveoutDefault : kCachedShare);
    if (error != cudaSuccess) return error;
    const int more = plan.exchange_warp ? kWarpSize : 0;
    Launch launch(plan.blocks, dim3(threads + more), stream);
    launch.with_shared(bytes);
    return (kGrid ? launch.together() : launch.in_clusters(plan.cluster_size * plan.merged))(kernel,
                                                                                             p);
  };
  const auto launch_span = [&](auto span, auto cached, auto chunks, auto whole_warps) {
    constexpr RingSpan kSpan = decltype(span)::value;
    if constexpr (kIs16Bit<X> && std::is_same_v<X, DY> && !kVectorized &&
                  (kSpan == RingSpan::kBlock || kSpan == RingSpan::kCluster)) {
      if (plan.run_columns > 0) {
        return launch_tail(span, cached, chunks, whole_warps, std::true_type());
      }
    }
    return launch_tail(span, cached, chunks, whole_warps, std::false_type());
  };
  const std::integral_constant<int, kRingChunks<X>> chunks;
  const std::true_type cached, whole_warps;
  if (plan.in_grid) {
    if constexpr (std::is_same_v<X, DY>) {
      return launch_span(std::integral_constant<RingSpan, RingSpan::kGrid>(), cached, chunks,
                         whole_warps);
    } else {
      return cudaErrorInvalidValue;
    }
  }
  if (plan.cluster_size > 1) {
    const std::integral_constant<RingSpan, RingSpan::kCluster> cluster;
    if constexpr (sizeof(X) == 4 && kVectorized) {
      if (plan.threads_per_row > kMostCachedThreads) {
        return launch_span(cluster, std::false_type(), chunks, whole_warps);
      }
    }
    return launch_span(cluster, cached, chunks, whole_warps);
  }
  if (plan.threads_per_row > kWarpSize) {
    const std::integral_constant<RingSpan, RingSpan::kBlock> block;
    if constexpr (kPlain) {
      if (plan.brakes) return launch_span(block, cached, chunks, whole_warps);
    }
    return launch_span(block, cached, chunks, std::bool_constant<!kVectorized>());
  }
  const std::integral_constant<RingSpan, RingSpan::kWarp> warp;
  if constexpr (kIs16Bit<X>) {
    if (plan.chunks_per_thread == kMostLaneChunks) {
      return launch_span(warp, cached, std::integral_constant<int, kMostLaneChunks>(), whole_warps);
    }
  }
  return launch_span(warp, cached, chunks, whole_warps);
}

}  // namespace fastnorm::cuda
