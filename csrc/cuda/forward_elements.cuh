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
        float sums[2] = {}, squares[2] = {};  // two chains each
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          float values[kCount];
          read(r, s, values);
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const int chain = (s * kCount + i) % 2;
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
        float sums[2] = {}, squares[2] = {};  // two chains each
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          float values[kCount];  // zero if they do not exist
          read(r, s, values);
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const int chain = (s * kCount + i) % 2;
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

// Blocks of forward_bulk_elements that a multiprocessor holds at least, of 40 registers, in which
// none of them spills.
constexpr int kBulkBlocks = kStreams ? 48 * kWarpSize / kElementRowThreads : 1;

// The same of 16-bit rows that lie one behind the other, as they lie in memory: x of a block comes
// by one bulk copy, and y takes its place and leaves by another. Lanes read x from shared memory
// once for the moments and once more for y. Of a copy on an H200, 134 MB of bfloat16, as above,
// held in 48 to 80 registers between the two, and so: 97 columns -, .79, .88; 126 .91, .96, .98;
// 129 .78, .83, .95; 191 .80, .83, .98; 225 .70, .845, .96; 257 .866, .95, .96; 333 .83, .86, .98;
// 750 -, .88, .98; but 67 .685, .765, .74, 250 .88, .985, .965; 500 .88, .99, .97; 511 .83, .97,
// .95. (Of float32, whose columns are single ones in any case, as above and held: 131 .98 and .98,
// 257 .96 and .97.)
template <class X, class W, int kLanes, int kSteps, int kRows, Pairing kPairing>
__global__ void __launch_bounds__(kElementRowThreads, kBulkBlocks)
    forward_bulk_elements(const ForwardParameters<X, X, W> p) {
  if (!kStreams) return;
  constexpr int kWhole = kSteps - 4 / kSideBySide<X>;
  using Tile = ElementTile<X, kLanes, kSteps, kWhole, kRows, kPairing, false>;
  constexpr int kWarps = kElementRowThreads / kWarpSize;
  constexpr int kTeams = kWarpSize / kLanes;
  constexpr int kBlockRows = kWarps * kTeams * kRows;
  constexpr int kSize = static_cast<int>(sizeof(X));
  constexpr int kElements = kChunkBytes / kSize;
  __shared__ alignas(kChunkBytes) X stage[kBlockRows * kSteps * Tile::kStep];
  __shared__ uint64_t barrier_storage;
  const unsigned barrier = shared_address(&barrier_storage);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    init_barrier(barrier, 1);
    publish_barriers();
  }
  __syncwarp();  // racecheck takes the lanes of the warp for one another here
  start_block(p);

  // The block's first row, each time anew, or what follows from it would stay in registers.
  const auto find_first_row = [] {
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return int64_t{block} * kBlockRows;
  };
  const int cols = static_cast<int>(p.cols);
  const auto elements_from = [&](int64_t row) {
    return static_cast<int>(min(p.rows - row, int64_t{kBlockRows})) * cols;
  };
  // Elements after the last whole granule, of the last block, go one by one.
  const auto copy_in = [&](int64_t row) {
    const int end = elements_from(row), whole = end / kElements * kElements;
    const X* const x = p.x + row * p.cols;
    if (thread == 0) {
      arrive_and_expect(barrier, whole * kSize);
      copy_bulk(shared_address(stage), x, whole * kSize, barrier);
    }
    if (whole + thread < end) stage[whole + thread] = x[whole + thread];
  };
  copy_in(find_first_row());
  __syncthreads();
  wait_barrier<false>(barrier, 0);

  // The first of this lane's rows in the block. Teams of a warp read side by side, so their rows
  // are as far apart as puts them into different banks of shared memory. Where so many warps cannot
  // do that, four teams come close to it as far apart as they can be: of a copy on an H200, from
  // banks that follow from neighbouring rows and so, 129 columns of bfloat16 .67 and .95, 191 .70
  // and .98, 225 .68 and .96. Two do not (257 .94 for .96).
  int apart = kLanes / (cols & -cols);
  if (kWarps % apart != 0) apart = kTeams > 2 ? kWarps : 1;
  const int warp = thread / kWarpSize, team = thread % kWarpSize / kLanes;
  const int own = (warp / apart * apart * kTeams + team * apart + warp % apart) * kRows;
  X* const staged = stage + own * cols;
  Tile tile(cols);
#pragma unroll
  for (int r = 0; r < kRows; ++r) tile.leave(r, shared_address(staged + r * cols));
  SetMoments<float> sets[kRows];
  float rstd[kRows];
  tile.moments(sets, cols, p.inverse_cols);
  const int64_t row = find_first_row() + own;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rstd[r] = rstd_of(sets[r], p.inverse_cols, p.eps);
    if (thread % kLanes == 0 && row + r < p.rows) {
      p.mean[row + r] = sets[r].mean;
      p.rstd[row + r] = rstd[r];
    }
  }
  // Each lane in the place of what it has read. (There is room for rows that do not exist.)
  tile.put(sets, rstd, p.weight, p.bias, 0, [&](int r) { return staged + r * cols; });
  publish_to_copies();
  __syncthreads();

  const auto copy_out = [&](int64_t row) {
    const int end = elements_from(row), whole = end / kElements * kElements;
    X* const y = p.y + row * p.cols;
    if (thread == 0) store_bulk(y, shared_address(stage), whole * kSize);
    if (whole + thread < end) y[whole + thread] = stage[whole + thread];
  };
  copy_out(find_first_row());
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
          return launch_in_turns(
              forward_bulk_elements<X, W, kLanes, kSteps, kElementRows, kPairing>,
              dim3(kElementRowThreads), p, plan, stream);
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
