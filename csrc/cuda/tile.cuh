// A thread's share of a row: which columns it owns, and a tile of registers that holds them.
#pragma once

#include "numeric.cuh"

namespace fastnorm::cuda {

// The columns of one thread: chunks `first`, first + step, ... of kColumns columns each, within
// `cols`. Ownership goes by column index, whatever the row's alignment, so that a row is always
// summed in the same order.
template <int kColumns>
struct Share {
  int first;        // first chunk
  int step;         // chunks between two of this thread's
  int cols;         // columns of the row, or of the piece of it that this block has
  bool vectorized;  // chunks can be moved by wide accesses

  __device__ __forceinline__ int column(int k) const { return (first + k * step) * kColumns; }

  // How many columns of chunk k exist: kColumns, fewer at the row's end, none beyond.
  __device__ __forceinline__ int count(int k) const {
    return max(0, min(kColumns, cols - column(k)));
  }

  __device__ __forceinline__ bool whole(int k) const { return vectorized && count(k) == kColumns; }
};

// The elements of a share, packed in their own dtype, to be unpacked where they are used.
template <class T, int kChunks, int kColumns>
struct Tile {
  Pack<T, kColumns> chunks[kChunks];

  // Reads the share from `row`; columns that do not exist are zero. A null row is all zeros.
  __device__ __forceinline__ void load(const T* row, const Share<kColumns>& share) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int count = row == nullptr ? 0 : share.count(k);
      chunks[k] = load_pack<T, kColumns>(row + share.column(k), count,
                                         count == kColumns && share.vectorized);
    }
  }

  template <class A>
  __device__ __forceinline__ A get(int k, int i) const {
    return load_as<A>(chunks[k].values[i]);
  }
};

}  // namespace fastnorm::cuda
