// Keeps blocks that stay for many rows from drifting apart.
//
// Memory is at its best while the whole GPU reads one compact region at a time. Blocks that take
// every n-th row begin together, but those of a large GPC get a smaller share of memory: of 4096 x
// 32768 bfloat16 the first of 131 blocks ended its rows 32 us before the last on an H200, of 142 us
// in all. So each block says how many rows it has written, and pauses if it is too far ahead of the
// average of all. Which block writes which row does not change by that, and nor does any result.
//
// Nobody waits for anybody, and nobody relies on it. The count is of all launches, of any stream,
// and never begins anew: a block takes the difference to what it found at its start, and what
// others add makes it pause less. A block that is ahead by more than can be drift goes on: others
// did not even find a place, say.
#pragma once

#include "numeric.cuh"

namespace fastnorm::cuda {

static __device__ unsigned rows_written;

// Looks every kEvery rows of a block; pauses `pause` cycles for each of its rows that it is ahead.
template <int kEvery>
class Pace {
 public:
  // `keeps`: whether this thread does so for its block, and the others wait for it elsewhere.
  // `start`: in shared memory, for registers are few. `most_ahead`: rows of all blocks that this
  // one may be ahead of the average.
  __device__ __forceinline__ Pace(volatile unsigned& start, bool keeps, int blocks, int most_ahead,
                                  int pause)
      : start_(start), keeps_(keeps), blocks_(blocks), most_ahead_(most_ahead), pause_(pause) {
    if (keeps) start = seen_ = look();
  }

  // When the block has written so many rows. (What it finds it asked for the last time: to wait for
  // an answer takes longer than to write a row, 4096 x 32768 bfloat16 beside float32 parameters
  // .907 of a copy on an H200 without all this, .92 so, .84 with that wait.)
  __device__ __forceinline__ void keep(int rows) {
    if (!keeps_ || rows % kEvery != 0) return;
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(&rows_written), "n"(kEvery)
                 : "memory");
#endif
    constexpr int kDrift = 8;     // rows of a block: no more than can be
    constexpr int kMost = 10000;  // cycles
    const int ahead =
        static_cast<int>(static_cast<unsigned>(rows) * blocks_ - most_ahead_ + start_ - seen_);
    if (ahead > 0 && ahead <= kDrift * blocks_) {
      const unsigned cycles = min(ahead * pause_ / blocks_, kMost);
      const unsigned begin = clock();
      while (static_cast<unsigned>(clock()) - begin < cycles) {
      }
    }
    seen_ = look();
  }

 private:
  volatile unsigned& start_;
  const bool keeps_;
  const int blocks_, most_ahead_, pause_;
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
