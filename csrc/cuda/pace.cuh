// Keeps blocks that stay for many rows from drifting apart.
//
// Memory is at its best while the whole GPU reads one compact region at a time. Blocks that take
// every n-th row begin together, but those of a large GPC get a smaller share of memory: of 4096 x
// 32768 bfloat16 the first of 131 blocks ended its rows 32 us before the last on an H200, of 142 us
// in all. So each block says when it has written a row, and waits if it is too far ahead of the
// average of all. Which block writes which row does not change by that, and nor does any result.
//
// It is advice, and nobody relies on it. The count is of all launches, of any stream, and never
// begins anew: a block takes the difference to what it found at its start, and what others add
// lets it wait less. A block that has looked a few times in vain, because others did not even find
// a place, say, goes on and does not wait again.
#pragma once

#include "numeric.cuh"

namespace fastnorm::cuda {

static __device__ unsigned rows_written;

class Pace {
 public:
  // `keeps`: whether this thread does so for its block, and the others wait for it elsewhere.
  // `start`: in shared memory, for registers are few. `most_ahead`: rows of all blocks that this
  // one may be ahead of the average.
  __device__ __forceinline__ Pace(volatile unsigned& start, bool keeps, int blocks, int most_ahead)
      : start_(start), keeps_(keeps), blocks_(blocks), most_ahead_(most_ahead) {
    if (keeps) start = seen_ = look();
  }

  // When the block has written so many rows. (What it finds it asked for a row ago: to wait for an
  // answer takes longer than to write the row, 4096 x 32768 bfloat16 beside float32 parameters .907
  // of a copy on an H200 without all this, .932 so, .84 with that wait.)
  __device__ __forceinline__ void keep(int rows) {
    if (!keeps_) return;
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(&rows_written) : "memory");
#endif
    constexpr int kLooks = 16;
    int ahead =
        static_cast<int>(static_cast<unsigned>(rows) * blocks_ - most_ahead_ + start_ - seen_);
#pragma unroll 1
    for (int looks = 0; ahead > 0; ++looks) {
      if (looks == kLooks) {
        start_ = start_ - (1u << 30);  // as if others were far ahead
        break;
      }
      const unsigned seen = look();
      ahead -= static_cast<int>(seen - seen_);
      seen_ = seen;
    }
    seen_ = look();
  }

 private:
  volatile unsigned& start_;
  const bool keeps_;
  const int blocks_, most_ahead_;
  unsigned seen_ = 0;

  static __device__ __forceinline__ unsigned look() {
    unsigned rows = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
                 : "=r"(rows)
                 : "l"(&rows_written)
                 : "memory");
#endif
    return rows;
  }
};

}  // namespace fastnorm::cuda
