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

#include "backward_parameters.cuh"
#include "pace.cuh"
#include "partial_sums.cuh"
#include "ring_exchange.cuh"

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

// Leaves what the threads of a block have of dw and db: a row of partial sums for each cluster of
// blocks. `rank`: of the block among those that hold a row. `staging`: the ring, which nobody needs
// any more.
template <class X, class DY, RingSpan kSpan, bool kVectorized, bool kTail, int kChunks>
__device__ __forceinline__ void leave_ring_sums(const RingParameters<X, DY>& p, float* staging,
                                                float (&dw)[kChunks][kChunkColumns<X>],
                                                float (&db)[kChunks][kChunkColumns<X>],
                                                const TailColumn& tail, int lanes, int teams,
                                                int rank, int cluster_size) {
  constexpr int kColumns = kChunkColumns<X>;
  constexpr bool kShort = kSpan == RingSpan::kWarp;
  constexpr bool kWideDy = sizeof(DY) > sizeof(X);
  if constexpr (kShort) {  // over the teams, in the first of them
#pragma unroll 1
    for (int left = teams; left > 1; left = (left + 1) / 2) {
      const int half = (left + 1) / 2;
      const bool adds = static_cast<int>(threadIdx.x) % kWarpSize < (left - half) * p.pitch;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          const float other_dw = __shfl_down_sync(kAllLanes, dw[k][i], half * p.pitch);
          const float other_db = __shfl_down_sync(kAllLanes, db[k][i], half * p.pitch);
          if (adds) {
            dw[k][i] += other_dw;
            db[k][i] += other_db;
          }
        }
      }
    }
  }

  const bool merges = p.merged > 1;
  const int run_columns = kTail ? p.run_columns : lanes * kChunks * kColumns;
  const int width = run_columns * (kShort ? 1 : p.warps);  // columns of the block
  const int block_begin = rank * width;
  // Who owns what, worked out anew, or it would be kept in registers through all rows.
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  const int group =
      kShort ? thread / kWarpSize : p.by_warps.quotient(static_cast<unsigned>(thread) / kWarpSize);
  const int warp_begin =  // of the warp's columns among the block's
      kShort ? 0 : (thread / kWarpSize - group * p.warps) * run_columns;
  // Of one group of warps, of two or two times two, without a detour: 4096 x 8192 bfloat16 60.8 us
  // on an H200 by way of all that follows, 59.3 us so. (Beside a wider dy that spills, or with more
  // registers 65536 x 1024 took 149 us for 142 us.)
  if constexpr (kVectorized && !kShort && !kWideDy) {
    const int sharing = merges ? p.groups * p.merged : p.groups;
    // Two groups in each of two blocks, or four blocks: each of the four gets a quarter of all
    // sums.
    const bool fours = kSpan == RingSpan::kBlock && p.groups == 1 && p.merged == 4;
    const bool quarters = fours || (kSpan == RingSpan::kBlock && p.groups == 2 && p.merged == 2);
    if (sharing <= 2 || quarters) {
      const unsigned threads = p.warps * kWarpSize;  // of a group
      const unsigned in_group = thread - group * threads;
      const int start = block_begin + warp_begin;
      const int columns = min(static_cast<int>(p.cols) - start, kWarpSize * kChunks * kColumns);
      const int64_t partial =
          static_cast<int64_t>(p.by_cluster_size.quotient(blockIdx.x) / p.merged) * p.cols + start;
      const bool second = fours                 ? cluster_rank() % 2 == 1
                          : merges && !quarters ? cluster_rank() >= cluster_size
                                                : group == 1;
      float* const target = (second ? p.db_partials : p.dw_partials) + partial;
      if (sharing > 1) {
        constexpr unsigned kFours = kChunks * kColumns / 4;
        constexpr auto kBytes = static_cast<unsigned>(sizeof(float4));
        const unsigned place = shared_address(staging) + in_group * kBytes;
        const unsigned step = threads * kBytes;
        if (fours || (merges && !quarters)) {
          const int other = fours ? cluster_rank() ^ 1 : second ? rank : cluster_size + rank;
          swap_sums<true>(dw, db, second, place, remote_address(place, other), step);
        } else {
          const unsigned behind = place + kFours * step;
          swap_sums<false>(dw, db, second, second ? behind : place, second ? place : behind, step);
        }
        if constexpr (kSpan == RingSpan::kBlock) {
          // 16384 x 4096 bfloat16 147.6 us on an H100 by way of what follows, 146.0 us so; in four
          // blocks 8192 x 8192 108.3 us on an H200 and 107.4 us, 10000 x 7168 113.8 and 112.1,
          // where shapes that it does not concern differed by up to .9 us.
          if (quarters) {
            constexpr int kHalf = kChunks / 2;
            constexpr int kHalfColumns = kHalf * kWarpSize * kColumns;
            const int half = p.merged / 2;
            const bool later = cluster_rank() >= half;
            const unsigned behind = place + (2 * kFours + (second ? kFours / 2 : 0)) * step;
            swap_halves(dw, later, behind, remote_address(behind, cluster_rank() ^ half), step);
            cluster_arrive();
            store_sums<kHalf>(target + (later ? kHalfColumns : 0), dw,
                              columns - (later ? kHalfColumns : 0));
            cluster_wait();  // neither block leaves while the other reads from it
            return;
          }
        }
        if (merges) cluster_arrive();
      }
      store_sums<kChunks>(target, dw, columns);
      if (sharing == 1) store_sums<kChunks>(p.db_partials + partial, db, columns);
      if (merges) cluster_wait();
      return;
    }
  }

  // By way of shared memory. Where blocks are merged, each of a cluster adds up a part of what all
  // of them have.
  const auto stage = [&](const float (&values)[kChunks][kColumns], float behind, float* target) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
#pragma unroll
      for (int i = 0; i < kColumns; i += 4) {
        *reinterpret_cast<float4*>(target + warp_begin +
                                   (thread % kWarpSize + k * lanes) * kColumns + i) =
            make_float4(values[k][i], values[k][i + 1], values[k][i + 2], values[k][i + 3]);
      }
    }
    constexpr int kEnd = kWarpSize * kChunks * kColumns;  // of the chunks
    if (kTail && thread % kWarpSize < run_columns - kEnd) {
      target[warp_begin + kEnd + thread % kWarpSize] = behind;
    }
  };
  __syncthreads();
  if (!kShort || thread % kWarpSize < lanes) {
    stage(dw, tail.dw, staging + group * width);
    stage(db, tail.db, staging + (p.groups + group) * width);
  }
  leave_partials<kVectorized>(p, staging, width, block_begin, p.merged, cluster_size);
}

// dy has x's dtype, or is float32 beside a 16-bit x, with two granules for a chunk of x. Those lie
// in the order of columns, and lanes copy them so that neighbours read neighbouring granules: a
// lane finds its own among those that others have copied. 65536 x 1024 bfloat16 took 171 us in
// registers on an H200, 146 us so. kCached: copies pass the L1 cache, for which there is room.
// kWholeWarps: ptxas knows that all lanes of a warp are there. kTail: each lane may have a column
// behind its warp's chunks, so that rows of a few columns more take no warp more. (All of them in
// the last warp of a row, for which the others then wait: the same to 1 percent.)
template <class X, class DY, RingSpan kSpan, bool kVectorized, bool kCached,
          int kChunks = kRingChunks<X>, bool kWholeWarps = true, bool kTail = false>
__global__ void __maxnreg__((kRingRegisters<X, DY, kSpan, kVectorized, kChunks>))
    backward_ring(const RingParameters<X, DY> p) {
  if (!kStreams) return;
  constexpr int kColumns = kChunkColumns<X>;
  constexpr int kSize = static_cast<int>(sizeof(X));
  constexpr bool kShort = kSpan == RingSpan::kWarp;
  constexpr int kDySize = static_cast<int>(sizeof(DY));
  constexpr int kDyParts = kDySize / kSize;  // granules of dy for a chunk of x
  constexpr bool kWideDy = kDyParts > 1;
  constexpr int kStages = kRingStages<X, kSpan, DY>;
  constexpr int kAhead = kRingAhead<X, kSpan>;
  // Those that are filled before the first row's sums: with all of them 32768 x 4096 bfloat16 took
  // 196.3 us on an H200, 65536 x 3072 302.5 us; 195.9 and 300.6 us so.
  constexpr int kFirstStages = kShort ? kStages : kAhead + 1;
  static_assert(2 * kAhead + 2 <= (kSpan == RingSpan::kGrid ? kGridExchanges : kExchanges));
  constexpr unsigned kXBytes =
      kRingGranules<X, kSpan, kVectorized, kChunks, X, kTail> * kChunkBytes;
  constexpr unsigned kDyBytes =
      kRingGranules<X, kSpan, kVectorized, kChunks, DY, kTail> * kChunkBytes;
  constexpr unsigned kStageBytes = kXBytes + kDyBytes;
  using Chunk = Pack<X, kColumns>;
  // kStays: which lane it is, and how long its warp's run, ptxas would work out anew wherever it is
  // needed, from threadIdx.x, for which it waits. What does not follow from that stays in
  // registers: of rows that are not aligned 4096 x 50257 bfloat16 took 448 us so on an H200, 422 us
  // since, 8192 x 16385 258 us and 238 us. (Of float32 that spills.)
  constexpr bool kStays = kIs16Bit<X> && !kVectorized && !kShort;
  using Exchange = RingExchange<kSpan, kStays>;
  extern __shared__ __align__(16) unsigned char ring_memory[];
  __shared__ typename Exchange::Storage storage;

  // Who owns what. Lane `lane` of a team owns the chunks first, first + lanes, ... of its run,
  // which begins at column `begin` of the row and has `run` columns.
  //
  // Aligned rows of a block are limited by memory, and do better if ptxas does not know that warps
  // are whole. It then has them wait for the statistics of the next row in each turn, and so ask
  // for less at once: of the time that 131072 x 1024 bfloat16 takes on an H200 27 percent, 197 us
  // in all. Without that wait they take 219 us, and by wait_copies for one more row 209 us. Others
  // are up to 9 percent faster where ptxas knows, and so are, on an H100, such rows of which more
  // stream than its memory wants, if they wait for those statistics before they finish a row: 32768
  // x 4096 took 284 us there without whole warps, 274 us so, 16384 x 8192 291 us and 279 us, of
  // float32 16384 x 4096 283 us and 272 us. So do, where the plan says so (p.brakes), rows of a
  // block that are not aligned, 16384 x 4095 157 us and 149 us, and aligned ones of clusters, 65536
  // columns .93 and .94 of an elementwise sum.
  constexpr bool kBrakes = kWholeWarps && kVectorized && kSpan == RingSpan::kBlock;
  constexpr bool kMayBrake =
      std::is_same_v<X, DY> && kSpan == (kVectorized ? RingSpan::kCluster : RingSpan::kBlock);
  // So do aligned float32 rows in a grid: 100 x 600000 227 us on an H200 so, 234 us.
  constexpr bool kAsks = !kWholeWarps || (kSpan == RingSpan::kGrid && kVectorized && !kIs16Bit<X>);
  const int warp = kAsks ? threadIdx.x / kWarpSize : warp_index();
  const int lanes = kShort ? p.lanes : kWarpSize;
  const int teams = kShort ? p.teams : 1;
  const int team = kShort ? p.by_pitch.quotient(threadIdx.x % kWarpSize) : 0;
  const int lane = kShort   ? threadIdx.x % kWarpSize - team * p.pitch
                   : kStays ? lane_index()
                            : threadIdx.x % kWarpSize;
  // A lane between two teams or behind the last one: as if its rows were beyond the last one.
  const bool idle = kShort && (lane >= lanes || team >= teams);
  constexpr bool kGrid = kSpan == RingSpan::kGrid, kCluster = kSpan == RingSpan::kCluster;
  // (Of rows that are not aligned the register of a reciprocal makes float32 spill: 16384 x 4096,
  // one element off, 201 us on an H200 so, 252 us with 12 bytes of spills.)
  const int group = kShort              ? warp
                    : kGrid || kCluster ? 0
                    : kVectorized       ? p.by_warps.quotient(warp)
                                        : warp / p.warps;
  const int row_warp = kShort ? 0 : warp - group * p.warps;
  const int cluster_size = kGrid || kCluster ? p.cluster_size : 1;
  const int cluster = kGrid || kCluster ? p.by_cluster_size.quotient(blockIdx.x) : blockIdx.x;
  const int rank = static_cast<int>(blockIdx.x) - cluster * cluster_size;
  constexpr int kWarpColumns = kWarpSize * kChunks * kColumns;
  const int run_columns = kTail ? p.run_columns : kWarpColumns;
  const int begin = (rank * p.warps * (kShort ? 0 : 1) + row_warp) * run_columns;
  const int left = static_cast<int>(p.cols) - begin;
  int run = min(left, lanes * kChunks * kColumns);
  const int behind = kTail ? min(left, run_columns) - run : 0;  // columns behind it, one to a lane
  int behind_from_here = behind - lane;  // of those, this lane's and the next ones'
  if constexpr (kStays) asm volatile("" : "+r"(run));
  if constexpr (kTail) asm volatile("" : "+r"(behind_from_here));
  const bool has_tail = behind_from_here > 0;
  // Columns from this lane's chunk k on, unclamped (see Share::left).
  const auto left_of = [&](int k) { return run - (lane + k * lanes) * kColumns; };

  // Rows of this team: `first`, first + stride, ...; `count` of them, beyond the last row perhaps.
  const int64_t unit = static_cast<int64_t>(cluster) * p.groups + group;
  const int count = p.full_turns + (unit < p.last_turn ? 1 : 0);
  const int64_t first = idle ? p.rows : unit * teams + team;
  const int64_t stride = p.unit_stride * teams;

  // Where lanes read what others have copied, idle ones read what the last of their team does, and
  // write nothing.
  constexpr bool kShares = kWideDy || !kVectorized;
  const int place = kShort && kShares ? min(lane, lanes - 1) : lane;
  const int x_granule =
      kVectorized ? threadIdx.x % kWarpSize : team * (lanes * kChunks + 1) + place;
  const unsigned ring = keep(shared_address(ring_memory) +
                             warp * kRingWarpBytes<X, kSpan, kVectorized, kChunks, DY, kTail> +
                             x_granule * kChunkBytes);
  const unsigned ring_end = ring + kStages * kStageBytes;
  const unsigned chunk_step = (kVectorized ? kWarpSize : lanes) * kChunkBytes;
  // From there to what this lane copies of dy, and to its chunks.
  const int dy_granule =
      kWideDy ? team * (lanes * kChunks * kDyParts + (kVectorized ? 0 : 1)) + place : x_granule;
  const unsigned dy_copies = kXBytes + (dy_granule - x_granule) * kChunkBytes;
  const unsigned dy_place = dy_copies + (kDyParts - 1) * place * kChunkBytes;
  const unsigned dy_copy_step = kWideDy ? lanes * kChunkBytes : chunk_step;
  const unsigned dy_step_of_chunks = kDyParts * dy_copy_step;
  const auto next_slot = [&](unsigned slot) {
    slot += kStageBytes;
    if (slot == ring_end) slot = ring;
    asm volatile("" : "+r"(slot));  // or ptxas would work it out again and again
    return slot;
  };

  // ---- copies into the ring

  // This lane's first granule of the row to be copied next, as far into a granule as the run is.
  const char* x = reinterpret_cast<const char*>(p.x + first * p.x_row_stride + begin);
  const char* dy = reinterpret_cast<const char*>(p.dy + first * p.dy_row_stride + begin);
  // Of the run in the row summed next. (Of the run, not of the lane: the same in the warp.)
  unsigned x_low = static_cast<unsigned>(reinterpret_cast<uintptr_t>(x));
  unsigned dy_low = static_cast<unsigned>(reinterpret_cast<uintptr_t>(dy));
  x += lane * kChunkBytes;
  dy += lane * kChunkBytes;
  int to_copy = kShares && idle ? 0 : count;
  int64_t copied_row = first;
  // A team that has another row to come does not reach the end of the tensor.
  const bool apart = min(p.x_step, p.dy_step) >= 2 * kChunkBytes;
  const int careful = apart ? (kShort ? 2 : 1) : count;  // rows to the end
  // Of a run, and the one that it may reach into.
  const int x_granules = run > 0 ? (run + behind + kColumns - 1) / kColumns + 1 : 0;
  [[maybe_unused]] const int dy_granules =
      run > 0 ? (run * kDySize + kChunkBytes - 1) / kChunkBytes + 1 : 0;
  const auto copy_row = [&](unsigned slot) {
    if (to_copy > 0) {
      if (kShort && copied_row >= p.rows) {
#pragma unroll
        for (int k = 0; k < kChunks + (kVectorized ? 0 : 1); ++k) {
          if (k < kChunks || lane == 0) store_shared(slot + k * chunk_step, Granule());
        }
#pragma unroll
        for (int k = 0; k < kChunks * kDyParts + (kVectorized ? 0 : 1); ++k) {
          if (k < kChunks * kDyParts || lane == 0) {
            store_shared(slot + dy_copies + k * dy_copy_step, Granule());
          }
        }
      } else if constexpr (kVectorized) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          if (left_of(k) > 0) {
            copy_granule<kCached>(slot + k * chunk_step, x + k * lanes * kChunkBytes);
          }
        }
#pragma unroll
        for (int k = 0; k < kChunks * kDyParts; ++k) {
          const bool exists =
              kWideDy ? (lane + k * lanes) * kColumns < run * kDyParts : left_of(k) > 0;
          if (exists) {
            copy_granule<kCached>(slot + dy_copies + k * dy_copy_step,
                                  dy + k * lanes * kChunkBytes);
          }
        }
      } else if (to_copy > careful) {
        copy_granules<kChunks>(slot, chunk_step, x, x_granules, lane, lanes);
        copy_granules<kChunks * kDyParts>(slot + dy_copies, dy_copy_step, dy,
                                          kWideDy ? dy_granules : x_granules, lane, lanes);
      } else {
        constexpr int kMore = kTail ? 1 : 0;
        copy_last_granules<kSize, kChunks + kMore>(slot, chunk_step, x, p.x_end,
                                                   (run + behind) * kSize, lane, lanes);
        copy_last_granules<kDySize, kChunks * kDyParts + kMore>(
            slot + dy_copies, dy_copy_step, dy, p.dy_end, (run + behind) * kDySize, lane, lanes);
      }
      x += p.x_step;
      dy += p.dy_step;
      copied_row += stride;
      --to_copy;
    }
    commit_copies();
  };

  // ---- the start: what is small first, for it would wait behind the copies that fill the ring. In
  // the other order the first row was summed after 6.2 us, at 16384 x 8192 bfloat16 on an H200.

  [[maybe_unused]] const GridPlace place_in_grid{
      p.exchange + unit * (kGridExchanges * cluster_size), cluster_size, rank};
  Exchange exchange = [&] {
    if constexpr (kGrid) {
      return Exchange(storage, place_in_grid, row_warp, p.warps, lane);
    } else if constexpr (kCluster) {
      const bool served = blockDim.x > p.warps * kWarpSize;
      return Exchange(storage, p.relays, cluster_size, served, row_warp, lane);
    } else {
      return Exchange(storage, p.warps, cluster_size, group, row_warp, lane);
    }
  }();
  if constexpr (kCluster) cluster_arrive();
  if constexpr (kGrid || kCluster) {
    if (warp == p.warps) {
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
  const float* mean_of = p.mean + as_of_a_lane(first);
  const float* rstd_of = p.rstd + as_of_a_lane(first);
  int64_t loaded_row = first;
  int to_load = count;
  const auto load_statistics = [&](float& mean, float& rstd) {
    mean = rstd = 0;
    if (to_load > 0 && (!kShort || loaded_row < p.rows)) {
      mean = __ldg(mean_of);
      rstd = __ldg(rstd_of);
    }
    mean_of += stride;
    rstd_of += stride;
    loaded_row += stride;
    --to_load;
  };
  float means[kAhead + 1], rstds[kAhead + 1];  // of the row that is finished next and later ones
#pragma unroll
  for (int a = 0; a <= kAhead; ++a) load_statistics(means[a], rstds[a]);
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
      p.weight, p.weight_dtype, [&](int k) { return begin + (lane + k * lanes) * kColumns; },
      left_of);
#pragma unroll 1
  for (int s = 0; s < kFirstStages; ++s) copy_row(ring + s * kStageBytes);
  // Chunks that do not exist are never copied.
  if constexpr (kVectorized) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (left_of(k) <= 0 && !(kShares && idle)) {
        for (int s = 0; s < kStages; ++s) {
          const unsigned stage = ring + s * kStageBytes;
          store_shared(stage + k * chunk_step, Granule());
#pragma unroll
          for (int g = 0; g < kDyParts; ++g) {
            store_shared(stage + dy_place + k * dy_step_of_chunks + g * kChunkBytes, Granule());
          }
        }
      }
    }
  }
  const RingWeight<X, kChunks> weight(packed_weight, p.weight != nullptr, p.weight_dtype);
  float dw[kChunks][kColumns] = {}, db[kChunks][kColumns] = {};
  TailColumn tail;
  // From a lane's first chunk to its column behind them all; the row that is finished next begins
  // as far into a granule as these say.
  [[maybe_unused]] const int tail_place = kWarpColumns * kSize - lane * (kChunkBytes - kSize);
  [[maybe_unused]] unsigned tail_x_low = x_low, tail_dy_low = dy_low;
  if (kTail && has_tail) {
    tail.weight = load_weight<X>(p.weight, p.weight_dtype, begin + kWarpColumns + lane);
  }
  // kGrid: leaves a row of partial sums, and begins another.
  [[maybe_unused]] int shares_left = p.dw_partials != nullptr ? p.shares : 0;
  [[maybe_unused]] int share_turns = p.share_turns;  // until then
  [[maybe_unused]] const auto leave_share = [&] {
    const int64_t partial = (p.by_cluster_size.quotient(blockIdx.x) + 1) * p.shares - shares_left;
    const auto leave = [&](float (&values)[kChunks][kColumns], float* target) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int place = (lane + k * lanes) * kColumns;
#pragma unroll
        for (int i = 0; i < kColumns; i += 4) {
          float4 four =
              make_float4(values[k][i], values[k][i + 1], values[k][i + 2], values[k][i + 3]);
          store_some<kVectorized>(target + partial * p.cols + begin + place + i, four,
                                  run - place - i);
#pragma unroll
          for (int j = 0; j < 4; ++j) values[k][i + j] = 0;
        }
      }
    };
    leave(dw, p.dw_partials);
    leave(db, p.db_partials);
    --shares_left;
    share_turns = p.share_turns;
  };
  let_next_kernel_start();

  // ---- a row

  // Chunks of an unaligned run that are shifted together: two, where there are registers for them.
  constexpr int kTogether = kChunks % 2 == 0 && (kDySize == 2 || kSpan == RingSpan::kBlock) ? 2 : 1;
  const bool cut = kStays ? run < kWarpColumns : left_of(kChunks - 1) < kColumns;

  int64_t row = first;
  const auto load_x = [&](unsigned slot, int k) {
    return load_shared_pack<X, kColumns>(slot + k * chunk_step);
  };
  const auto load_dy = [&](unsigned slot, int k) {
    return load_shared_pack<DY, kColumns>(slot + dy_place + k * dy_step_of_chunks);
  };

  // The sums of (x - mean) * dy * weight and of dy * weight over this thread's columns. `amid`:
  // what is done before the arithmetic.
  const auto sum_row = [&](unsigned slot, float mean, const auto& amid) {
    if constexpr (kShares) __syncwarp();  // the lanes' copies have arrived
    if constexpr (kVectorized) {
      amid();
      return sum_chunks<X>([&](int k) { return load_x(slot, k); },
                           [&](int k) { return load_dy(slot, k); }, weight, mean);
    } else {
      UnalignedChunks<X, X, kTogether> x_chunks;
      UnalignedChunks<X, DY, kTogether> dy_chunks;
      const auto align_chunks = [&](int k) {
        const unsigned x_place = slot + k * chunk_step;
        const unsigned place = slot + dy_place + k * dy_step_of_chunks;
        x_chunks.load(x_place, chunk_step);
        dy_chunks.load(place, dy_step_of_chunks);
        __syncwarp();  // the lane before has read this one's
        // By one branch for both where they begin at the same place: 65536 x 2047 bfloat16 took 238
        // us on an H200 by one for each, with more instructions in copies and stores, 221 us so.
        const int x_offset = x_low % kChunkBytes, dy_offset = dy_low % kChunkBytes;
        if (!kShort && x_offset == dy_offset) {
          with_offset(x_offset, [&](auto word, int bits) {
            x_chunks.template align<decltype(word)::value>(bits);
            dy_chunks.template align<decltype(word)::value>(bits);
          });
        } else {
          with_offset(x_offset, [&](auto word, int bits) {
            x_chunks.template align<decltype(word)::value>(bits);
          });
          with_offset(dy_offset, [&](auto word, int bits) {
            dy_chunks.template align<decltype(word)::value>(bits);
          });
        }
        if (cut) {
#pragma unroll
          for (int j = 0; j < kTogether; ++j) {
            // The other warps of the row wait for this one, its last.
            if (kStays && run >= (k + j + 1) * kWarpSize * kColumns) continue;
            int left = left_of(k + j);
            // Or masks for every chunk would be kept from row to row.
            asm volatile("" : "+r"(left));
            x_chunks.truncate(j, left);
            dy_chunks.truncate(j, left);
          }
        }
        if (!kShort || row < p.rows) {
          x_chunks.store(x_place, chunk_step);
          dy_chunks.store(place, dy_step_of_chunks);
        }
      };
      float tail_x = 0, tail_dy = 0;
      if constexpr (kTail) {
        tail_x = load_element<X>(slot + tail_place + x_low % kChunkBytes);
        tail_dy = load_element<X>(slot + dy_place + tail_place + dy_low % kChunkBytes);
      }
      Sums<float> sums = sum_chunks<X>(
          [&](int k) {
            if (k % kTogether == 0) align_chunks(k);
            if (k == 0) amid();
            return x_chunks.chunk(k % kTogether);
          },
          [&](int k) { return dy_chunks.chunk(k % kTogether); }, weight, mean);
      if (kTail && has_tail) sums.merge(tail.sums(tail_x, tail_dy, mean));
      x_low += static_cast<unsigned>(p.x_step);
      dy_low += static_cast<unsigned>(p.dy_step);
      return sums;
    }
  };

  const auto sum_mine = [&](const Sums<float>& mine) {
    return kStays ? sum_halves(mine.xhat_wdy, mine.wdy, lane) : sum_halves(mine.xhat_wdy, mine.wdy);
  };

  char* dx = reinterpret_cast<char*>(p.dx + first * p.cols + begin);
  unsigned dx_low = static_cast<unsigned>(reinterpret_cast<uintptr_t>(dx));
  dx += lane * kChunkBytes;
  // `amid`: what is done when the first chunk has been worked out.
  const auto finish_row = [&](unsigned slot, float mean, float rstd, const Sums<float>& sums,
                              const auto& amid) {
    const RowGradient gradient(mean, rstd, sums, p.inverse_cols);
    const bool active = !kShort || row < p.rows;
    // Where dx is aligned, as a new tensor is beside views of others, it takes no detour: 16384 x
    // 8192 bfloat16, x and dy one element off, took 252 us on an H200 with it, 232 us so. (A grid
    // has no registers for the choice.)
    const int shifted = dx_low % kChunkBytes;
    const bool straight = kVectorized || (!kGrid && shifted == 0 && run % kColumns == 0);
    [[maybe_unused]] float tail_x, tail_dy;
    if constexpr (kTail) {
      tail_x = load_element<X>(slot + tail_place + tail_x_low % kChunkBytes);
      tail_dy = load_element<X>(slot + dy_place + tail_place + tail_dy_low % kChunkBytes);
    }
    tail_x_low += static_cast<unsigned>(p.x_step);
    tail_dy_low += static_cast<unsigned>(p.dy_step);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      Chunk x = {};
      Pack<DY, kColumns> dy = {};
      if (kVectorized || active) {  // or an idle lane would read what others have put there
        x = load_x(slot, k);
        dy = load_dy(slot, k);
      }
      Chunk out;
#pragma unroll
      for (int i = 0; i < kColumns; i += 2) {
        float values[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float centred = x.template get<float>(i + j) - mean;
          const float g = dy.template get<float>(i + j);
          const float scaled = g * rstd;
          dw[k][i + j] = fma(scaled, centred, dw[k][i + j]);
          db[k][i + j] += g;
          values[j] = gradient.dx(centred, scaled, weight.values[k][i + j]);
        }
        out.set_pair(i, values[0], values[1]);
      }
      if (k == 0) amid();
      if (kTail && k == 0 && has_tail) {
        *reinterpret_cast<X*>(dx + tail_place) = narrow<X>(tail.finish(tail_x, tail_dy, gradient));
      }
      if (straight) {
        if (active && left_of(k) > 0) {
          store_wide(reinterpret_cast<X*>(dx + k * lanes * kChunkBytes), out);
        }
      } else if (active) {
        store_shared(slot + k * chunk_step, to_granule(out));  // in the place of x
      }
    }
    if constexpr (!kVectorized) {
      __syncwarp();
      if (!straight && active && run > 0) {
        // Granule j of device memory has the last bytes of chunk j - 1 and the first of chunk j.
        Granule before[kChunks], granules[kChunks];
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          const unsigned place = slot + k * chunk_step;
          granules[k] = load_shared(place);
          before[k] = load_shared(k == 0 && lane == 0 ? place : place - kChunkBytes);
        }
        with_offset(kChunkBytes - shifted, [&](auto word, int bits) {
#pragma unroll
          for (int k = 0; k < kChunks; ++k) {
            granules[k] = shift<decltype(word)::value>(before[k], granules[k], bits);
          }
        });
        char* const target = reinterpret_cast<char*>(granule_of(dx));
        // The run's first granule, and what lies behind its last chunk, other runs have a part of.
        const int end = kShort || run % kColumns != 0 ? run * kSize + shifted : run * kSize;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          const bool whole = (k * lanes + lane + 1) * kChunkBytes <= end;
          if (whole && (k > 0 || lane > 0 || shifted == 0)) {
            const Granule& granule = granules[k];
            *reinterpret_cast<uint4*>(target + k * lanes * kChunkBytes) =
                make_uint4(granule.words[0], granule.words[1], granule.words[2], granule.words[3]);
          }
        }
        // The elements before the first whole granule, counted from the run's begin, and those
        // after the last one, from its end.
        const int first_bytes = kChunkBytes - shifted;
        const int last_bytes = (run * kSize + shifted) % kChunkBytes;
        const auto store = [&](int at, bool exists) {
          if (exists) {
            store_element<kSize>(dx + (at - lane * kChunkBytes), slot + (at - lane * kChunkBytes));
          }
        };
        if constexpr (kShort) {
          for (int e = lane; e < kColumns; e += lanes) {
            store(e * kSize, e * kSize < min(first_bytes, run * kSize));
            store((run - 1 - e) * kSize, e * kSize < min(last_bytes, run * kSize));
          }
        } else if (lane < 2 * kColumns) {
          const bool behind = lane >= kColumns;
          const int e = lane % kColumns;
          store((behind ? run - 1 - e : e) * kSize,
                e * kSize < min(behind ? last_bytes : first_bytes, run * kSize));
        }
      }
    }
    if constexpr (kShares) __syncwarp();  // before the slot is filled again
    dx += p.dx_step;
    dx_low += static_cast<unsigned>(p.dx_step);
    row += stride;
  };

  // ---- all rows

  // Float32 in clusters, a pause of .5 us for a row, where a turn of all takes 1.4 (see
  // keep_together in plan_backward.cpp).
  constexpr bool kMayPace =
      kCluster && kCached && kVectorized && sizeof(X) == sizeof(float) && std::is_same_v<X, DY>;
  __shared__ unsigned pace_start;
  const bool keeps = kMayPace && p.most_ahead > 0 && rank == 0 && threadIdx.x == 0;
  Pace<4> pace(pace_start, keeps, static_cast<int>(p.unit_stride), p.most_ahead, 1000);
  unsigned slot = ring;
  if constexpr (kShort) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      float later_mean, later_rstd;
      load_statistics(later_mean, later_rstd);
      wait_copies<kStages - 1>();
      finish_row(slot, means[0], rstds[0],
                 sum_row_lanes(sum_row(slot, means[0], [] {}), lanes, lane), [] {});
      copy_row(slot);
      slot = next_slot(slot);
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
        wait_copies<kFirstStages - 1 - kFirst>();
        const Sums<float> mine = sum_row(from, means[kFirst], [] {});
        exchange.post(kFirst, sum_mine(mine));
      }
    };
    post_first(std::integral_constant<int, 0>(), slot);
    if constexpr (kAhead > 1) {
      static_assert(kAhead == kGridAhead);
      post_first(std::integral_constant<int, 1>(), next_slot(slot));
      post_first(std::integral_constant<int, 2>(), next_slot(next_slot(slot)));
    }
#pragma unroll 1
    for (int s = kFirstStages; s < kStages; ++s) copy_row(ring + s * kStageBytes);
    if constexpr (kCluster) {
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (count > a) exchange.relay(a);
      }
    }
    // Before a row is finished or after. On an H200 1024 x 131072 bfloat16, in clusters of 16, 215
    // us early and 228 us late, 4096 x 50257 415 and 422 us, but 16384 x 12288 300 and 296 us.
    const bool relays_early = !kVectorized || cluster_size > kMaxClusterSize;
    // Where there is no room for a warp that does nothing else.
    const bool serves = kGrid && warp == 0 && blockDim.x == p.warps * kWarpSize;
    if constexpr (kGrid) {
#pragma unroll 1
      for (int a = 0; a < kAhead; ++a) {
        if (serves) exchange.serve_turn(place_in_grid, a, -1, count);
      }
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      float later_mean, later_rstd;
      load_statistics(later_mean, later_rstd);
      const unsigned next = next_slot(slot);
      const unsigned ahead = kAhead > 1 ? next_slot(next_slot(next)) : next;  // of the row summed
      Sums<float> mine, sums;
      const auto sum_next = [&](const auto& amid) {
        if (i + kAhead < count) {
          wait_copies<kStages - 1 - kAhead>();
          mine = sum_row(ahead, means[kAhead], amid);
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
        finish_row(slot, means[0], rstds[0], sums, [&] { post_next(half); });
      } else {
        sum_next([] {});
        post_next(sum_mine(mine));
        if constexpr (kGrid) {
          if (serves) exchange.serve_turn(place_in_grid, i + kAhead, i, count);
        }
        sums = exchange.fetch_sums(i);
        relay_next(true);
        if (kBrakes || (kMayBrake && p.brakes)) later_mean = keep(later_mean);
        finish_row(slot, means[0], rstds[0], sums, [] {});
      }
      pace.keep(i + 1);
      copy_row(slot);
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

  leave_ring_sums<X, DY, kSpan, kVectorized, kTail>(p, reinterpret_cast<float*>(ring_memory), dw,
                                                    db, tail, lanes, teams, rank, cluster_size);
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
