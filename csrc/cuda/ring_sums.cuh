// What the backward's ring leaves of dw and db when its rows are done: a row of partial sums for
// each cluster of blocks, or block.
#pragma once

#include "partial_sums.cuh"
#include "ring_row.cuh"

namespace fastnorm::cuda {

// A warp's teams, in the first of them.
template <class Kind>
__device__ __forceinline__ void add_up_teams(const typename Kind::Parameters& p,
                                             const RingPlace<Kind>& at, RingSums<Kind>& sums) {
#pragma unroll 1
  for (int left = at.teams; left > 1; left = (left + 1) / 2) {
    const int half = (left + 1) / 2;
    const bool adds = static_cast<int>(threadIdx.x) % kWarpSize < (left - half) * p.pitch;
#pragma unroll
    for (int k = 0; k < Kind::kChunks; ++k) {
#pragma unroll
      for (int i = 0; i < Kind::kColumns; ++i) {
        const float other_dw = __shfl_down_sync(kAllLanes, sums.dw[k][i], half * p.pitch);
        const float other_db = __shfl_down_sync(kAllLanes, sums.db[k][i], half * p.pitch);
        if (adds) {
          sums.dw[k][i] += other_dw;
          sums.db[k][i] += other_db;
        }
      }
    }
  }
}

// Who owns what, worked out anew, or it would be kept in registers through all rows.
template <class Kind>
struct SumsPlace {
  int thread, group;
  int run_columns;  // of a warp
  int width;        // columns of the block
  int block_begin;  // the first of them, in the row
  int warp_begin;   // the warp's first, of the block's

  __device__ __forceinline__ SumsPlace(const typename Kind::Parameters& p,
                                       const RingPlace<Kind>& at) {
    run_columns = Kind::kTail ? p.run_columns : at.lanes * Kind::kChunks * Kind::kColumns;
    width = run_columns * (Kind::kShort ? 1 : p.warps);
    block_begin = at.rank * width;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    group = Kind::kShort ? thread / kWarpSize
                         : p.by_warps.quotient(static_cast<unsigned>(thread) / kWarpSize);
    warp_begin = Kind::kShort ? 0 : (thread / kWarpSize - group * p.warps) * run_columns;
  }
};

// Of one group of warps, of two or two times two, without a detour by shared memory: 4096 x 8192
// bfloat16 60.8 us on an H200 with it, 59.3 us so. (Beside a wider dy that spills, or with more
// registers 65536 x 1024 took 149 us for 142 us.) False: of more.
template <class Kind>
__device__ __forceinline__ bool leave_from_registers(const typename Kind::Parameters& p,
                                                     const RingPlace<Kind>& at,
                                                     const SumsPlace<Kind>& place, float* staging,
                                                     RingSums<Kind>& sums) {
  constexpr int kChunks = Kind::kChunks, kColumns = Kind::kColumns;
  constexpr bool kBlock = Kind::kSpan == RingSpan::kBlock;
  const bool merges = p.merged > 1;
  const int sharing = merges ? p.groups * p.merged : p.groups;
  // Two groups in each of two blocks, or four blocks: each of the four gets a quarter of all sums.
  const bool fours = kBlock && p.groups == 1 && p.merged == 4;
  const bool quarters = fours || (kBlock && p.groups == 2 && p.merged == 2);
  if (sharing > 2 && !quarters) return false;
  const unsigned threads = p.warps * kWarpSize;  // of a group
  const unsigned in_group = place.thread - place.group * threads;
  const int start = place.block_begin + place.warp_begin;
  const int columns = min(static_cast<int>(p.cols) - start, Kind::kWarpColumns);
  const int64_t partial =
      static_cast<int64_t>(p.by_cluster_size.quotient(blockIdx.x) / p.merged) * p.cols + start;
  const bool second = fours                 ? cluster_rank() % 2 == 1
                      : merges && !quarters ? cluster_rank() >= at.cluster_size
                                            : place.group == 1;
  float* const target = (second ? p.db_partials : p.dw_partials) + partial;
  if (sharing > 1) {
    constexpr unsigned kFours = kChunks * kColumns / 4;
    constexpr auto kBytes = static_cast<unsigned>(sizeof(float4));
    const unsigned own = shared_address(staging) + in_group * kBytes;
    const unsigned step = threads * kBytes;
    if (fours || (merges && !quarters)) {
      const int other = fours ? cluster_rank() ^ 1 : second ? at.rank : at.cluster_size + at.rank;
      swap_sums<true>(sums.dw, sums.db, second, own, remote_address(own, other), step);
    } else {
      const unsigned behind = own + kFours * step;
      swap_sums<false>(sums.dw, sums.db, second, second ? behind : own, second ? own : behind,
                       step);
    }
    if constexpr (kBlock) {
      // 16384 x 4096 bfloat16 147.6 us on an H100 by shared memory, 146.0 us so; in four blocks
      // 8192 x 8192 108.3 us on an H200 and 107.4 us, 10000 x 7168 113.8 and 112.1, where shapes
      // that it does not concern differed by up to .9 us.
      if (quarters) {
        constexpr int kHalf = kChunks / 2;
        constexpr int kHalfColumns = kHalf * kWarpSize * kColumns;
        const int half = p.merged / 2;
        const bool later = cluster_rank() >= half;
        const unsigned behind = own + (2 * kFours + (second ? kFours / 2 : 0)) * step;
        swap_halves(sums.dw, later, behind, remote_address(behind, cluster_rank() ^ half), step);
        cluster_arrive();
        store_sums<kHalf>(target + (later ? kHalfColumns : 0), sums.dw,
                          columns - (later ? kHalfColumns : 0));
        cluster_wait();  // neither block leaves while the other reads from it
        return true;
      }
    }
    if (merges) cluster_arrive();
  }
  store_sums<kChunks>(target, sums.dw, columns);
  if (sharing == 1) store_sums<kChunks>(p.db_partials + partial, sums.db, columns);
  if (merges) cluster_wait();
  return true;
}

// `staging`: the ring, which nobody needs any more.
template <class Kind>
__device__ __forceinline__ void leave_ring_sums(const typename Kind::Parameters& p,
                                                const RingPlace<Kind>& at, float* staging,
                                                RingSums<Kind>& sums) {
  constexpr int kChunks = Kind::kChunks, kColumns = Kind::kColumns;
  if constexpr (Kind::kShort) add_up_teams(p, at, sums);
  const SumsPlace<Kind> place(p, at);
  if constexpr (Kind::kVectorized && !Kind::kShort && !Kind::kWideDy) {
    if (leave_from_registers(p, at, place, staging, sums)) return;
  }

  // By way of shared memory. Where blocks are merged, each of a cluster adds up a part of what all
  // of them have.
  const auto stage = [&](const float (&values)[kChunks][kColumns], float behind, float* target) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
#pragma unroll
      for (int i = 0; i < kColumns; i += 4) {
        *reinterpret_cast<float4*>(target + place.warp_begin +
                                   (place.thread % kWarpSize + k * at.lanes) * kColumns + i) =
            four_of(values[k], i);
      }
    }
    if (Kind::kTail && place.thread % kWarpSize < place.run_columns - Kind::kWarpColumns) {
      target[place.warp_begin + Kind::kWarpColumns + place.thread % kWarpSize] = behind;
    }
  };
  __syncthreads();
  if (!Kind::kShort || place.thread % kWarpSize < at.lanes) {
    stage(sums.dw, sums.tail.dw, staging + place.group * place.width);
    stage(sums.db, sums.tail.db, staging + (p.groups + place.group) * place.width);
  }
  leave_partials<Kind::kVectorized>(p, staging, place.width, place.block_begin, p.merged,
                                    at.cluster_size);
}

}  // namespace fastnorm::cuda
