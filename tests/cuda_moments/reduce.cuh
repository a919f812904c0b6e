// A warp on the CPU: stands in for csrc/cuda/reduce.cuh, of which it has what moments.cuh takes.
//
// Its lanes are fibers that take turns. A lane runs until it meets the others, as they all do in
// the same order; what it brought is there for them when its next turn comes.
#pragma once

#include <ucontext.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>

#include "plan.h"

#define __device__
#define __forceinline__ inline

namespace fastnorm::cuda {

constexpr unsigned kAllLanes = 0xffffffff;

struct ThreadIndex {
  unsigned x = 0;
};
inline ThreadIndex threadIdx;

using std::fma;
using std::isfinite;
using std::isinf;
using std::isnan;

inline float fmax(float a, float b) { return std::fmax(a, b); }
inline float fmin(float a, float b) { return std::fmin(a, b); }
inline float rsqrt(float a) { return 1 / std::sqrt(a); }
inline float quotient(float part, float whole) { return part / whole; }

class Warp {
 public:
  // Runs `lane` in all lanes, which find their number in threadIdx.x.
  static void run(const std::function<void()>& lane) {
    Warp warp(lane);
    current_ = &warp;
    for (bool running = true; running;) {
      running = false;
      for (unsigned i = 0; i < kWarpSize; ++i) {
        if (warp.ended_[i]) continue;
        threadIdx.x = i;
        swapcontext(&warp.scheduler_, &warp.lanes_[i]);
        running |= !warp.ended_[i];
      }
    }
  }

  // What lane `from` brings where this one brings `value`.
  static float exchange(float value, unsigned from) {
    const unsigned lane = threadIdx.x;
    std::array<float, kWarpSize>& brought = current_->brought_[current_->meetings_[lane]++ % 2];
    brought[lane] = value;
    swapcontext(&current_->lanes_[lane], &current_->scheduler_);
    return brought[from];
  }

 private:
  explicit Warp(const std::function<void()>& lane) : lane_(lane) {
    for (unsigned i = 0; i < kWarpSize; ++i) {
      getcontext(&lanes_[i]);
      stacks_[i] = std::make_unique<Stack>();
      lanes_[i].uc_stack.ss_sp = stacks_[i]->data();
      lanes_[i].uc_stack.ss_size = stacks_[i]->size();
      lanes_[i].uc_link = &scheduler_;
      makecontext(&lanes_[i], begin, 0);
    }
  }

  static void begin() {
    const unsigned lane = threadIdx.x;
    current_->lane_();
    current_->ended_[lane] = true;
  }

  using Stack = std::array<char, 1 << 16>;
  static inline Warp* current_;
  const std::function<void()>& lane_;
  ucontext_t scheduler_;
  std::array<ucontext_t, kWarpSize> lanes_;
  std::array<std::unique_ptr<Stack>, kWarpSize> stacks_;
  std::array<bool, kWarpSize> ended_ = {};
  std::array<unsigned, kWarpSize> meetings_ = {};
  std::array<float, kWarpSize> brought_[2];
};

inline bool __any_sync(unsigned, bool predicate) {
  float any = predicate;
  for (unsigned offset = 1; offset < kWarpSize; offset *= 2) {
    any += Warp::exchange(any, threadIdx.x ^ offset);
  }
  return any > 0;
}

inline bool __all_sync(unsigned lanes, bool predicate) { return !__any_sync(lanes, !predicate); }

inline float __shfl_sync(unsigned, float value, unsigned lane) {
  return Warp::exchange(value, lane);
}

inline float __shfl_xor_sync(unsigned, float value, unsigned offset) {
  return Warp::exchange(value, threadIdx.x ^ offset);
}

// The sums over the lower half of the lanes and over the upper half.
inline float sum_within_halves(float mine) {
  for (int offset = kWarpSize / 4; offset > 0; offset /= 2) {
    mine += __shfl_xor_sync(kAllLanes, mine, offset);
  }
  return mine;
}

// The sum of `first` in the lower half of the lanes, that of `second` in the upper half.
inline float sum_halves(float first, float second, int lane) {
  const bool upper = lane >= kWarpSize / 2;
  float mine = upper ? second : first;
  mine += __shfl_xor_sync(kAllLanes, upper ? first : second, kWarpSize / 2);
  return sum_within_halves(mine);
}

template <int kWidth>
float of_first_lane(float value) {
  return Warp::exchange(value, threadIdx.x - threadIdx.x % kWidth);
}

template <int kWidth, int kCount>
void sum_lanes(float (&values)[kCount]) {
  static_assert((kWidth & (kWidth - 1)) == 0);
  for (int offset = 1; offset < kWidth; offset *= 2) {
    for (float& value : values) value += Warp::exchange(value, threadIdx.x ^ offset);
  }
}

// Elements that are float already.
template <class T, int kCount>
struct Pack {
  T elements[kCount];

  template <class A>
  A get(int i) const {
    return elements[i];
  }
};

}  // namespace fastnorm::cuda
