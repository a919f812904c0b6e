// Wide rows that end within a chunk, wherever they begin, as blocks that stay have them one
// by one, or clusters of blocks: what forward and backward share.
#pragma once

#include "bulk_ring.cuh"
#include "pace.cuh"
#include "reduce.cuh"
#include "warp_runs.cuh"
#include "wide_row.cuh"

namespace fastnorm::cuda {

// Cycles that a block pauses for each row that it is ahead (see Pace): twice as long as memory
// takes for what the block reads and writes of a row, in kTensors, if it delivers a granule per
// cycle and multiprocessor.
template <class X, int kTensors, class Parameters>
__device__ __forceinline__ int pause_of_wide_rows(const Parameters& p) {
  constexpr int kGranule = kChunkBytes / static_cast<int>(sizeof(X));
  return 2 * kTensors * static_cast<int>(p.cols) / kGranule / p.cluster_size;
}

// What a block has of its rows: columns `from` to `to`, of each of `count` rows from `first` on,
// `step` rows apart.
struct WideShare {
  int64_t first, step;
  int count, from, to;

  template <class Parameters>
  __device__ __forceinline__ WideShare(const Parameters& p, int rank, int warps)
      : first(blockIdx.x / p.cluster_size),
        step(gridDim.x / p.cluster_size),
        count(static_cast<int>((p.rows - 1 - first + step) / step)),
        from(begin_of_warp_run(p, rank * warps)),
        to(begin_of_warp_run(p, (rank + 1) * warps)) {}
  __device__ __forceinline__ int64_t row(int i) const { return first + i * step; }
};

// What the warp that copies does for a block's rows. fetch(i, stage) asks for row i, of a tensor or
// of two; send(i, stage) writes what the others have made of it, with its ends read; left(i) says
// that this has been read.
template <class Parameters, class Fetch, class Send, class Left>
__device__ __forceinline__ void copy_in_turns(const Parameters& p, const WideShare& share,
                                              const BulkBarriers& barriers, int stages, int pause,
                                              const Fetch& fetch, const Send& send,
                                              const Left& left) {
  const int lane = threadIdx.x % kWarpSize;
  __shared__ unsigned pace_start;
  const bool keeps = p.most_ahead > 0 && lane == 0 && cluster_rank() % p.cluster_size == 0;
  Pace<1> pace(pace_start, keeps, static_cast<int>(share.step), p.most_ahead, pause);
  for (int s = 0; s < min(stages, share.count); ++s) fetch(s, s);
  BulkTurn turn;
  for (int i = 0; i < share.count; ++i) {
    wait_barrier<false>(barriers.written_of(turn.stage), turn.parity);
    send(i, turn.stage);
    pace.keep(i + 1);
    if (lane == 0) wait_bulk_reads();
    __syncwarp();
    left(i);
    if (i + stages < share.count) fetch(i + stages, turn.stage);
    turn.advance(stages);
  }
}

// The sums of rows over the warps of a block, or of the blocks of a cluster, whose warps tell all
// of them their own by a pair of numbers. kAlone: there is one block, whose warps meet in each
// turn; else they wait for each other's numbers alone, in one block, too.
//
// A warp that tells those of row i has read those of row i - 2 at the least, so that each warp has
// told these, and read those of row i - 4: of four places for a row the one is free.
template <bool kAlone, int kRows = 4>
struct WideExchange {
  static constexpr int kMostWarps = (kAlone ? 1 : kMaxClusterSize) * kWideRowWarps;
  struct Storage {
    alignas(8) float2 slots[kRows][kMostWarps];
    uint64_t barriers[kRows];
  };
  static constexpr int kHalf = kWarpSize / 2;

  unsigned slots, barriers;  // of this block
  // Those of the block that this lane tells, if it tells one; the place is its warp's.
  unsigned told_slot, told_barrier;
  int warps;                 // of all blocks
  bool one, tells, expects;  // one: block, to which `st.async` does not lead

  __device__ __forceinline__ WideExchange(Storage& storage, int size, int rank, int block_warps,
                                          int warp)
      : slots(shared_address(&storage.slots[0][0])),
        barriers(shared_address(&storage.barriers[0])),
        warps(size * block_warps),
        one(kAlone || size == 1),
        tells(static_cast<int>(threadIdx.x) % kWarpSize < size),
        expects(threadIdx.x == 0) {
    const int lane = threadIdx.x % kWarpSize;
    const int block = cluster_rank() - rank + (tells ? lane : 0);
    const int of_row = rank * block_warps + warp;
    told_slot = slots + of_row * static_cast<unsigned>(sizeof(float2));
    if (!one) {
      told_slot = remote_address(told_slot, block);
      told_barrier = remote_address(barriers, block);
    }
  }

  __device__ __forceinline__ void init() const {
    for (int n = 0; n < kRows; ++n) init_barrier(barrier_of(n), one ? kWarpSize * warps : 1);
  }

  // The sums of this warp's lanes' numbers.
  __device__ __forceinline__ void tell(int i, float first, float second) const {
    const float mine = sum_halves(first, second);
    if (one) {
      put(i, mine);
    } else {
      send(i, __shfl_sync(kAllLanes, mine, 0), __shfl_sync(kAllLanes, mine, kHalf));
    }
  }

  // This warp's numbers, which all lanes have.
  __device__ __forceinline__ void tell_known(int i, float first, float second) const {
    if (one) {
      put(i, threadIdx.x & kHalf ? second : first);
    } else {
      send(i, first, second);
    }
  }

  // Where all warps have told theirs, one behind the other.
  __device__ __forceinline__ unsigned await(int i) const {
    const unsigned turn = i % kRows;
    if constexpr (!kAlone) wait_barrier<true>(barrier_of(turn), i / kRows % 2);
    return slots + turn * kTurnBytes;
  }

  // The sums of what all warps have told.
  __device__ __forceinline__ float2 read(int i) const {
    const int lane = threadIdx.x % kWarpSize;
    const unsigned slot = await(i) + lane * static_cast<unsigned>(sizeof(float2));
    float2 sum = make_float2(0, 0);
    if (lane < warps) sum = load_float2(slot);
    if constexpr (!kAlone) {
#pragma unroll 1
      for (int n = kWarpSize; n < warps; n += kWarpSize) {
        if (lane + n >= warps) continue;
        const float2 other = load_float2(slot + n * static_cast<unsigned>(sizeof(float2)));
        sum.x += other.x;
        sum.y += other.y;
      }
    }
    const float mine = sum_halves(sum.x, sum.y);
    return make_float2(__shfl_sync(kAllLanes, mine, 0), __shfl_sync(kAllLanes, mine, kHalf));
  }

 private:
  static constexpr unsigned kTurnBytes = kMostWarps * sizeof(float2);
  __device__ __forceinline__ unsigned barrier_of(unsigned turn) const {
    return barriers + turn * static_cast<unsigned>(sizeof(uint64_t));
  }
  // In one block: the first number, by the first half of the lanes, and the second, by the other.
  __device__ __forceinline__ void put(int i, float mine) const {
    const unsigned turn = i % kRows;
    const int lane = threadIdx.x % kWarpSize;
    constexpr auto kFloat = static_cast<unsigned>(sizeof(float));
    const unsigned slot = told_slot + turn * kTurnBytes;
    if (lane % kHalf == 0) put_element(slot + lane / kHalf * kFloat, mine);
    if constexpr (kAlone) {
      meet_group(0, warps);
    } else {
      arrive(barrier_of(turn));
    }
  }
  // In a cluster.
  __device__ __forceinline__ void send(int i, float first, float second) const {
    const unsigned turn = i % kRows;
    if (expects) arrive_and_expect(barrier_of(turn), warps * static_cast<int>(sizeof(float2)));
    if (tells) {
      store_async(told_slot + turn * kTurnBytes, first, second,
                  told_barrier + turn * static_cast<unsigned>(sizeof(uint64_t)));
    }
  }
};

// What a lane has of a row: kPairs pairs of columns, a warp's width apart, of which all but the
// last certainly exist.
template <class X, int kPairs>
struct WideColumns {
  static constexpr int kStep = kPairStep, kGap = kPairGap<X>;
  static constexpr auto kSize = static_cast<unsigned>(sizeof(X));
  using Values = float[kPairs][2];

  int left;  // columns from this lane's first one on

  __device__ __forceinline__ bool has(int s, int i) const {
    return s < kPairs - 1 || s * kStep + i * kGap < left;
  }

  // From shared memory, where the first is at `place`; zero where there is none. kPaired: they lie
  // in a word.
  template <bool kPaired>
  __device__ __forceinline__ Pack<X, 2> load(unsigned place, int s) const {
    const unsigned from = place + s * kStep * kSize;
    if constexpr (kPaired) {
      Pack<X, 2> pair = {};
      if (has(s, 0)) pair = load_pair<X>(from);
      if (!has(s, 1)) pair.set_bits32(0, pair.bits32(0) & 0xffff);
      return pair;
    } else {
      return load_pair<X>(from, has(s, 0), has(s, 1));
    }
  }

  // The same of a pair that exists.
  template <bool kPaired>
  static __device__ __forceinline__ Pack<X, 2> load_whole(unsigned from) {
    if constexpr (kPaired) {
      return load_pair<X>(from);
    } else {
      return load_pair<X>(from, true, true);
    }
  }

  template <bool kPaired>
  __device__ __forceinline__ void store(unsigned place, int s, const Pack<X, 2>& pair) const {
    const unsigned to = place + s * kStep * kSize;
    if (kPaired && has(s, 1)) {
      put_pair(to, pair);
    } else {
      put_pair(to, pair, has(s, 0), has(s, 1));
    }
  }

  __device__ __forceinline__ void store_global(X* first, int s, const Pack<X, 2>& pair) const {
    if (has(s, 0)) first[s * kStep] = pair.element(0);
    if (has(s, 1)) first[s * kStep + kGap] = pair.element(1);
  }

  // Weight or bias from column `first` on, by pairs where these lie so; `absent` where there is
  // none.
  __device__ __forceinline__ void load_parameters(Values& values, const void* parameters,
                                                  DType dtype, int first, float absent) const {
#pragma unroll
    for (int s = 0; s < kPairs; ++s) values[s][0] = values[s][1] = absent;
    if (parameters == nullptr) return;
    if (dtype == DType::kFloat32) {
      load_parameters_of(values, static_cast<const float*>(parameters) + first);
    } else {
      load_parameters_of(values, static_cast<const X*>(parameters) + first);
    }
  }

  __device__ __forceinline__ void put_sums(const Values& sums, float* first) const {
#pragma unroll
    for (int s = 0; s < kPairs; ++s) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (has(s, j)) first[s * kStep + j * kGap] = sums[s][j];
      }
    }
  }

 private:
  template <class W>
  __device__ __forceinline__ void load_parameters_of(Values& values, const W* mine) const {
    const bool paired = kGap == 1 && reinterpret_cast<uintptr_t>(mine) % (2 * sizeof(W)) == 0;
#pragma unroll
    for (int s = 0; s < kPairs; ++s) {
      if (paired && has(s, 1)) {
        const auto pair = *reinterpret_cast<const Pack<W, 2>*>(mine + s * kStep);
        values[s][0] = pair.template get<float>(0);
        values[s][1] = pair.template get<float>(1);
      } else {
        if (has(s, 0)) values[s][0] = widen(mine[s * kStep]);
        if (has(s, 1)) values[s][1] = widen(mine[s * kStep + kGap]);
      }
    }
  }
};

}  // namespace fastnorm::cuda
