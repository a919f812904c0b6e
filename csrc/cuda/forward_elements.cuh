// The forward of rows that end within a chunk, column by column: wherever such rows begin, no chunk
// of theirs need be shifted into place. y passes through shared memory and leaves it in whole
// granules.
//
// A lane has neighbouring pairs of columns of a 16-bit row, or single ones of float32, kLanes of
// them apart; where pairs lie in whole words of memory they move as such. Short rows have few
// lanes, for sums over lanes take their time: as many that each has at most kMostElementColumns
// columns. Longer rows are shared out evenly among warps.
#pragma once

#include "forward_start.cuh"
#include "forward_tiny.cuh"
#include "moments.cuh"
#include "stage.cuh"

namespace fastnorm::cuda {

// Of which rows the pairs of columns lie in whole words: of all, as where rows have an even number
// of columns, of every other one from the first on, where it is odd, or of none that is known. Of a
// copy on an H200, 134 MB of bfloat16, single columns and so: 82 .69 and .82, 130 .67 and .91, 250
// .78 and .96, 500 .845 and .975, 750 .89 and .98; odd 129 .66 and .785, 449 .835 and .905, 901
// .855 and .915.
enum class Pairing { kNone, kAll, kAlternate };

// kRows rows of kLanes lanes, in kSteps steps each, of which kWhole certainly exist in every lane.
template <class X, int kLanes, int kSteps, int kWhole, int kRows, Pairing kPairing>
class ElementTile {
 public:
  static constexpr int kCount = kSideBySide<X>;
  static constexpr int kStep = kLanes * kCount;
  // Whether rows are summed as they are first (see moments.cuh). With more columns in a lane that
  // takes up to 128 registers: on 92 multiprocessors of an H100 66 columns of bfloat16 .715 -> .775
  // of a copy, 257 .845 -> .875, 602 .98 -> 1.00, but 511 .915 -> .91, 769 of float16 .91 -> .89.
  static constexpr bool kSums = kIs16Bit<X> && kSteps <= 12;

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

  // The same from shared memory, where the row is at `row`.
  __device__ __forceinline__ void load_shared(int r, unsigned row) {
    constexpr int kSize = static_cast<int>(sizeof(X));
    const unsigned mine = row + column_ * kSize;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if constexpr (kPairing != Pairing::kNone) {
        if (is_paired(r, s)) {
          Pack<X, 2> pair = {};
          if (has(s, 0)) pair = load_pair<X>(mine + s * kStep * kSize);
#pragma unroll
          for (int i = 0; i < kCount; ++i) values_[r][s][i] = pair.template get<float>(i);
          continue;
        }
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values_[r][s][i] = 0;
        if (has(s, i)) values_[r][s][i] = load_element<X>(mine + (s * kStep + i) * kSize);
      }
    }
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
        for (int i = 0; i < kFirst; ++i) first[i] = values_[r][i / kCount][i % kCount];
        const float reference = reference_point(tree_mean(first));
        threads[r] = {reference, 0, 0, count};
        float sums[2] = {}, squares[2] = {};  // two chains each
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const int chain = (s * kCount + i) % 2;
            const float difference = values_[r][s][i] - reference;
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
        float sums[2] = {}, squares[2] = {};  // two chains each
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const int chain = (s * kCount + i) % 2;
            const float value = values_[r][s][i];  // zero if it does not exist
            sums[chain] += value;
            squares[chain] = fma(value, value, squares[chain]);
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
          const auto y = [&](int i) {
            const float xhat = (values_[r][s][i] - sets[r].mean) * rstd[r];
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
  float values_[kRows][kSteps][kCount];
  const int column_;  // this lane's first
  const int left_;    // columns from there on

  static __device__ __forceinline__ bool is_paired(int r, int s) {
    return kPairing == Pairing::kAll || (r % 2 == 0 && has_whole(s));
  }

  static __device__ __forceinline__ bool has_whole(int s) { return s < kWhole; }

  __device__ __forceinline__ bool has(int s, int i) const {
    return has_whole(s) || s * kStep + i < left_;
  }
};

// Blocks that a multiprocessor holds at least: eight, of 64 registers, where they do. 257 columns
// of bfloat16 .851 of a copy on an H200 in 71 of them, .868 so. (Of ten steps float16 spills in 64,
// of twelve both.)
template <class X, int kSteps, Pairing kPairing>
constexpr int kElementBlocks =
    std::is_same_v<X, __nv_bfloat16> && kSteps == 10 && kPairing == Pairing::kAlternate ? 8 : 1;

template <class X, class W, int kLanes, int kSteps, int kRows, Pairing kPairing>
__global__ void __launch_bounds__(kElementRowThreads, (kElementBlocks<X, kSteps, kPairing>))
    forward_elements(const ForwardParameters<X, X, W> p) {
  // Rows are planned so that the last two pairs of columns may be missing, and no others.
  constexpr int kWhole = kSteps - 4 / kSideBySide<X>;
  using Tile = ElementTile<X, kLanes, kSteps, kWhole, kRows, kPairing>;
  constexpr int kTeams = kWarpSize / kLanes;  // rows side by side
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(X));
  constexpr int kCapacity = kTeams * kRows * kSteps * Tile::kStep;
  __shared__ alignas(16) X stages[kElementRowThreads / kWarpSize][kCapacity + kElements];

  start_block(p);
  const int warp = threadIdx.x / kWarpSize;
  const int team = threadIdx.x % kWarpSize / kLanes;
  constexpr int kWarpRows = kTeams * kRows;
  const int64_t first_row =
      (static_cast<int64_t>(blockIdx.x) * (kElementRowThreads / kWarpSize) + warp) * kWarpRows;
  if (first_row >= p.rows) return;
  const int cols = static_cast<int>(p.cols);
  const auto row_of = [&](int r) { return first_row + team * kRows + r; };

  Tile tile(cols);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // Beyond the last row, that one again, or the last that begins as this one does.
    const int64_t last = kPairing == Pairing::kAlternate ? (p.rows - 1) / 2 * 2 : p.rows - 1;
    tile.load(r, p.x + (row_of(r) < p.rows ? row_of(r) : last) * p.x_row_stride);
  }
  SetMoments<float> sets[kRows];
  float rstd[kRows];
  tile.moments(sets, cols, p.inverse_cols);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rstd[r] = rstd_of(sets[r], p.inverse_cols, p.eps);
    if (threadIdx.x % kLanes == 0 && row_of(r) < p.rows) {
      p.mean[row_of(r)] = sets[r].mean;
      p.rstd[row_of(r)] = rstd[r];
    }
  }
  X* const y = p.y + first_row * p.cols;
  X* const staged =
      stages[warp] + reinterpret_cast<uintptr_t>(y) % kChunkBytes / sizeof(X) + team * kRows * cols;
  tile.put(sets, rstd, p.weight, p.bias, 0, [&](int r) { return staged + r * cols; });
  __syncwarp();
  const int64_t rows = p.rows - first_row;
  write_staged<kCapacity>(y, stages[warp],
                          static_cast<int>(rows < kWarpRows ? rows : kWarpRows) * cols);
}

// The blocks of forward_bulk_elements, and how many of them a multiprocessor holds at least: of 48,
// 64 or 80 registers, of float16 up to 96. Of a copy on an H200, 134 MB of bfloat16, in 48, 64 and
// 80: 67 columns .726, .68, .68; 257 .66, .92, .85; 333 .57, .986, .95; 511 .485, .85, .963; 900
// .76, .98, .99. Float16 takes more registers: as others have and with four steps more, 257 .82 and
// .86, 250 .845 and .995, 333 .74 and .97, 511 .83 and .955, 89 .77 and .88.
template <class X, int kSteps, Pairing kPairing>
struct BulkBlock {
  static constexpr int kThreads = bulk_threads(2 * kSteps, kPairing == Pairing::kAll);
  static constexpr int kSize = kSteps + (std::is_same_v<X, Half> ? 4 : 0);
  static constexpr int kWarps = kSize > 16 ? 20 : kSize > 12 ? 24 : kSize > 6 ? 32 : 40;
  static constexpr int kBlocks = kWarps * kWarpSize / kThreads;
};

// The same of 16-bit rows that lie one behind the other, as they lie in memory: x of a block comes
// by one bulk copy, and y takes its place and leaves by another. Of a copy on an H200, 134 MB of
// bfloat16, as above and so: 82 columns .84 and .875, 126 .91 and .97, 250 .88 and .98, 500 .88 and
// .98, 900 .815 and .99; odd 67 .685 and .725, 129 .78 and .79, 155 .85 and .98, 191 .80 and .87,
// 257 .866 and .92, 333 .83 and .985, 449 .80 and .98, 511 .83 and .96, 901 .79 and .95. (Of
// float32, whose columns are single ones in any case: 131 .98 and .98, 257 .96 and .97.)
template <class X, class W, int kLanes, int kSteps, int kRows, Pairing kPairing>
__global__ void __launch_bounds__((BulkBlock<X, kSteps, kPairing>::kThreads),
                                  kStreams ? BulkBlock<X, kSteps, kPairing>::kBlocks : 1)
    forward_bulk_elements(const ForwardParameters<X, X, W> p) {
  if (!kStreams) return;
  using Block = BulkBlock<X, kSteps, kPairing>;
  constexpr int kWhole = kSteps - 4 / kSideBySide<X>;
  using Tile = ElementTile<X, kLanes, kSteps, kWhole, kRows, kPairing>;
  constexpr int kWarpRows = kWarpSize / kLanes * kRows;
  constexpr int kBlockRows = Block::kThreads / kWarpSize * kWarpRows;
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(X));
  constexpr int kCapacity = kBlockRows * kSteps * Tile::kStep;
  __shared__ alignas(kChunkBytes) X stage[kCapacity];
  __shared__ uint64_t barrier_storage;
  const unsigned barrier = shared_address(&barrier_storage);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    init_barrier(barrier, 1);
    publish_barriers();
  }
  __syncwarp();  // racecheck takes the lanes of the warp for one another here
  start_block(p);

  // Elements after the last whole granule, of the last block, go one by one.
  const int cols = static_cast<int>(p.cols);
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kBlockRows;
  const int rows = static_cast<int>(min(p.rows - first_row, int64_t{kBlockRows}));
  const int end = rows * cols, whole = end / kElements * kElements;
  const int whole_bytes = whole * static_cast<int>(sizeof(X));
  const X* const x = p.x + first_row * p.cols;
  if (thread == 0) {
    arrive_and_expect(barrier, whole_bytes);
    copy_bulk(shared_address(stage), x, whole_bytes, barrier);
  }
  if (whole + thread < end) stage[whole + thread] = x[whole + thread];
  __syncthreads();
  wait_barrier<false>(barrier, 0);

  const int row = thread / kLanes * kRows;  // of the block's, this lane's first
  const int lane_rows = rows - row;
  Tile tile(cols);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    tile.load_shared(r, shared_address(stage + (row + r) * cols));
  }
  SetMoments<float> sets[kRows];
  float rstd[kRows];
  tile.moments(sets, cols, p.inverse_cols);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rstd[r] = rstd_of(sets[r], p.inverse_cols, p.eps);
    if (thread % kLanes == 0 && r < lane_rows) {
      p.mean[first_row + row + r] = sets[r].mean;
      p.rstd[first_row + row + r] = rstd[r];
    }
  }
  // Each lane in the place of what it has read. (There is room for rows that do not exist.)
  X* const staged = stage + row * cols;
  tile.put(sets, rstd, p.weight, p.bias, 0, [&](int r) { return staged + r * cols; });
  publish_to_copies();
  __syncthreads();

  X* const y = p.y + first_row * p.cols;
  if (thread == 0) store_bulk(y, shared_address(stage), whole_bytes);
  if (whole + thread < end) y[whole + thread] = stage[whole + thread];
  if (thread == 0) wait_bulk_reads();
}

// Rows that the warps of a block hold together. The first warps have p.warp_steps steps of pairs of
// columns each, those from p.first_longer_warp on one more.
template <class X, class W, int kSteps, int kRows, Pairing kPairing>
__global__ void __launch_bounds__(kMaxThreadsPerRow)
    forward_long_elements(const ForwardParameters<X, X, W> p) {
  constexpr int kWhole = kSteps - 4 / kSideBySide<X>;
  using Tile = ElementTile<X, kWarpSize, kSteps, kWhole, kRows, kPairing>;
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(X));
  constexpr int kCapacity = kSteps * Tile::kStep;
  constexpr int kMaxWarps = kMaxThreadsPerRow / kWarpSize;
  extern __shared__ uint4 element_stages[];
  __shared__ SetMoments<float> warp_moments[kRows][kMaxWarps];

  start_block(p);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRows;
  const auto begin_of = [&](int w) {
    const int steps = w * p.warp_steps + max(0, w - p.first_longer_warp);
    return min(static_cast<int>(p.cols), steps * 2 * kWarpSize);
  };
  const int begin = begin_of(warp), cols = begin_of(warp + 1) - begin;

  Tile tile(cols);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // Beyond the last row, that one again.
    const int64_t row = first_row + r < p.rows ? first_row + r : p.rows - 1;
    tile.load(r, p.x + row * p.x_row_stride + begin);
  }
  SetMoments<float> sets[kRows];
  tile.moments(sets, cols, quotient(1.f, static_cast<float>(cols)));
  if (lane == 0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) warp_moments[r][warp] = sets[r];
  }
  __syncthreads();
  // Each half of the warp merges all sets.
  const int set = lane % kMaxWarps;
  const float count = set < warps ? static_cast<float>(begin_of(set + 1) - begin_of(set)) : 0.f;
  float rstd[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    sets[r] = merge_lanes<kMaxWarps>(set < warps ? warp_moments[r][set] : SetMoments<float>(),
                                     count, static_cast<float>(p.cols), p.inverse_cols);
    rstd[r] = rstd_of(sets[r], p.inverse_cols, p.eps);
    if (threadIdx.x == 0 && first_row + r < p.rows) {
      p.mean[first_row + r] = sets[r].mean;
      p.rstd[first_row + r] = rstd[r];
    }
  }
  X* const stages = reinterpret_cast<X*>(element_stages) + warp * kRows * (kCapacity + kElements);
  const auto stage_of = [&](int r) { return stages + r * (kCapacity + kElements); };
  const auto y_of = [&](int r) { return p.y + (first_row + r) * p.cols + begin; };
  X* staged[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    staged[r] = stage_of(r) + reinterpret_cast<uintptr_t>(y_of(r)) % kChunkBytes / sizeof(X);
  }
  tile.put(sets, rstd, p.weight, p.bias, begin, [&](int r) { return staged[r]; });
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first_row + r < p.rows) write_staged<kCapacity>(y_of(r), stage_of(r), cols);
  }
}

template <class X, class W, int kSteps, int kRows, Pairing kPairing>
cudaError_t launch_long_elements(ForwardParameters<X, X, W> p, const ForwardPlan& plan,
                                 cudaStream_t stream) {
  const auto kernel = forward_long_elements<X, W, kSteps, kRows, kPairing>;
  static std::atomic<uint64_t> prepared{0};  // a bit per device
  const int most_bytes = kMaxThreadsPerRow / kWarpSize *
                         element_stage_bytes(plan.columns_per_thread, kRows, sizeof(X));
  const cudaError_t error =
      allow_blocks(reinterpret_cast<const void*>(kernel), most_bytes, false, prepared);
  if (error != cudaSuccess) return error;
  constexpr int64_t kStep = 2 * kWarpSize;
  const int warps = plan.threads_per_row / kWarpSize;
  const int steps = static_cast<int>((p.cols + kStep - 1) / kStep);
  p.warp_steps = steps / warps;
  p.first_longer_warp = warps - steps % warps;
  return launch_in_turns(kernel, dim3(plan.threads_per_row), p, plan, stream);
}

// Whether any plan has `columns` of a row in each of its lanes, of a warp or of several. Half the
// lanes hold shorter rows; rows whose whole chunks fill warps are in chunks (chunks_fill_warps),
// but for some whose pairs do.
template <class X, class W>
constexpr bool holds_elements(int lanes, int columns, Pairing pairing) {
  if (lanes == kLeastElementLanes) return true;
  if (columns <= kMostElementColumns / 2) return false;
  if (std::is_same_v<X, float> && lanes == kWarpSize) return columns == 28;
  if (std::is_same_v<X, float> && lanes < kWarpSize) return columns < kMostElementColumns;
  const bool fills_warps = kIs16Bit<X> && std::is_same_v<X, W>;
  return lanes <= kWarpSize || !fills_warps ||
         (columns <= kMostPairedColumns && pairing != Pairing::kAlternate);
}

template <class X, class W>
Pairing find_pairing(const ForwardParameters<X, X, W>& p) {
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.y);
  if (!kIs16Bit<X> || addresses % 4 != 0 || (p.x_row_stride - p.cols) % 2 != 0) {
    return Pairing::kNone;
  }
  return p.cols % 2 == 0 ? Pairing::kAll : Pairing::kAlternate;
}

template <class X, class W>
cudaError_t launch_elements(const ForwardParameters<X, X, W>& p, const ForwardPlan& plan,
                            cudaStream_t stream) {
  if (plan.columns_per_thread <= kTinyColumns) return launch_tiny_rows(p, plan, stream);
  const auto launch_lanes = [&](auto lanes, auto pairs, auto pairing) {
    constexpr int kLanes = decltype(lanes)::value, kColumns = 2 * decltype(pairs)::value;
    constexpr Pairing kPairing = decltype(pairing)::value;
    if constexpr (holds_elements<X, W>(kLanes, kColumns, kPairing)) {
      constexpr int kSteps = kColumns / kSideBySide<X>;
      if constexpr (kIs16Bit<X> && kPairing != Pairing::kNone) {
        if (plan.in_bulk) {
          constexpr int kThreads = BulkBlock<X, kSteps, kPairing>::kThreads;
          return launch_in_turns(
              forward_bulk_elements<X, W, kLanes, kSteps, kElementRows, kPairing>, dim3(kThreads),
              p, plan, stream);
        }
      }
      return launch_in_turns(forward_elements<X, W, kLanes, kSteps, kElementRows, kPairing>,
                             dim3(kElementRowThreads), p, plan, stream);
    } else {
      return cudaErrorInvalidValue;
    }
  };
  const auto launch_run = [&](auto pairs, auto pairing) {
    constexpr int kColumns = 2 * decltype(pairs)::value;
    constexpr Pairing kPairing = decltype(pairing)::value;
    if constexpr (holds_elements<X, W>(kMaxThreadsPerRow, kColumns, kPairing)) {
      if (plan.threads_per_row > kWarpSize) {
        constexpr int kSteps = kColumns / kSideBySide<X>;
        return launch_long_elements<X, W, kSteps, kElementRows, kPairing>(p, plan, stream);
      }
    }
    switch (plan.threads_per_row) {
      case kLeastElementLanes:
        return launch_lanes(std::integral_constant<int, kLeastElementLanes>(), pairs, pairing);
      case 16:
        return launch_lanes(std::integral_constant<int, 16>(), pairs, pairing);
      case 32:
        return launch_lanes(std::integral_constant<int, 32>(), pairs, pairing);
    }
    return cudaErrorInvalidValue;
  };
  const auto launch_pairs = [&](auto pairs) {
    if constexpr (kIs16Bit<X>) {
      switch (find_pairing(p)) {
        case Pairing::kAll:
          return launch_run(pairs, std::integral_constant<Pairing, Pairing::kAll>());
        case Pairing::kAlternate:
          return launch_run(pairs, std::integral_constant<Pairing, Pairing::kAlternate>());
        case Pairing::kNone:
          break;
      }
    }
    return launch_run(pairs, std::integral_constant<Pairing, Pairing::kNone>());
  };
  switch (plan.columns_per_thread / 2) {
    case 6:
      return launch_pairs(std::integral_constant<int, 6>());
    case 8:
      return launch_pairs(std::integral_constant<int, 8>());
    case 10:
      return launch_pairs(std::integral_constant<int, 10>());
    case 12:
      return launch_pairs(std::integral_constant<int, 12>());
    case 14:
      return launch_pairs(std::integral_constant<int, 14>());
    case 16:
      return launch_pairs(std::integral_constant<int, 16>());
  }
  return cudaErrorInvalidValue;
}

}  // namespace fastnorm::cuda
