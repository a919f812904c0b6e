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
  // And not a warp that copied rows or exchanged sums.
  const int threads = p.groups * p.warps * kWarpSize, thread = threadIdx.x;
  const int first = thread < threads ? part * threads + thread : 2 * width;
  for (int v = first; v < 2 * width / 4; v += merged * threads) {
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
      store_some<true>(target + column, four(0), run - column);
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
      store_some<true>(place, odd ? others : four(0), run - even);
      store_some<true>(place + kColumns, odd ? four(4) : others, run - even - kColumns);
    }
  }
}

// What two that have sums of the same columns, groups of a block or blocks of a cluster, give each
// other: kFours times four numbers, given(n), from each of their threads. take(n, four): what the
// other has given. `own` and `other`: where this thread's first four lie in shared memory and where
// the other's do, the next ones `step` bytes further on. Blocks fetch what they are given, and must
// meet once more before one of them ends.
template <bool kRemote, int kFours, class Given, class Take>
__device__ __forceinline__ void swap_fours(unsigned own, unsigned other, unsigned step,
                                           const Given& given, const Take& take) {
#pragma unroll
  for (int n = 0; n < kFours; ++n) store_float4(own + n * step, given(n));
  if constexpr (kRemote) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
#pragma unroll
  for (int n = 0; n < kFours; ++n) {
    take(n, kRemote ? load_remote(other + n * step) : load_float4(other + n * step));
  }
}

template <int kColumns>
__device__ __forceinline__ float4 four_of(const float (&columns)[kColumns], int i) {
  return make_float4(columns[i], columns[i + 1], columns[i + 2], columns[i + 3]);
}

// The sum of two fours, to columns i, i + 1, ...
template <int kColumns>
__device__ __forceinline__ void put_sum(float (&columns)[kColumns], int i, const float4& one,
                                        const float4& other) {
  columns[i] = one.x + other.x;
  columns[i + 1] = one.y + other.y;
  columns[i + 2] = one.z + other.z;
  columns[i + 3] = one.w + other.w;
}

// Of two that have sums of the same columns the `second` gets db of both and the first dw, in `dw`.
// `own`, `other` and `step`: as above.
template <bool kRemote, int kChunks, int kColumns>
__device__ __forceinline__ void swap_sums(float (&dw)[kChunks][kColumns],
                                          float (&db)[kChunks][kColumns], bool second, unsigned own,
                                          unsigned other, unsigned step) {
  constexpr int kFours = kColumns / 4;  // of a chunk
  __syncthreads();                      // nobody's stages are in use
  swap_fours<kRemote, kChunks * kFours>(
      own, other, step,
      [&](int n) {
        const int k = n / kFours, i = n % kFours * 4;
        return second ? four_of(dw[k], i) : four_of(db[k], i);
      },
      [&](int n, const float4& taken) {
        const int k = n / kFours, i = n % kFours * 4;
        put_sum(dw[k], i, second ? four_of(db[k], i) : four_of(dw[k], i), taken);
      });
}

// Of two blocks that have sums of the same columns the `second` gets the second half of each lane's
// chunks of both and the first block the first half, as the first half of `sums`.
template <int kChunks, int kColumns>
__device__ __forceinline__ void swap_halves(float (&sums)[kChunks][kColumns], bool second,
                                            unsigned own, unsigned other, unsigned step) {
  constexpr int kHalf = kChunks / 2, kFours = kColumns / 4;
  swap_fours<true, kHalf * kFours>(
      own, other, step,
      [&](int n) {
        const int k = n / kFours, i = n % kFours * 4;
        return second ? four_of(sums[k], i) : four_of(sums[k + kHalf], i);
      },
      [&](int n, const float4& taken) {
        const int k = n / kFours, i = n % kFours * 4;
        put_sum(sums[k], i, second ? four_of(sums[k + kHalf], i) : four_of(sums[k], i), taken);
      });
}

}  // namespace fastnorm::cuda
