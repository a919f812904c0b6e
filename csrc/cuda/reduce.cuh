// Reductions over the threads that hold a row: lanes of a warp, warps of a block, blocks of a
// cluster. Always in the same order, so that results repeat bit for bit.
#pragma once

#include "async.cuh"
#include "numeric.cuh"
#include "shift.cuh"

namespace fastnorm::cuda {

// A share of a whole. Two units in the last place off at the most, and always the same; IEEE
// division of float takes a subroutine of its own.
__device__ __forceinline__ float quotient(float part, float whole) {
  return __fdividef(part, whole);
}

__device__ __forceinline__ double quotient(double part, double whole) { return part / whole; }

// The two row sums of the backward: of xhat * wdy and of wdy.
template <class A>
struct Sums {
  A xhat_wdy = 0;
  A wdy = 0;

  __device__ __forceinline__ void merge(const Sums& other) {
    xhat_wdy += other.xhat_wdy;
    wdy += other.wdy;
  }

  __device__ __forceinline__ Sums scaled(A factor) const {
    return {xhat_wdy * factor, wdy * factor};
  }

  __device__ __forceinline__ Sums shuffle_down(int offset, int width) const {
    return {__shfl_down_sync(kAllLanes, xhat_wdy, offset, width),
            __shfl_down_sync(kAllLanes, wdy, offset, width)};
  }

  __device__ __forceinline__ Sums broadcast(int width) const {
    return {__shfl_sync(kAllLanes, xhat_wdy, 0, width), __shfl_sync(kAllLanes, wdy, 0, width)};
  }
};

// The merge of the values of `width` neighbouring lanes (a power of two), in the first of them.
template <class Value>
__device__ __forceinline__ void reduce_lanes(Value& value, int width) {
  for (int offset = width / 2; offset > 0; offset /= 2) {
    value.merge(value.shuffle_down(offset, width));
  }
}

// The merge over a whole warp, in every lane.
template <class Value>
__device__ __forceinline__ Value reduce_warp(Value value) {
  reduce_lanes(value, kWarpSize);
  return value.broadcast(kWarpSize);
}

template <int kNumber>
constexpr bool kIsPowerOfTwo = (kNumber & (kNumber - 1)) == 0;

// The value of the first of each kWidth neighbouring lanes of a warp.
template <int kWidth, class A>
__device__ __forceinline__ A of_first_lane(A value) {
  if constexpr (kIsPowerOfTwo<kWidth>) return __shfl_sync(kAllLanes, value, 0, kWidth);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  return __shfl_sync(kAllLanes, value, lane - lane % kWidth);
}

// The sums over kWidth neighbouring lanes of a warp, the same in all of them; several at a time, so
// that their shuffles overlap.
template <int kWidth, class A, int kCount>
__device__ __forceinline__ void sum_lanes(A (&values)[kCount]) {
  if constexpr (kIsPowerOfTwo<kWidth>) {
#pragma unroll
    for (int offset = 1; offset < kWidth; offset *= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] += __shfl_xor_sync(kAllLanes, values[i], offset);
    }
  } else {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize % kWidth;
#pragma unroll
    for (int left = kWidth; left > 1; left = (left + 1) / 2) {
      const int half = (left + 1) / 2;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const A other = __shfl_down_sync(kAllLanes, values[i], half);
        if (lane + half < left) values[i] += other;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = of_first_lane<kWidth>(values[i]);
  }
}

template <class A>
__device__ __forceinline__ Sums<A> sum_lanes(const Sums<A>& sums, int width) {
  A values[] = {sums.xhat_wdy, sums.wdy};
  if (width == kWarpSize) {
    sum_lanes<kWarpSize>(values);
  } else {
    for (int offset = 1; offset < width; offset *= 2) {
#pragma unroll
      for (A& value : values) value += __shfl_xor_sync(kAllLanes, value, offset);
    }
  }
  return {values[0], values[1]};
}

// The sums over the lower half of a warp's lanes and over the upper half, each in its own lanes.
__device__ __forceinline__ float sum_within_halves(float mine) {
#pragma unroll
  for (int offset = kWarpSize / 4; offset > 0; offset /= 2) {
    mine += __shfl_xor_sync(kAllLanes, mine, offset);
  }
  return mine;
}

// The sum of `first` and that of `second` over a warp's lanes: in the lower half of the lanes the
// one, in the upper half the other. Half the shuffles of two separate sums.
__device__ __forceinline__ float sum_halves(float first, float second, int lane) {
  const bool upper = lane >= kWarpSize / 2;
  float mine = upper ? second : first;
  mine += __shfl_xor_sync(kAllLanes, upper ? first : second, kWarpSize / 2);
  return sum_within_halves(mine);
}

__device__ __forceinline__ float sum_halves(float first, float second) {
  return sum_halves(first, second, threadIdx.x % kWarpSize);
}

__device__ __forceinline__ Sums<float> both_halves(float mine) {
  return {__shfl_sync(kAllLanes, mine, 0), __shfl_sync(kAllLanes, mine, kWarpSize / 2)};
}

// The merge of `count` values in memory, in every lane of the calling warp.
template <class Value>
__device__ __forceinline__ Value reduce_array(const Value* values, int count) {
  constexpr int kFew = 4;  // shorter one after the other than by way of shuffles
  if (count <= kFew) {
    Value value = values[0];
    for (int i = 1; i < count; ++i) value.merge(values[i]);
    return value;
  }
  const int lane = threadIdx.x % kWarpSize;
  Value value;
  for (int i = lane; i < count; i += kWarpSize) value.merge(values[i]);
  return reduce_warp(value);
}

// ---- clusters
// ------------------------------------------------------------------------------------

__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ int cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}

// Which cluster of the grid; of a grid without clusters, which block.
__device__ __forceinline__ int cluster_index() {
  unsigned index = blockIdx.x;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
#endif
  return static_cast<int>(index);
}

// Writes to the shared memory of the block of rank `rank`, at the address that `target` has here.
__device__ __forceinline__ void store_remote(float* target, float value, int rank) {
#if __CUDA_ARCH__ >= 900
  const unsigned remote = remote_address(shared_address(target), rank);
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
#endif
}

__device__ __forceinline__ void store_remote(double* target, double value, int rank) {
#if __CUDA_ARCH__ >= 900
  const unsigned remote = remote_address(shared_address(target), rank);
  asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(remote), "d"(value) : "memory");
#endif
}

template <class A>
__device__ __forceinline__ void store_remote(Sums<A>* target, const Sums<A>& value, int rank) {
  store_remote(&target->xhat_wdy, value.xhat_wdy, rank);
  store_remote(&target->wdy, value.wdy, rank);
}

// ---- rows
// ----------------------------------------------------------------------------------------

// Reduces one Value per warp over the warps of a row, row after row, behind one barrier each. The
// block is threads_per_row (whole warps) x rows_per_block; with kCluster all blocks of the cluster
// share the row. Two sets of slots, or more, take turns: a thread that writes a set has passed the
// barrier of the row before, and so has every reader of that set.
template <class Value, bool kCluster, int kSets = 2>
class RowReducer {
 public:
  static constexpr int kMaxWarps = kMaxThreadsPerRow / kWarpSize;
  static constexpr int kSlots = kCluster ? kMaxWarps * kMaxClusterSize : kMaxWarps;

  struct Storage {
    Value slots[kSets][kSlots];
  };

  // Every thread of the block (with kCluster: of the cluster) must come here.
  __device__ __forceinline__ RowReducer(Storage& storage, int threads, int cluster_size)
      : storage_(storage),
        warps_((threads + kWarpSize - 1) / kWarpSize),
        cluster_size_(cluster_size),
        rank_(kCluster ? cluster_rank() : 0) {
    // No block may write into one that has not started; the wait comes before the first write.
    if constexpr (kCluster) cluster_arrive();
  }

  // The merge over the row, in all its threads, of `value`, which is the same in all lanes of a
  // warp. Every thread of the block must come here.
  __device__ __forceinline__ Value reduce(const Value& value) {
    const int set = turn_;
    turn_ ^= 1;
    post(value, set);
    return collect(set);
  }

  // The same in two steps, between which others may get ready, by a set other than the last row's.
  __device__ __forceinline__ void post(const Value& value, int set) {
    const int warp = threadIdx.x / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    Value* const slots = storage_.slots[set];
    if constexpr (kCluster) {
      if (!started_) cluster_wait();
      started_ = true;
      if (lane < cluster_size_) store_remote(&slots[rank_ * warps_ + warp], value, lane);
      cluster_arrive();
    } else {
      if (lane == 0) slots[threadIdx.y * warps_ + warp] = value;
    }
  }

  __device__ __forceinline__ Value collect(int set) {
    const Value* const slots = storage_.slots[set];
    if constexpr (kCluster) {
      cluster_wait();
      return reduce_array(slots, cluster_size_ * warps_);
    } else {
      __syncthreads();
      return reduce_array(slots + threadIdx.y * warps_, warps_);
    }
  }

 private:
  Storage& storage_;
  const int warps_;
  const int cluster_size_;
  const int rank_;
  int turn_ = 0;
  bool started_ = false;
};

}  // namespace fastnorm::cuda
