// The forward of many 16-bit rows that end within a chunk and lie one behind the other: as they lie
// in memory. x of a block comes by one bulk copy, and y takes its place and leaves by another.
#pragma once

#include "element_tile.cuh"

namespace fastnorm::cuda {

// Rows of a block, from the sector on in which they begin: as far behind a whole one of shared
// memory.
template <class X>
struct BulkElements {
  static constexpr int kSize = static_cast<int>(sizeof(X));
  static constexpr int kGranule = kChunkBytes / kSize;
  int64_t origin;  // the sector, in the tensor
  int begin, end;  // from there on
  bool last;       // of the tensor

  template <class Parameters>
  __device__ __forceinline__ BulkElements(const Parameters& p, int64_t row, int rows,
                                          bool whole_sectors) {
    const int64_t at = row * p.cols;
    begin = whole_sectors ? 0 : static_cast<int>(at % (kSectorBytes / kSize));
    origin = at - begin;
    last = p.rows - row <= rows;
    end = begin + static_cast<int>(min(p.rows - row, int64_t{rows})) * static_cast<int>(p.cols);
  }

  // The granules in which they lie; elements after the last whole one of the tensor one by one.
  __device__ __forceinline__ void copy_in(X* stage, const X* tensor, unsigned barrier) const {
    const int thread = static_cast<int>(threadIdx.x);
    const X* const x = tensor + origin;
    const int from = round_down<kGranule>(begin);
    const int to = last ? round_down<kGranule>(end) : round_up<kGranule>(end);
    if (thread == 0) {
      arrive_and_expect(barrier, (to - from) * kSize);
      copy_bulk(shared_address(stage + from), x + from, (to - from) * kSize, barrier);
    }
    if (to + thread < end) stage[to + thread] = x[to + thread];
  }

  // Whole granules, and what is before and behind them one by one.
  __device__ __forceinline__ void copy_out(X* tensor, const X* stage) const {
    const int thread = static_cast<int>(threadIdx.x);
    X* const y = tensor + origin;
    const int from = round_up<kGranule>(begin), to = round_down<kGranule>(end);
    if (thread == 0) store_bulk(y + from, shared_address(stage + from), (to - from) * kSize);
    if (begin + thread < from) y[begin + thread] = stage[begin + thread];
    if (to + thread < end) y[to + thread] = stage[to + thread];
    if (thread == 0) wait_bulk_reads();
  }
};

// Blocks that a multiprocessor holds at least: 48 warps of 40 registers, in which no kernel spills.
constexpr int kBulkBlocks = kStreams ? 48 * kWarpSize / kElementRowThreads : 1;
constexpr int kBulkLongBlocks = kStreams ? 48 / kMaxBulkWarps : 1;

// Rows of a warp and less. Lanes read x from shared memory once for the moments and once more for
// y. Of a copy on an H200, 134 MB of bfloat16, not in bulk, held in 48 to 80 registers between the
// two, and so: 97 columns -, .79, .88; 126 .91, .96, .98; 129 .78, .83, .95; 191 .80, .83, .98; 225
// .70, .845, .96; 257 .866, .95, .96; 333 .83, .86, .98; 750 -, .88, .98; but 67 .685, .765, .74,
// 250 .88, .985, .965; 500 .88, .99, .97; 511 .83, .97, .95. (Of float32, whose columns are single
// ones in any case, not in bulk and held: 131 .98 and .98, 257 .96 and .97.) Odd rows of a warp
// begin within a sector every other time; from a whole granule and, as here, from the same place in
// a sector on 513 .935 and .96, 601 .95 and .985, 801 .95 and .99, 901 .93 and .98.
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
  __shared__ alignas(kSectorBytes)
      X sectors[kBlockRows * kSteps * Tile::kStep + kSectorBytes / kSize];
  __shared__ uint64_t barrier_storage;
  const unsigned barrier = shared_address(&barrier_storage);
  const int thread = static_cast<int>(threadIdx.x);
  start_bulk_block(p, barrier);

  const int cols = static_cast<int>(p.cols);
  // Teams of fewer lanes have so many rows in a block that these begin at whole sectors.
  const auto part = [&] {
    return BulkElements<X>(p, first_row_of_block<kBlockRows>(), kBlockRows, kTeams > 1);
  };
  part().copy_in(sectors, p.x, barrier);
  send_for_late_parameters(p);
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
  X* const staged = sectors + part().begin + own * cols;
  Tile tile(cols);
#pragma unroll
  for (int r = 0; r < kRows; ++r) tile.leave(r, shared_address(staged + r * cols));
  SetMoments<float> sets[kRows];
  float rstd[kRows];
  tile.moments(sets, cols, p.inverse_cols);
  const int64_t row = first_row_of_block<kBlockRows>() + own;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rstd[r] = rstd_of(sets[r], p.inverse_cols, p.eps);
    if (thread % kLanes == 0 && row + r < p.rows) put_statistics(p, row + r, sets[r].mean, rstd[r]);
  }
  // Each lane in the place of what it has read. (There is room for rows that do not exist.)
  tile.put(sets, rstd, p.weight, p.bias, 0, [&](int r) { return staged + r * cols; });
  publish_to_copies();
  __syncthreads();

  part().copy_out(p.y, sectors);
}

// Likewise two rows that the warps of a block hold together. Of a copy, as above, in chunks or
// pairs of columns and so: 1101 .90 and .94, 1317 .89 and .985, 1502 .875 and .99, 2305 .845 and
// .985, 3301 .885 and .995, 5001 .96 and .98.
template <class X, class W, int kSteps, int kRows, Pairing kPairing>
__global__ void __launch_bounds__(kMaxBulkWarps* kWarpSize, kBulkLongBlocks)
    forward_bulk_long_elements(const ForwardParameters<X, X, W> p) {
  if (!kStreams) return;
  constexpr int kWhole = kSteps - 4 / kSideBySide<X>;
  using Tile = ElementTile<X, kWarpSize, kSteps, kWhole, kRows, kPairing, false>;
  using Runs = ElementRuns<X, W, kRows>;
  extern __shared__ __align__(kSectorBytes) unsigned char bulk_sectors[];
  __shared__ typename Runs::Storage warp_moments;
  __shared__ uint64_t barrier_storage;
  X* const sectors = reinterpret_cast<X*>(bulk_sectors);
  const unsigned barrier = shared_address(&barrier_storage);
  const int thread = static_cast<int>(threadIdx.x);
  start_bulk_block(p, barrier);
  const auto part = [&] { return BulkElements<X>(p, first_row_of_block<kRows>(), kRows, false); };
  part().copy_in(sectors, p.x, barrier);
  send_for_late_parameters(p);
  __syncthreads();
  wait_barrier<false>(barrier, 0);

  const Runs runs{p};
  const int warp = thread / kWarpSize;
  const int begin = runs.begin_of(warp), cols = runs.begin_of(warp + 1) - begin;
  X* const staged = sectors + part().begin + begin;
  Tile tile(cols);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    tile.leave(r, shared_address(staged + r * static_cast<int>(p.cols)));
  }
  SetMoments<float> sets[kRows];
  float rstd[kRows];
  tile.moments(sets, cols, quotient(1.f, static_cast<float>(cols)));
  runs.merge(sets, rstd, warp_moments, first_row_of_block<kRows>());
  tile.put(sets, rstd, p.weight, p.bias, begin,
           [&](int r) { return staged + r * static_cast<int>(p.cols); });
  publish_to_copies();
  __syncthreads();
  part().copy_out(p.y, sectors);
}

}  // namespace fastnorm::cuda
