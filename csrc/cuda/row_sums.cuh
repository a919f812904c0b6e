// What the backward's kernels of one dtype share: who holds which columns of a row, the two sums of
// a row, and dx. All of them add in this order, so that they agree bit for bit.
//
// A row is held by some lanes of a warp (kWarp), by warps of a block (kBlock) or by those of a
// cluster (kCluster) or of many blocks of a grid that runs as a whole (kGrid). Lane l of the n
// lanes of a warp that hold a run of it owns the chunks l, l + n, ... of the run: 16 columns, 32
// bytes of a 16-bit row, 64 of float32; in some of the 16-bit rows of kWarp 24 columns.
#pragma once

#include "async.cuh"
#include "launch.cuh"
#include "reduce.cuh"

namespace fastnorm::cuda {

enum class RingSpan : uint8_t { kWarp, kBlock, kCluster, kGrid };

template <class X>
constexpr int kRingChunks = backward_chunks(sizeof(X) == 2 ? DType::kFloat16 : DType::kFloat32);

constexpr int kRingRowWarps = kMaxThreadsPerRow / kWarpSize;  // of a row in one block

// A thread's chunks of the weight, as they are in memory: loading and unpacking are two steps, so
// that other loads can be issued between them.
template <class X, int kChunks, bool kVectorized>
struct PackedWeight {
  static constexpr int kColumns = kChunkColumns<X>;
  Pack<X, kColumns> own[kChunks];
  Pack<float, kColumns> wide[kChunks];

  // `column(k)` and `left(k)`: of this thread's chunk k.
  template <class Column, class Left>
  __device__ __forceinline__ void load(const void* weight, DType dtype, const Column& column,
                                       const Left& left) {
    if (weight == nullptr) return;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (sizeof(X) != sizeof(float) && dtype == DType::kFloat32) {
        wide[k] = load_pack<kVectorized, float, kColumns>(
            static_cast<const float*>(weight) + column(k), left(k));
      } else {
        own[k] =
            load_pack<kVectorized, X, kColumns>(static_cast<const X*>(weight) + column(k), left(k));
      }
    }
  }
};

// The weight of a single column.
template <class X>
__device__ __forceinline__ float load_weight(const void* weight, DType dtype, int column) {
  if (weight == nullptr) return 1.0f;
  if (sizeof(X) != sizeof(float) && dtype == DType::kFloat32) {
    return static_cast<const float*>(weight)[column];
  }
  return widen(static_cast<const X*>(weight)[column]);
}

template <class X, int kChunks>
struct RingWeight {
  static constexpr int kColumns = kChunkColumns<X>;
  float values[kChunks][kColumns];

  // A missing weight is one.
  template <bool kVectorized>
  __device__ __forceinline__ RingWeight(const PackedWeight<X, kChunks, kVectorized>& packed,
                                        bool exists, DType dtype) {
    const bool is_wide = sizeof(X) != sizeof(float) && dtype == DType::kFloat32;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        values[k][i] = !exists   ? 1.0f
                       : is_wide ? packed.wide[k].template get<float>(i)
                                 : packed.own[k].template get<float>(i);
      }
    }
  }
};

// Of chunks that all exist, or are zeros.
struct Always {
  __device__ __forceinline__ bool operator()(int) const { return true; }
};

// The sums of (x - mean) * dy * weight and of dy * weight over a thread's chunks; x(k) and dy(k)
// give them, zeros or, if it says so, anything of one that does not exist.
template <class X, int kChunks, class ChunkOfX, class ChunkOfDy, class Exists = Always>
__device__ __forceinline__ Sums<float> sum_chunks(const ChunkOfX& x_chunk,
                                                  const ChunkOfDy& dy_chunk,
                                                  const RingWeight<X, kChunks>& weight, float mean,
                                                  const Exists& exists = {}) {
  Sums<float> sums;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const auto x = x_chunk(k);
    const auto dy = dy_chunk(k);
    Sums<float> chunk;
#pragma unroll
    for (int i = 0; i < kChunkColumns<X>; ++i) {
      const float wdy = dy.template get<float>(i) * weight.values[k][i];
      const float centred = x.template get<float>(i) - mean;
      chunk.xhat_wdy = i == 0 ? centred * wdy : fma(centred, wdy, chunk.xhat_wdy);
      chunk.wdy = i == 0 ? wdy : chunk.wdy + wdy;
    }
    if (!exists(k)) chunk = {};
    if (k == 0) {
      sums = chunk;
    } else {
      sums.merge(chunk);
    }
  }
  return sums;
}

// dx = rstd * wdy - rstd * mean(wdy) - (x - mean) * rstd^2 * mean(xhat * wdy)
struct RowGradient {
  float mean, rstd, offset, slope;

  __device__ __forceinline__ RowGradient(float row_mean, float row_rstd, const Sums<float>& sums,
                                         float inverse_cols)
      : mean(row_mean),
        rstd(row_rstd),
        offset(row_rstd * (sums.wdy * inverse_cols)),
        // Where the variance is infinite, and rstd zero, the sum may be infinite too.
        slope(row_rstd == 0.f ? 0.f
                              : row_rstd * sums.xhat_wdy * inverse_cols * row_rstd * row_rstd) {}

  // `scaled`: dy * rstd.
  __device__ __forceinline__ float dx(float centred, float scaled, float weight) const {
    return fma(-slope, centred, fma(scaled, weight, -offset));
  }
  // Of a row's only column, where the other two terms are the same number: exactly zero if the mean
  // is that column.
  __device__ __forceinline__ float dx_of_single(float centred) const { return -slope * centred; }
};

// A column that a lane has behind its warp's chunks: its weight, and what it has of dw and db.
struct TailColumn {
  float weight = 1, dw = 0, db = 0;

  __device__ __forceinline__ Sums<float> sums(float x, float dy, float mean) const {
    const float wdy = dy * weight;
    return {(x - mean) * wdy, wdy};
  }
  // Counts dy in, and gives dx.
  __device__ __forceinline__ float finish(float x, float dy, const RowGradient& gradient) {
    const float centred = x - gradient.mean, scaled = dy * gradient.rstd;
    dw = fma(scaled, centred, dw);
    db += dy;
    return gradient.dx(centred, scaled, weight);
  }
};

// The sums over the lanes of a row that a warp holds alone. Lanes that are no power of two add as
// the next one would whose others had nothing, for they may be followed at once by those of another
// row; they need to know which of them this `lane` is.
__device__ __forceinline__ Sums<float> sum_row_lanes(Sums<float> sums, int lanes, int lane = 0) {
  if (lanes == kWarpSize) return both_halves(sum_halves(sums.xhat_wdy, sums.wdy));
  if ((lanes & (lanes - 1)) != 0) {
    asm volatile("" : "+r"(lane));  // or what follows from it would be kept from row to row
    const int first = lane_index() - lane;
#pragma unroll
    for (int offset = 1; offset < kWarpSize / 2; offset *= 2) {
      if (offset >= lanes) break;
      // All of the neighbouring `offset` lanes have the same sums by now, and the first is there if
      // any is.
      const int other = (lane ^ offset) & -offset;
      const float xhat_wdy = __shfl_sync(kAllLanes, sums.xhat_wdy, first + other);
      const float wdy = __shfl_sync(kAllLanes, sums.wdy, first + other);
      if (other < lanes) sums.merge({xhat_wdy, wdy});
    }
    return sums;
  }
#pragma unroll
  for (int offset = 1; offset < kWarpSize / 2; offset *= 2) {
    if (offset < lanes) {
      sums.xhat_wdy += __shfl_xor_sync(kAllLanes, sums.xhat_wdy, offset);
      sums.wdy += __shfl_xor_sync(kAllLanes, sums.wdy, offset);
    }
  }
  return sums;
}

// The sums over the warps of a row in one block. `mine`: lane l has the first sum of warp l, lane
// l + 16 the second; zero for warps that do not exist.
__device__ __forceinline__ Sums<float> sum_row_warps(float mine) {
  static_assert(kRingRowWarps == kWarpSize / 2);
  return both_halves(sum_within_halves(mine));
}

// The sums over the blocks of a cluster, one after the other, from pairs that they have left in
// shared memory; those of up to eight are read at once, and are zeros of blocks that do not exist.
// (Two at a time, each waited for, and by a division whose turn it is to send them: 1024 x 131072
// bfloat16, by clusters of 16, .855 of an elementwise sum on an H200, .91 without either, 8192 x
// 18432, by fives, .89 and .93.)
__device__ __forceinline__ Sums<float> sum_block_pairs(unsigned pairs, int blocks) {
  constexpr int kAtOnce = kMaxClusterSize;
  Sums<float> sums;
#pragma unroll 1
  for (int i = 0; i < blocks; i += kAtOnce) {
    float4 two[kAtOnce / 2];
#pragma unroll
    for (int j = 0; j < kAtOnce / 2; ++j) {
      two[j] = load_float4(pairs + (i + 2 * j) * 2 * static_cast<unsigned>(sizeof(float)));
    }
#pragma unroll
    for (int j = 0; j < kAtOnce / 2; ++j) {
      sums.merge({two[j].x, two[j].y});
      sums.merge({two[j].z, two[j].w});
    }
  }
  return sums;
}

}  // namespace fastnorm::cuda
