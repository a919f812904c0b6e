// Which part of a row a block works on, where a row has several blocks.
#pragma once

#include "reduce.cuh"
#include "tile.cuh"

namespace fastnorm::cuda {

// The columns of a row that this block of a cluster holds; all of them without a cluster.
struct Piece {
  int begin, cols;
};

template <int kColumns, int kChunks, bool kCluster>
__device__ __forceinline__ Piece block_piece(int64_t cols, int threads) {
  if constexpr (!kCluster) return {0, static_cast<int>(cols)};
  const int size = threads * kChunks * kColumns;
  const int begin = cluster_rank() * size;
  const int rest = static_cast<int>(cols) - begin;
  return {begin, rest < 0 ? 0 : (rest < size ? rest : size)};
}

// The row and the columns of a block of the kSplit kernels.
template <class X, int kChunks, bool kVectorized>
struct Segment {
  static constexpr int64_t kSize =
      static_cast<int64_t>(kSegmentThreads) * kChunks * kChunkColumns<X>;
  int64_t row, index, begin;
  Share<X, kVectorized> share;

  __device__ __forceinline__ Segment(int64_t cols, int64_t segments)
      : row(blockIdx.x / segments),
        index(blockIdx.x - row * segments),
        begin(index * kSize),
        share{static_cast<int>(threadIdx.x), kSegmentThreads,
              static_cast<int>(min(kSize, cols - begin))} {}
};

}  // namespace fastnorm::cuda
