// The columns of a row that a lane of the backward has where rows end within a chunk: single ones,
// or pairs, instead of chunks.
#pragma once

#include "async.cuh"
#include "row_sums.cuh"

namespace fastnorm::cuda {

// A lane's columns of a row: kSteps steps of pairs of 16-bit columns or of single ones of float32,
// kStep columns apart, of which the first kWhole certainly exist.
template <class X, int kSteps, int kWhole, int kStep>
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

  // From shared memory, where this lane's first column is at `address`. Behind the last column
  // there is room, and nothing of use: those that do not exist are zero.
  static __device__ __forceinline__ void load(Values& values, unsigned address, int left) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float value =
            load_element<X>(address + (s * kStep + i) * static_cast<unsigned>(sizeof(X)));
        values[s][i] = has(s, i, left) ? value : 0;
      }
    }
  }

  // Into shared memory, likewise.
  static __device__ __forceinline__ void store(const Values& values, unsigned address, int left) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      Pack<X, 2> pair;
      pair.set_pair(0, values[s][0], values[s][kCount - 1]);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const unsigned place = address + (s * kStep + i) * static_cast<unsigned>(sizeof(X));
        if (has(s, i, left)) put_element(place, pair.element(i));
      }
    }
  }

  // dx, and what the row adds to dw and db.
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

  // Adds up what the teams of kLanes lanes of a warp have of the same columns.
  template <int kLanes>
  static __device__ __forceinline__ void sum_teams(Values& values) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int offset = kLanes; offset < kWarpSize; offset *= 2) {
          values[s][i] += __shfl_xor_sync(kAllLanes, values[s][i], offset);
        }
      }
    }
  }

  // Puts them where this lane's first column is at `target`.
  static __device__ __forceinline__ void put(const Values& values, float* target, int left) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (has(s, i, left)) target[s * kStep + i] = values[s][i];
      }
    }
  }
};

}  // namespace fastnorm::cuda
