// How warps that hold a row together exchange its two sums, while other rows are worked on: within
// a block, a cluster, or a grid that runs as a whole.
#pragma once

#include "backward_parameters.cuh"
#include "grid_exchange.cuh"
#include "ring_stage.cuh"

namespace fastnorm::cuda {

constexpr int kExchanges = 4;  // rows whose sums may be on their way at once

// Between warps of a block, in up to kGroups groups that have a row each. kKeepsLane: the lane that
// is given stays in a register; else it is worked out from threadIdx.x whenever it is needed.
template <int kGroups, bool kKeepsLane>
class BlockExchange {
 public:
  struct Storage {
    alignas(16) float slots[kGroups][kExchanges][2 * kRingRowWarps];  // first, then second sums
    uint64_t barriers[kGroups][kExchanges];
  };

  // All threads of the block must come here, and then meet at a barrier (of the cluster).
  __device__ __forceinline__ BlockExchange(Storage& storage, int warps, int group, int warp,
                                           int lane)
      : slots_(address_of(&storage.slots[group])),
        barriers_(address_of(&storage.barriers[group])),
        warp_(warp),
        lane_(lane) {
    float* const all = &storage.slots[0][0][0];
    constexpr int kAll = kGroups * kExchanges * 2 * kRingRowWarps;
    for (int i = threadIdx.x; i < kAll; i += blockDim.x) all[i] = 0;
    if (warp == 0 && threadIdx.x % kWarpSize == 0) {
#pragma unroll 1
      for (int i = 0; i < kExchanges; ++i) {
        init_barrier(barriers_ + i * sizeof(uint64_t), kWarpSize * warps);
      }
      publish_barriers();
    }
  }

  // `mine`: from sum_halves. Every lane arrives, for each has read what others post anew behind
  // that barrier, and neither a shuffle nor, for racecheck, a __syncwarp orders one lane's read
  // before another's arrival. That costs nothing. (Read by eight lanes alone, which then arrived,
  // 131072 x 1023 bfloat16 took .905 of an elementwise sum on an H200 for .92, 4096 x 50257 .72 for
  // .735, 2048 x 100001 .625 for .66, float16 16384 x 6145 .77 for .81.)
  __device__ __forceinline__ void post(int row, float mine) const {
    const int lane = this->lane();
    if (lane % (kWarpSize / 2) == 0) {
      const unsigned slot = slots_of(row) + (lane / (kWarpSize / 2) * kRingRowWarps + warp_) *
                                                static_cast<unsigned>(sizeof(float));
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(slot), "f"(mine) : "memory");
    }
    arrive(barriers_ + row % kExchanges * sizeof(uint64_t));
  }

  // What this lane adds to the sums of a row that all warps have posted: for merge.
  __device__ __forceinline__ float fetch(int row) const {
    wait_for(row);
    float mine;  // slots of warps that do not exist are zero
    asm volatile("ld.shared.f32 %0, [%1];"
                 : "=f"(mine)
                 : "r"(slots_of(row) + lane() * static_cast<unsigned>(sizeof(float)))
                 : "memory");
    return mine;
  }

  // The sums of the row.
  static __device__ __forceinline__ Sums<float> merge(float fetched) {
    return sum_row_warps(fetched);
  }
  __device__ __forceinline__ Sums<float> fetch_sums(int row) const { return merge(fetch(row)); }

 protected:
  unsigned slots_, barriers_;
  int warp_, lane_;

  __device__ __forceinline__ int lane() const {
    return kKeepsLane ? lane_ : threadIdx.x % kWarpSize;
  }
  // Until all warps have posted a row.
  __device__ __forceinline__ void wait_for(int row) const {
    wait_barrier<false>(barriers_ + row % kExchanges * sizeof(uint64_t), row / kExchanges % 2);
  }

 private:
  // Of a single group it is a constant.
  static __device__ __forceinline__ unsigned address_of(const void* place) {
    return kGroups == 1 ? shared_address(place) : keep(shared_address(place));
  }
  __device__ __forceinline__ unsigned slots_of(int row) const {
    return slots_ + row % kExchanges * static_cast<unsigned>(2 * kRingRowWarps * sizeof(float));
  }
};

// The exchange of a row's sums between all warps that hold it.
template <RingSpan kSpan, bool kKeepsLane = false>
class RingExchange : public BlockExchange<kRingWarps, kKeepsLane> {
  using Base = BlockExchange<kRingWarps, kKeepsLane>;

 public:
  __device__ __forceinline__ RingExchange(typename Base::Storage& storage, int warps, int,
                                          int group, int warp, int lane = 0)
      : Base(storage, warps, group, warp, lane) {}
  __device__ __forceinline__ void relay(int) const {}
};

// Between blocks of a cluster: one warp of each adds up what all have posted and sends it to all
// blocks. It is one that does nothing else, which also adds up what blocks send, where there is
// room for it, or else each by turns. (Sent by every warp to all blocks and added up by every warp,
// 2048 x 65537 bfloat16 took 280 us on an H200, 257 us so, 10699 x 12544 208 us and 204 us.)
template <bool kKeepsLane>
class RingExchange<RingSpan::kCluster, kKeepsLane> : public BlockExchange<1, kKeepsLane> {
  using Base = BlockExchange<1, kKeepsLane>;

 public:
  struct Storage : Base::Storage {
    alignas(16) float blocks[kExchanges][2 * kLargeClusterSize];  // two sums of each
    uint64_t arrived[kExchanges];
    uint64_t collected[kExchanges];
    float2 rows[kExchanges];  // the sums that a warp of its own has collected
  };

  // `served`: by a warp of its own.
  __device__ __forceinline__ RingExchange(Storage& storage, const Turns& turns, int cluster_size,
                                          bool served, int warp, int lane = 0)
      : Base(storage, static_cast<int>(turns.takers), 0, warp, lane),
        storage_(storage),
        pairs_(shared_address(&storage.blocks)),
        turns_(turns),
        cluster_size_(cluster_size),
        served_(served) {
    float* const all = &storage.blocks[0][0];
    constexpr int kAll = kExchanges * 2 * kLargeClusterSize;
    for (int i = threadIdx.x; i < kAll; i += blockDim.x) all[i] = 0;
    // (By several threads, ptxas would do without a branch, and then racecheck takes all threads
    // for ones that write to the barriers.)
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int i = 0; i < kExchanges; ++i) {
        init_barrier(barrier(i), 1);  // one thread arrives, for the bytes
        init_barrier(collected(i), kWarpSize);
      }
      publish_barriers();
    }
  }

  // After post, at a warp's convenience.
  __device__ __forceinline__ void relay(int row) const {
    if (!served_ && turns_.taker(row) == this->warp_) send(row);
  }

  // The sums of a row that all blocks relay.
  __device__ __forceinline__ Sums<float> fetch_sums(int row) const {
    const int turn = row % kExchanges;
    if (!served_) return receive(row);
    wait_barrier<false>(collected(turn), row / kExchanges % 2);
    const volatile float2& sums = storage_.rows[turn];
    return {sums.x, sums.y};
  }

  // What a warp of its own does for `count` rows.
  __device__ __forceinline__ void serve(int count) const {
    send(0);
#pragma unroll 1
    for (int row = 0; row < count; ++row) {
      const Sums<float> sums = receive(row);
      if (this->lane() == 0) {
        storage_.rows[row % kExchanges] = make_float2(sums.xhat_wdy, sums.wdy);
      }
      __syncwarp();  // all lanes have read what the blocks had sent before one of them sends again
      // By every lane, for each has read what the block's warps had posted, which they post anew.
      arrive(collected(row % kExchanges));
      if (row + 1 < count) send(row + 1);
    }
  }

 private:
  static constexpr unsigned kTurnBytes = 2 * kLargeClusterSize * sizeof(float);
  Storage& storage_;
  unsigned pairs_;
  const Turns& turns_;  // of its warps
  int cluster_size_;
  bool served_;

  __device__ __forceinline__ void send(int row) const {
    const Sums<float> sums = this->merge(this->fetch(row));
    const int lane = this->lane();
    const int turn = row % kExchanges;
    const int rank = cluster_rank() % cluster_size_;
    if (lane == 0) {
      arrive_and_expect(barrier(turn), cluster_size_ * 2 * static_cast<int>(sizeof(float)));
    }
    if (lane < cluster_size_) {
      const int target = cluster_rank() - rank + lane;
      store_async(remote_address(pairs_of(turn) + rank * 2 * sizeof(float), target), sums.xhat_wdy,
                  sums.wdy, remote_address(barrier(turn), target));
    }
  }

  __device__ __forceinline__ Sums<float> receive(int row) const {
    const int turn = row % kExchanges;
    wait_barrier<true>(barrier(turn), row / kExchanges % 2);
    return sum_block_pairs(pairs_of(turn), cluster_size_);
  }
  __device__ __forceinline__ unsigned pairs_of(int turn) const {
    return pairs_ + turn * kTurnBytes;
  }
  __device__ __forceinline__ unsigned barrier(int turn) const {
    return pairs_ + kExchanges * kTurnBytes + turn * static_cast<unsigned>(sizeof(uint64_t));
  }
  __device__ __forceinline__ unsigned collected(int turn) const {
    return barrier(kExchanges + turn);
  }
};

// Between blocks of a grid that runs as a whole.
template <bool kKeepsLane>
class RingExchange<RingSpan::kGrid, kKeepsLane> : public GridExchange {
 public:
  __device__ __forceinline__ RingExchange(Storage& storage, const GridPlace& place, int warp,
                                          int warps, int lane)
      : GridExchange(storage, place, 2 * warps), warp_(warp), lane_(lane) {}

  // `mine`: from sum_halves.
  __device__ __forceinline__ void post(int row, float mine) const {
    const int lane = kKeepsLane ? lane_ : threadIdx.x % kWarpSize;
    if (lane % (kWarpSize / 2) == 0) {
      warps(row)[lane / (kWarpSize / 2) * kGridWarps + warp_] = mine;
      arrive_at(row);
    }
  }

  __device__ __forceinline__ Sums<float> fetch_sums(int row) const {
    const float2 sums = wait_for(row);
    return {sums.x, sums.y};
  }

  __device__ __forceinline__ void serve(const GridPlace& place, int ahead, int count) const {
    GridExchange::serve(place, ahead, count, of_warps, of_blocks);
  }
  __device__ __forceinline__ void serve_turn(const GridPlace& place, int told, int row,
                                             int count) const {
    GridExchange::serve_turn(place, told, row, count, of_warps, of_blocks);
  }

 private:
  const int warp_, lane_;

  static __device__ __forceinline__ float2 of_warps(const float* numbers) {
    const Sums<float> sums = sum_row_warps(numbers[threadIdx.x % kWarpSize]);
    return make_float2(sums.xhat_wdy, sums.wdy);
  }
  static __device__ __forceinline__ float2 of_blocks(const GridWord (&words)[kWordsOfLane]) {
    float first = 0, second = 0;
#pragma unroll
    for (const GridWord& word : words) {
      first += word.first;
      second += word.second;
    }
    const Sums<float> sums = both_halves(sum_halves(first, second));
    return make_float2(sums.xhat_wdy, sums.wdy);
  }
};

// Within a warp there is nothing to exchange.
template <bool kKeepsLane>
class RingExchange<RingSpan::kWarp, kKeepsLane> {
 public:
  struct Storage {};
  __device__ __forceinline__ RingExchange(Storage&, int, int, int, int, int = 0) {}
};

}  // namespace fastnorm::cuda
