// Columns of rows that end within a chunk, as the forward's lanes have them, and what the warps of
// a block do that hold such a row together.
#pragma once

#include "forward_start.cuh"
#include "moments.cuh"
#include "stage.cuh"
#include "warp_runs.cuh"

namespace fastnorm::cuda {

// Of which rows the pairs of columns lie in whole words: of all, as where rows have an even number
// of columns, of every other one from the first on, where it is odd, or of none that is known. Of a
// copy on an H200, 134 MB of bfloat16, single columns and so: 82 .69 and .82, 130 .67 and .91, 250
// .78 and .96, 500 .845 and .975, 750 .89 and .98; odd 129 .66 and .785, 449 .835 and .905, 901
// .855 and .915.
enum class Pairing { kNone, kAll, kAlternate };

// kRows rows of kLanes lanes, in kSteps steps each, of which kWhole certainly exist in every lane:
// in registers (kHeld), or in shared memory, where they are read anew for each pass.
template <class X, int kLanes, int kSteps, int kWhole, int kRows, Pairing kPairing,
          bool kHeld = true>
class ElementTile {
 public:
  static constexpr int kCount = kSideBySide<X>;
  static constexpr int kStep = kLanes * kCount;
  // Whether rows are summed as they are first (see moments.cuh). With more columns in a lane that
  // takes up to 128 registers: on 92 multiprocessors of an H100 66 columns of bfloat16 .715 -> .775
  // of a copy, 257 .845 -> .875, 602 .98 -> 1.00, but 511 .915 -> .91, 769 of float16 .91 -> .89.
  static constexpr bool kSums = kIs16Bit<X> && kSteps <= 12;
  // Chains in which a lane adds up, each of up to 16 columns.
  static constexpr int kChains = 2;
  static_assert(kSteps * kCount <= 16 * kChains);

  __device__ __forceinline__ explicit ElementTile(int cols)
      : column_(static_cast<int>(threadIdx.x) % kLanes * kCount), left_(cols - column_) {}

  // Addresses of this lane's first column: what is added to them is constant.
  __device__ __forceinline__ void load(int r, const X* row) {
    const X* const mine = row + column_;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if constexpr (kPairing != Pairing::kNone) {
        if (is_paired(r, s)) {
          const auto pair = load_wide<X, kCount>(mine + s * kStep, has(s, 0));
#pragma unroll
          for (int i = 0; i < kCount; ++i) values_[r][s][i] = pair.template get<float>(i);
          continue;
        }
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values_[r][s][i] = has(s, i) ? widen(mine[s * kStep + i]) : 0;
      }
    }
  }

  // Row r stays in shared memory, at `row`.
  __device__ __forceinline__ void leave(int r, unsigned row) {
    rows_[r] = row + column_ * static_cast<int>(sizeof(X));
  }

  // Of the columns that a warp's lanes, or kLanes of them, have of each row, `cols` together.
  __device__ __forceinline__ void moments(SetMoments<float> (&sets)[kRows], int cols,
                                          float inverse_cols) const {
    constexpr int kFirst = 4;  // columns whose mean is the point of reference
    static_assert(kWhole * kCount >= kFirst);
    const auto by_differences = [&](SetMoments<float>(&others)[kRows]) {
      using Moments = ThreadMoments<float, kSteps * kCount>;
      Moments threads[kRows];
      float count = kWhole * kCount;
#pragma unroll
      for (int s = kWhole; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) count += has(s, i) ? 1.f : 0.f;
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float first[kFirst];
#pragma unroll
        for (int i = 0; i < kFirst; ++i) {
          float values[kCount];
          read(r, i / kCount, values);
          first[i] = values[i % kCount];
        }
        const float reference = reference_point(tree_mean(first));
        threads[r] = {reference, 0, 0, count};
        float sums[kChains] = {}, squares[kChains] = {};
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          float values[kCount];
          read(r, s, values);
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const int chain = (s * kCount + i) % kChains;
            const float difference = values[i] - reference;
            const float delta = has(s, i) ? difference : 0.f;
            sums[chain] = fma(delta, Moments::kShare, sums[chain]);
            squares[chain] = fma(delta, delta, squares[chain]);
          }
        }
        threads[r].sum = sums[0] + sums[1];
        threads[r].squares = squares[0] + squares[1];
      }
      merge_threads<kLanes>(others, threads, static_cast<float>(cols), inverse_cols);
    };
    if constexpr (kSums) {
      ThreadSums<float> threads[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float sums[kChains] = {}, squares[kChains] = {};
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          float values[kCount];  // zero if they do not exist
          read(r, s, values);
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const int chain = (s * kCount + i) % kChains;
            sums[chain] += values[i];
            squares[chain] = fma(values[i], values[i], squares[chain]);
          }
        }
        threads[r] = {sums[0] + sums[1], squares[0] + squares[1]};
      }
      merge_sums<kLanes>(sets, threads, inverse_cols, by_differences);
    } else {
      by_differences(sets);
    }
  }

  // Puts y of row r from place(r) on. Weight and bias are read once for all rows; as pairs where
  // both are there and aligned. `first_column`: of the row, where the warp's begin.
  template <class W, class Place>
  __device__ __forceinline__ void put(const SetMoments<float> (&sets)[kRows],
                                      const float (&rstd)[kRows], const W* weight, const W* bias,
                                      int first_column, const Place& place) const {
    const W* const lane_weight = weight + first_column + column_;
    const W* const lane_bias = bias + first_column + column_;
    const auto put_by = [&](const auto& parameter) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        float weights[kCount], biases[kCount];
        parameter(weight != nullptr, lane_weight, s, 1.f, weights);
        parameter(bias != nullptr, lane_bias, s, 0.f, biases);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float values[kCount];
          read(r, s, values);
          const auto y = [&](int i) {
            const float xhat = (values[i] - sets[r].mean) * rstd[r];
            return fma(xhat, weights[i], biases[i]);
          };
          X* const target = place(r) + column_ + s * kStep;
          Pack<X, 2> pair;
          pair.set_pair(0, y(0), y(kCount - 1));
          if constexpr (kPairing != Pairing::kNone) {
            if (is_paired(r, s)) {
              if (has(s, 0)) store_pack(target, pair);
              continue;
            }
          }
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            if (has(s, i)) target[i] = pair.element(i);
          }
        }
      }
    };
    const auto single = [&](bool present, const W* mine, int s, float absent,
                            float (&values)[kCount]) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values[i] = absent;
        if (present && has(s, i)) values[i] = widen(mine[s * kStep + i]);
      }
    };
    constexpr uintptr_t kAccess = kCount * sizeof(W);
    const bool aligned =
        (reinterpret_cast<uintptr_t>(weight) | reinterpret_cast<uintptr_t>(bias)) % kAccess == 0;
    if (weight != nullptr && bias != nullptr && aligned) {
      put_by([&](bool, const W* mine, int s, float absent, float (&values)[kCount]) {
        if (kCount == 1 || !has_whole(s)) return single(true, mine, s, absent, values);
        const auto pair = *reinterpret_cast<const Pack<W, 2>*>(mine + s * kStep);
#pragma unroll
        for (int i = 0; i < kCount; ++i) values[i] = pair.template get<float>(i);
      });
    } else {
      put_by(single);
    }
  }

 private:
  float values_[kRows][kSteps][kCount];  // if kHeld, and else
  unsigned rows_[kRows];                 // where this lane's columns begin
  const int column_;                     // this lane's first
  const int left_;                       // columns from there on

  // This lane's columns of step s of row r; zeros where there are none.
  __device__ __forceinline__ void read(int r, int s, float (&values)[kCount]) const {
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = values_[r][s][i];
    } else {
      constexpr int kSize = static_cast<int>(sizeof(X));
      const unsigned mine = rows_[r] + s * kStep * kSize;
      if constexpr (kPairing != Pairing::kNone) {
        if (is_paired(r, s)) {
          Pack<X, 2> pair = {};
          if (has(s, 0)) pair = load_pair<X>(mine);
#pragma unroll
          for (int i = 0; i < kCount; ++i) values[i] = pair.template get<float>(i);
          return;
        }
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values[i] = 0;
        if (has(s, i)) values[i] = load_element<X>(mine + i * kSize);
      }
    }
  }

  static __device__ __forceinline__ bool is_paired(int r, int s) {
    return kPairing == Pairing::kAll || (r % 2 == 0 && has_whole(s));
  }

  static __device__ __forceinline__ bool has_whole(int s) { return s < kWhole; }

  __device__ __forceinline__ bool has(int s, int i) const {
    return has_whole(s) || s * kStep + i < left_;
  }
};

// Rows that the warps of a block hold together.
template <class X, class W, int kRows>
struct ElementRuns {
  static constexpr int kMaxWarps = kMaxThreadsPerRow / kWarpSize;
  using Storage = SetMoments<float>[kRows][kMaxWarps];
  const ForwardParameters<X, X, W>& p;

  // The column where the run of warp w begins.
  __device__ __forceinline__ int begin_of(int w) const { return begin_of_warp_run(p, w); }

  // The moments of rows, from those of this warp's run on, and what follows from them. Writes mean
  // and rstd. All warps meet.
  __device__ __forceinline__ void merge(SetMoments<float> (&sets)[kRows], float (&rstd)[kRows],
                                        Storage& storage, int64_t first_row) const {
    const int lane = threadIdx.x % kWarpSize;
    const int warps = blockDim.x / kWarpSize;
    if (lane == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) storage[r][threadIdx.x / kWarpSize] = sets[r];
    }
    __syncthreads();
    // Each half of the warp merges all sets.
    const int set = lane % kMaxWarps;
    const float count = set < warps ? static_cast<float>(begin_of(set + 1) - begin_of(set)) : 0.f;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sets[r] = merge_lanes<kMaxWarps>(set < warps ? storage[r][set] : SetMoments<float>(), count,
                                       static_cast<float>(p.cols), p.inverse_cols);
      rstd[r] = rstd_of(sets[r], p.inverse_cols, p.eps);
      if (threadIdx.x == 0 && first_row + r < p.rows) {
        put_statistics(p, first_row + r, sets[r].mean, rstd[r]);
      }
    }
  }
};

}  // namespace fastnorm::cuda
