// A ring of stages in shared memory that one warp of a block fills in bulk, and from which it
// copies in bulk what the others have put there.
#pragma once

#include "async.cuh"

namespace fastnorm::cuda {

// The ring's barriers: `full` when a stage has arrived, `written` when dx has taken the place of x.
struct BulkBarriers {
  unsigned full, written;

  __device__ __forceinline__ unsigned full_of(int stage) const {
    return full + stage * static_cast<int>(sizeof(uint64_t));
  }
  __device__ __forceinline__ unsigned written_of(int stage) const {
    return written + stage * static_cast<int>(sizeof(uint64_t));
  }
};

// A stage of the ring, and how often all of them have been used.
struct BulkTurn {
  int stage = 0, parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage < stages) return;
    stage = 0;
    parity ^= 1;
  }
};

}  // namespace fastnorm::cuda
