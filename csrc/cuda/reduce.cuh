// Reductions over the threads that hold a row: lanes of a warp, warps of a block, blocks of a
// cluster. Always in the same order, so that results repeat bit for bit.
#pragma once

#include "numeric.cuh"

namespace fastnorm::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// A share of a whole. Two units in the last place off at the most, and always the same; IEEE
// division of float takes a subroutine of its own.
__device__ __forceinline__ float quotient(float part, float whole) {
  return __fdividef(part, whole);
}

__device__ __forceinline__ double quotient(double part, double whole) { return part / whole; }

// Count, mean and sum of squared differences from the mean of a set of numbers.
template <class A>
struct Moments {
  A mean = 0;
  A m2 = 0;
  A count = 0;

  // Chan, Golub and LeVeque's rule for the union of two disjoint sets. Written so that large
  // differences do not become NaN against an empty set.
  __device__ __forceinline__ void merge(const Moments& other) {
    const A total = count + other.count;
    const A share = total > 0 ? quotient(other.count, total) : A(0);
    const A delta = other.mean - mean;
    mean = fma(delta, share, mean);
    m2 = m2 + fma(delta * count, delta * share, other.m2);
    count = total;
  }

  __device__ __forceinline__ Moments shuffle_down(int offset, int width) const {
    return {__shfl_down_sync(kAllLanes, mean, offset, width),
            __shfl_down_sync(kAllLanes, m2, offset, width),
            __shfl_down_sync(kAllLanes, count, offset, width)};
  }

  __device__ __forceinline__ Moments broadcast(int width) const {
    return {__shfl_sync(kAllLanes, mean, 0, width), __shfl_sync(kAllLanes, m2, 0, width),
            __shfl_sync(kAllLanes, count, 0, width)};
  }
};

// The two row sums of the backward: of xhat * wdy and of wdy.
template <class A>
struct Sums {
  A xhat_wdy = 0;
  A wdy = 0;

  __device__ __forceinline__ void merge(const Sums& other) {
    xhat_wdy += other.xhat_wdy;
    wdy += other.wdy;
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

// The merge of `count` values in memory, in every lane of the calling warp.
template <class Value>
__device__ __forceinline__ Value reduce_array(const Value* values, int count) {
  const int lane = threadIdx.x % kWarpSize;
  Value value;
  for (int i = lane; i < count; i += kWarpSize) value.merge(values[i]);
  reduce_lanes(value, kWarpSize);
  return value.broadcast(kWarpSize);
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

// Writes to the shared memory of the block of rank `rank`, at the address that `target` has here.
__device__ __forceinline__ void store_remote(float* target, float value, int rank) {
#if __CUDA_ARCH__ >= 900
  const unsigned local = static_cast<unsigned>(__cvta_generic_to_shared(target));
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
#endif
}

__device__ __forceinline__ void store_remote(double* target, double value, int rank) {
#if __CUDA_ARCH__ >= 900
  const unsigned local = static_cast<unsigned>(__cvta_generic_to_shared(target));
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(remote), "d"(value) : "memory");
#endif
}

template <class A>
__device__ __forceinline__ void store_remote(Moments<A>* target, const Moments<A>& value,
                                             int rank) {
  store_remote(&target->mean, value.mean, rank);
  store_remote(&target->m2, value.m2, rank);
  store_remote(&target->count, value.count, rank);
}

template <class A>
__device__ __forceinline__ void store_remote(Sums<A>* target, const Sums<A>& value, int rank) {
  store_remote(&target->xhat_wdy, value.xhat_wdy, rank);
  store_remote(&target->wdy, value.wdy, rank);
}

// ---- rows
// ----------------------------------------------------------------------------------------

// Reduces one Value per thread over the threads of a row, row after row, behind one barrier each.
// The block is threads_per_row x rows_per_block; with kCluster all blocks of the cluster share the
// row. Two sets of slots take turns: a thread that writes a set has passed the barrier of the row
// before, and so has every reader of that set.
template <class Value, bool kCluster>
class RowReducer {
 public:
  // One slot for each warp of a row, of the whole cluster.
  static constexpr int kMaxWarps = kMaxThreadsPerRow / kWarpSize * (kCluster ? kMaxClusterSize : 1);

  struct Storage {
    Value slots[2][kMaxWarps];
  };

  // Every thread of the block (with kCluster: of the cluster) must come here.
  __device__ __forceinline__ RowReducer(Storage& storage, int cluster_size)
      : storage_(storage),
        threads_(blockDim.x),
        warps_((blockDim.x + kWarpSize - 1) / kWarpSize),
        cluster_size_(cluster_size),
        rank_(kCluster ? cluster_rank() : 0) {
    if constexpr (kCluster) {
      // No block may write into one that has not started.
      cluster_arrive();
      cluster_wait();
    }
  }

  // The merge over the row, in all its threads. Every thread of the block must come here.
  __device__ __forceinline__ Value reduce(Value value) {
    if (!kCluster && threads_ <= kWarpSize) {
      reduce_lanes(value, threads_);
      return value.broadcast(threads_);
    }
    reduce_lanes(value, kWarpSize);
    const int warp = threadIdx.x / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    const int row = threadIdx.y;
    Value* const slots = storage_.slots[turn_];
    turn_ ^= 1;
    if constexpr (kCluster) {
      value = value.broadcast(kWarpSize);
      if (lane < cluster_size_) store_remote(&slots[rank_ * warps_ + warp], value, lane);
      cluster_arrive();
      cluster_wait();
      return reduce_array(slots, cluster_size_ * warps_);
    } else {
      if (lane == 0) slots[row * warps_ + warp] = value;
      __syncthreads();
      return reduce_array(slots + row * warps_, warps_);
    }
  }

 private:
  Storage& storage_;
  const int threads_;
  const int warps_;
  const int cluster_size_;
  const int rank_;
  int turn_ = 0;
};

}  // namespace fastnorm::cuda
