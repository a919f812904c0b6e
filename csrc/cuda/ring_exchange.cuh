// How warps that hold a row together exchange its two sums, while other rows are worked on: within
// a block, a cluster, or a grid that runs as a whole.
#pragma once

#include "ring_stage.cuh"
#include "tagged.cuh"

namespace fastnorm::cuda {

constexpr int kExchanges = 4;  // rows whose sums may be on their way at once

// The exchange of a row's sums between the warps that hold it. kKeepsLane: the lane that is given
// stays in a register; else it is worked out from threadIdx.x whenever it is needed.
template <RingSpan kSpan, bool kKeepsLane = false>
class RingExchange {
 public:
  static constexpr bool kCluster = kSpan == RingSpan::kCluster;
  static constexpr int kGroups = kCluster ? 1 : kRingWarps;
  static constexpr int kSlots = kCluster ? kRingRowWarps * kLargeClusterSize : kRingRowWarps;

  struct Storage {
    // kBlock: [group][exchange][first or second sum][warp]; kCluster: [exchange][warp] pairs
    alignas(16) float slots[kGroups][kExchanges][2 * kSlots];
    uint64_t barriers[kGroups][kExchanges];
  };

  // All threads of the block must come here, and then meet at a barrier (of the cluster).
  __device__ __forceinline__ RingExchange(Storage& storage, int warps, int cluster_size, int group,
                                          int warp, int lane = 0)
      : slots_(keep(shared_address(&storage.slots[kCluster ? 0 : group]))),
        barriers_(keep(shared_address(&storage.barriers[kCluster ? 0 : group]))),
        warps_(warps),
        cluster_size_(cluster_size),
        warp_(warp),
        lane_(lane) {
    float* const all = &storage.slots[0][0][0];
    constexpr int kAll = kGroups * kExchanges * 2 * kSlots;
    for (int i = threadIdx.x; i < kAll; i += blockDim.x) all[i] = 0;
    if (warp == 0 && threadIdx.x % kWarpSize == 0) {
      // Both halves of a warp arrive by themselves; in a cluster one thread does, for the bytes.
#pragma unroll 1
      for (int i = 0; i < kExchanges; ++i) {
        init_barrier(barriers_ + i * sizeof(uint64_t), kCluster ? 1 : 2 * warps);
      }
      publish_barriers();
    }
    if constexpr (kCluster) {
      const int own = threadIdx.x % kWarpSize;
      const int rank = cluster_rank() % cluster_size;
      const int target = cluster_rank() - rank + (own < cluster_size ? own : 0);
      remote_slot_ = remote_address(slots_ + (rank * warps + warp) * 2 * sizeof(float), target);
      remote_barrier_ = remote_address(barriers_, target);
    }
  }

  // `mine`: from sum_halves.
  __device__ __forceinline__ void post(int row, float mine) {
    const int lane = this->lane();
    const int turn = row % kExchanges;
    if constexpr (kCluster) {
      if (kKeepsLane ? warp_ == 0 && lane == 0 : threadIdx.x == 0) {
        arrive_and_expect(barriers_ + turn * sizeof(uint64_t),
                          warps_ * cluster_size_ * 2 * static_cast<int>(sizeof(float)));
      }
      const Sums<float> both = both_halves(mine);
      if (lane < cluster_size_) {
        store_async(remote_slot_ + turn * kTurnBytes, both.xhat_wdy, both.wdy,
                    remote_barrier_ + turn * sizeof(uint64_t));
      }
    } else if (lane % (kWarpSize / 2) == 0) {
      const unsigned slot =
          slots_ + turn * kTurnBytes + (lane / (kWarpSize / 2) * kSlots + warp_) * sizeof(float);
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(slot), "f"(mine) : "memory");
      arrive(barriers_ + turn * sizeof(uint64_t));
    }
  }

  // What this lane adds to the sums of a row that all its warps have posted: for merge.
  __device__ __forceinline__ auto fetch(int row) const {
    const int lane = this->lane();
    const int turn = row % kExchanges;
    wait_barrier<kCluster>(barriers_ + turn * sizeof(uint64_t), row / kExchanges % 2);
    const unsigned slots = slots_ + turn * kTurnBytes;
    if constexpr (kCluster) {
      return sum_cluster_pairs(slots, warps_ * cluster_size_, lane);
    } else {
      float mine;  // slots of warps that do not exist are zero
      asm volatile("ld.shared.f32 %0, [%1];"
                   : "=f"(mine)
                   : "r"(slots + lane * static_cast<unsigned>(sizeof(float)))
                   : "memory");
      return mine;
    }
  }

  // The sums of the row.
  static __device__ __forceinline__ Sums<float> merge(float fetched) {
    return sum_row_warps(fetched);
  }
  __device__ __forceinline__ Sums<float> merge(const Sums<float>& fetched) const {
    if constexpr (kKeepsLane) return both_halves(sum_halves(fetched.xhat_wdy, fetched.wdy, lane_));
    return sum_row_lanes(fetched, kWarpSize);
  }

 private:
  __device__ __forceinline__ int lane() const {
    return kKeepsLane ? lane_ : threadIdx.x % kWarpSize;
  }

  static constexpr unsigned kTurnBytes = 2 * kSlots * sizeof(float);
  unsigned slots_, barriers_;
  int warps_, cluster_size_, warp_, lane_;
  unsigned remote_slot_ = 0, remote_barrier_ = 0;
};

// Between blocks of a grid that runs as a whole, by way of device memory (see tagged.cuh). All
// warps add in the same order.
template <bool kKeepsLane>
class RingExchange<RingSpan::kGrid, kKeepsLane> {
 public:
  struct Storage {
    float warps[2][2 * kRingRowWarps];    // of two rows: first sums of each warp, then second
    float blocks[2][2 * kMaxGridBlocks];  // of two rows: first and second sum of each block
    // Here and not in registers, of which there are none left.
    uint64_t* words;  // [kGridExchanges][blocks][2]
    int rank;
  };

  // All threads of the block must come here, and then meet those of the whole grid.
  __device__ __forceinline__ RingExchange(Storage& storage, uint64_t* words, int blocks, int rank,
                                          int warp)
      : storage_(storage), sums_(2 * blocks), warp_(warp) {
    float* const all = &storage.warps[0][0];
    for (int i = threadIdx.x; i < 4 * kRingRowWarps; i += blockDim.x) all[i] = 0;
    if (threadIdx.x < 2 * kGridExchanges) {  // no tag of an earlier launch must be there
      store_tagged(words + threadIdx.x / 2 * sums_ + 2 * rank + threadIdx.x % 2, 0, 0);
    }
    if (threadIdx.x == 0) {
      storage.words = words;
      storage.rank = rank;
    }
  }

  // What this warp has of a row; `mine`: from sum_halves.
  __device__ __forceinline__ void post(int row, float mine) const {
    const int lane = threadIdx.x % kWarpSize;
    if (lane % (kWarpSize / 2) == 0) {
      storage_.warps[row % 2][lane / (kWarpSize / 2) * kRingRowWarps + warp_] = mine;
    }
  }

  // After a barrier of the block: what all warps have posted of a row, to the other blocks.
  __device__ __forceinline__ void relay(int row) const {
    if (warp_ > 0) return;
    const int lane = threadIdx.x % kWarpSize;
    const float block = sum_row_warp_halves(storage_.warps[row % 2][lane]);
    if (lane % (kWarpSize / 2) == 0) {
      store_tagged(words_of(row) + 2 * storage_.rank + lane / (kWarpSize / 2), block, row + 1);
    }
  }

  // The first word that this thread waits for in collect, as it is now.
  __device__ __forceinline__ uint64_t look(int row) const {
    return waiter() < sums_ ? load_tagged(words_of(row) + waiter()) : 0;
  }

  // The sums of a row that all its blocks relay; also a barrier of the block. `word`: from look.
  __device__ __forceinline__ Sums<float> collect(int row, uint64_t word) const {
    float* const sums = storage_.blocks[row % 2];
#pragma unroll 1
    for (int i = waiter(); i < sums_; i += blockDim.x) {
      sums[i] = wait_tagged(words_of(row) + i, word, row + 1);
      word = 0;
    }
    __syncthreads();
    const int lane = threadIdx.x % kWarpSize;
    float sum = 0;  // of the first sums in even lanes, of the second in odd ones
#pragma unroll 1
    for (int i = lane; i < sums_; i += kWarpSize) sum += sums[i];
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 1; offset /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, offset);
    }
    const float other = __shfl_xor_sync(kAllLanes, sum, 1);
    return lane % 2 == 0 ? Sums<float>{sum, other} : Sums<float>{other, sum};
  }

 private:
  Storage& storage_;
  const int sums_, warp_;

  // The last warps wait, for the first one relays meanwhile.
  static __device__ __forceinline__ int waiter() {
    return static_cast<int>(blockDim.x - 1 - threadIdx.x);
  }

  __device__ __forceinline__ uint64_t* words_of(int row) const {
    return storage_.words + row % kGridExchanges * sums_;
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
