// How blocks of the backward that stay leave their sums of dw and db: a row of partial sums each,
// or one for all groups of a block or blocks of a cluster.
#pragma once

#include "async.cuh"
#include "numeric.cuh"
#include "reduce.cuh"

namespace fastnorm::cuda {

// The first `left` of four values; all or none of them with kVectorized.
template <bool kVectorized>
__device__ __forceinline__ void store_some(float* target, const float4& values, int left) {
  if constexpr (kVectorized) {
    // (As a struct it would be stored by four instructions.)
    if (left > 0) {
      asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(values.x),
                   "f"(values.y), "f"(values.z), "f"(values.w)
                   : "memory");
    }
  } else {
    const float each[] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < left) target[i] = each[i];
    }
  }
}

// Adds up what the groups of a block have left in `staging`, rows of `width` columns (a multiple of
// four) of dw and then as many of db, and writes a row of partial sums: columns `begin` on. Of
// blocks that are `merged`, those with the same columns take a part each of what all of them have.
// `cluster_size`: the blocks that hold a row.
template <bool kVectorized, class Parameters>
__device__ __forceinline__ void leave_partials(const Parameters& p, float* staging, int width,
                                               int begin, int merged, int cluster_size) {
  const bool merges = merged > 1;
  const auto meet = [&] {
    if (merges) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
  };
  meet();
  const int64_t partial = blockIdx.x / (cluster_size * merged);
  const int part = merges ? cluster_rank() / cluster_size : 0;
  const int rank = merges ? cluster_rank() % cluster_size : 0;  // of those that hold a row
  for (int v = part * blockDim.x + threadIdx.x; v < 2 * width / 4; v += merged * blockDim.x) {
    const bool bias = 4 * v >= width;
    const int place = 4 * v - (bias ? width : 0);
    const int64_t column = begin + place;
    if (column >= p.cols) continue;
    const unsigned source = shared_address(staging + (bias ? p.groups * width : 0) + place);
    float4 sum = make_float4(0, 0, 0, 0);
    for (int r = 0; r < merged; ++r) {
      unsigned from = merges ? remote_address(source, r * cluster_size + rank) : source;
#pragma unroll 4
      for (int g = 0; g < p.groups; ++g, from += width * sizeof(float)) {
        const float4 other = merges ? load_remote(from) : load_float4(from);
        sum.x += other.x;
        sum.y += other.y;
        sum.z += other.z;
        sum.w += other.w;
      }
    }
    float* const target = (bias ? p.db_partials : p.dw_partials) + partial * p.cols + column;
    store_some<kVectorized>(target, sum, static_cast<int>(p.cols - column));
  }
  if (merges) meet();  // no block leaves while others read from it
}

// Sums of the first kStored chunks of each lane of a warp, whose `run` columns from there on lanes
// have in whole chunks, to a row of partial sums: straight from registers, by whole sectors of
// memory, for which neighbouring lanes exchange halves of chunks that have eight columns.
template <int kStored, int kChunks, int kColumns>
__device__ __forceinline__ void store_sums(float* target, const float (&sums)[kChunks][kColumns],
                                           int run) {
  static_assert(kColumns == 4 || kColumns == 8);
  const int lane = threadIdx.x % kWarpSize;
  const bool odd = lane % 2 != 0;
#pragma unroll
  for (int k = 0; k < kStored; ++k) {
    const int column = (lane + k * kWarpSize) * kColumns;
    const auto four = [&](int i) {
      return make_float4(sums[k][i], sums[k][i + 1], sums[k][i + 2], sums[k][i + 3]);
    };
    if constexpr (kColumns == 4) {
      if (column < run) *reinterpret_cast<float4*>(target + column) = four(0);
    } else {
      // The even lane's chunk by both, then the odd one's.
      float taken[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        taken[i] = __shfl_xor_sync(kAllLanes, odd ? sums[k][i] : sums[k][i + 4], 1);
      }
      const float4 others = make_float4(taken[0], taken[1], taken[2], taken[3]);
      const int even = odd ? column - kColumns : column;
      float* const place = target + even + (odd ? 4 : 0);
      if (even < run) *reinterpret_cast<float4*>(place) = odd ? others : four(0);
      if (even + kColumns < run) {
        *reinterpret_cast<float4*>(place + kColumns) = odd ? four(4) : others;
      }
    }
  }
}

// Of two that have sums of the same columns, groups of a block or blocks of a cluster, the `second`
// gets db of both and the first dw, in `dw`, by way of shared memory. `give` and `take`: where this
// thread's four sums go to and come from, the next four `step` bytes further on.
template <bool kRemote, int kChunks, int kColumns>
__device__ __forceinline__ void swap_sums(float (&dw)[kChunks][kColumns],
                                          float (&db)[kChunks][kColumns], bool second,
                                          unsigned give, unsigned take, unsigned step) {
  const auto meet = [] {
    if constexpr (kRemote) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
  };
  meet();  // nobody's stages are in use
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
#pragma unroll
    for (int i = 0; i < kColumns; i += 4) {
      const auto given = [&](int j) { return second ? dw[k][i + j] : db[k][i + j]; };
      const float4 four = make_float4(given(0), given(1), given(2), given(3));
      const unsigned place = give + (k * kColumns + i) / 4 * step;
      if constexpr (kRemote) {
        store_remote(place, four);
      } else {
        store_float4(place, four);
      }
    }
  }
  meet();
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
#pragma unroll
    for (int i = 0; i < kColumns; i += 4) {
      const float4 four = load_float4(take + (k * kColumns + i) / 4 * step);
      const float taken[] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float own = second ? db[k][i + j] : dw[k][i + j];
        dw[k][i + j] = own + taken[j];
      }
    }
  }
}

// Of two blocks of a cluster that have sums of the same columns, the `second` gets the second half
// of each lane's chunks of both and the first block the first half, as the first half of `sums`.
// `give`, `take` and `step` as above.
template <int kChunks, int kColumns>
__device__ __forceinline__ void swap_halves(float (&sums)[kChunks][kColumns], bool second,
                                            unsigned give, unsigned take, unsigned step) {
  constexpr int kHalf = kChunks / 2;
#pragma unroll
  for (int k = 0; k < kHalf; ++k) {
#pragma unroll
    for (int i = 0; i < kColumns; i += 4) {
      const auto given = [&](int j) { return second ? sums[k][i + j] : sums[k + kHalf][i + j]; };
      store_remote(give + (k * kColumns + i) / 4 * step,
                   make_float4(given(0), given(1), given(2), given(3)));
    }
  }
  cluster_arrive();
  cluster_wait();
#pragma unroll
  for (int k = 0; k < kHalf; ++k) {
#pragma unroll
    for (int i = 0; i < kColumns; i += 4) {
      const float4 four = load_float4(take + (k * kColumns + i) / 4 * step);
      const float taken[] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[k][i + j] = (second ? sums[k + kHalf][i + j] : sums[k][i + j]) + taken[j];
      }
    }
  }
}

}  // namespace fastnorm::cuda
