// Single columns of rows that end within a chunk, as the backward's lanes have them.
#pragma once

#include "backward_parameters.cuh"
#include "row_sums.cuh"
#include "warp_runs.cuh"

namespace fastnorm::cuda {

// A lane's columns of a row: kSteps steps of pairs of 16-bit columns or of single ones of float32,
// kStep columns apart, of which the first kWhole certainly exist. kPaired: rows have an even number
// of columns and begin at whole words, so that pairs move as such. Of an elementwise sum on an
// H200, single columns and so: bfloat16 66 .715 and .80, 126 .745 and .835, 258 .79 and .855, 514
// .67 and .715, 1100 .795 and .84; but 300 .87 and .87.
template <class X, int kSteps, int kWhole, int kStep, bool kPaired>
struct ElementColumns {
  static constexpr int kCount = kSideBySide<X>;
  using Values = float[kSteps][kCount];

  // `left`: columns of the row from this lane's first on.
  static __device__ __forceinline__ bool has(int s, int i, int left) {
    return s < kWhole || s * kStep + i < left;
  }

  // The sums of (x - mean) * dy * weight and of dy * weight.
  static __device__ __forceinline__ Sums<float> sum(const Values& x, const Values& dy,
                                                    const Values& weight, float mean) {
    Sums<float> parts[2];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        Sums<float>& part = parts[(s * kCount + i) % 2];
        const float wdy = dy[s][i] * weight[s][i];
        part.xhat_wdy = fma(x[s][i] - mean, wdy, part.xhat_wdy);
        part.wdy += wdy;
      }
    }
    parts[0].merge(parts[1]);
    return parts[0];
  }

  // From device memory; zero if they do not exist.
  static __device__ __forceinline__ void load_global(Values& values, const X* first, int left) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values[s][i] = has(s, i, left) ? widen(first[s * kStep + i]) : 0;
      }
    }
  }

  // The weight from column `begin` of the row on; ones where there is none.
  static __device__ __forceinline__ void load_weight(Values& values, const void* weight,
                                                     DType dtype, int begin, int left) {
    const bool is_wide = kIs16Bit<X> && dtype == DType::kFloat32;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int at = begin + s * kStep + i;
        values[s][i] = 1;
        if (weight != nullptr && has(s, i, left)) {
          values[s][i] = is_wide ? static_cast<const float*>(weight)[at]
                                 : widen(static_cast<const X*>(weight)[at]);
        }
      }
    }
  }

  // From shared memory, where this lane's first column is at `address`; zero if they do not exist.
  // kRoom: what lies behind a row may be read, which saves some of the kernels registers.
  template <bool kRoom>
  static __device__ __forceinline__ void load(Values& values, unsigned address, int left) {
    constexpr auto kSize = static_cast<unsigned>(sizeof(X));
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const unsigned place = address + s * kStep * kSize;
      if constexpr (kPaired) {
        Pack<X, 2> pair = {};
        if (kRoom || has(s, 0, left)) pair = load_pair<X>(place);
#pragma unroll
        for (int i = 0; i < kCount; ++i) values[s][i] = pair.template get<float>(i);
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          values[s][i] = 0;
          if (kRoom || has(s, i, left)) values[s][i] = load_element<X>(place + i * kSize);
        }
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (kRoom && !has(s, i, left)) values[s][i] = 0;
      }
    }
  }

  // Those that exist of a row of an odd number of columns, which begins at a whole word.
  static __device__ __forceinline__ void load_odd(Values& values, unsigned address, int left) {
    constexpr auto kSize = static_cast<unsigned>(sizeof(X));
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const unsigned place = address + s * kStep * kSize;
      if (has(s, 1, left)) {
        const auto pair = load_pair<X>(place);
        values[s][0] = pair.template get<float>(0);
        values[s][1] = pair.template get<float>(1);
      } else {
        values[s][0] = has(s, 0, left) ? load_element<X>(place) : 0;
        values[s][1] = 0;
      }
    }
  }

  // Into shared memory, likewise.
  static __device__ __forceinline__ void store(const Values& values, unsigned address, int left) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      Pack<X, 2> pair;
      pair.set_pair(0, values[s][0], values[s][kCount - 1]);
      constexpr auto kSize = static_cast<unsigned>(sizeof(X));
      if constexpr (kPaired) {
        if (has(s, 0, left)) put_pair(address + s * kStep * kSize, pair);
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const unsigned place = address + (s * kStep + i) * kSize;
          if (has(s, i, left)) put_element(place, pair.element(i));
        }
      }
    }
  }

  // Likewise of a row of an odd number of columns, which begins at a whole word.
  static __device__ __forceinline__ void store_odd(const Values& values, unsigned address,
                                                   int left) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      Pack<X, 2> pair;
      pair.set_pair(0, values[s][0], values[s][1]);
      const unsigned place = address + s * kStep * static_cast<unsigned>(sizeof(X));
      if (has(s, 1, left)) {
        put_pair(place, pair);
      } else if (has(s, 0, left)) {
        put_element(place, pair.element(0));
      }
    }
  }

  // dx, and what a row adds to dw and db.
  static __device__ __forceinline__ void finish(Values& dx, Values& dw, Values& db, const Values& x,
                                                const Values& dy, const Values& weight,
                                                const RowGradient& gradient) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float centred = x[s][i] - gradient.mean;
        const float scaled = dy[s][i] * gradient.rstd;
        dw[s][i] = fma(scaled, centred, dw[s][i]);
        db[s][i] += dy[s][i];
        dx[s][i] = gradient.dx(centred, scaled, weight[s][i]);
      }
    }
  }

  // Adds up what teams of kLanes lanes of the warp have of dw or db.
  template <int kLanes>
  static __device__ __forceinline__ void sum_teams(Values& sums) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int offset = kLanes; offset < kWarpSize; offset *= 2) {
          sums[s][i] += __shfl_xor_sync(kAllLanes, sums[s][i], offset);
        }
      }
    }
  }

  // Those to memory, where this lane's first one is at `target`.
  static __device__ __forceinline__ void put_sums(const Values& sums, float* target, int left) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (has(s, i, left)) target[s * kStep + i] = sums[s][i];
      }
    }
  }
};

// The column where the run of the row's warp w begins.
template <bool kShort, class X>
__device__ __forceinline__ int begin_of_run(const RingParameters<X>& p, int w) {
  if (kShort) return w == 0 ? 0 : static_cast<int>(p.cols);
  return begin_of_warp_run(p, w);
}

}  // namespace fastnorm::cuda
