// The forward of many rows of whole chunks, of a warp or less, that leave lanes idle and lie one
// behind the other: as they lie in memory. x of a block comes by one bulk copy, and y takes its
// place and leaves by another.
#pragma once

#include "forward_start.cuh"
#include "row_tile.cuh"
#include "tile.cuh"

namespace fastnorm::cuda {

template <class X, int kLanes, int kChunks>
constexpr int kBulkLaneRows = bulk_rows_of_lane(kLanes, kChunks, static_cast<int>(sizeof(X)));

// Lanes have the chunks that they have in forward_short_rows, and add up in its order; they read
// them from shared memory once for the moments and once more for y. Where a lane that is idle asks
// for nothing, a warp has so much less under way, and rows of an odd number of chunks begin within
// a sector every other time; a copy of many rows knows of neither. Of a copy on an H200, 134 MB, by
// forward_short_rows and so: bfloat16 72 columns .945 and .98, 88 .925 and .96, 136 .97 and 1.00,
// 168 .95 and .99, 200 .96 and .99, 264 .935 and 1.00, 280 .945 and 1.01, 328 .95 and 1.00, 344 .96
// and 1.00, 392 .95 and .99, 408 .965 and .985, 520 .98 and .995; beside float32 parameters 72 .89
// and .97, 104 .845 and .97, 120 .905 and 1.00, 136 .87 and .98, 264 .92 and .97, 328 .955 and .99;
// float32 36 .96 and 1.01, 132 .925 and .995, 156 .925 and .995, 300 .98 and .995. But where all
// lanes have chunks they are as well off without: 64 .95 and .93, 128 .975 and .95, 256 .97 and
// .96, 512 .98 and .96, 768 1.02 and 1.01, 1024 .985 and .96.
template <class X, class W, int kLanes, int kChunks>
__global__ void __launch_bounds__(kBulkRowThreads, kStreams ? kBulkRowBlocks : 1)
    forward_bulk_rows(const ForwardParameters<X, X, W> p) {
  if (!kStreams) return;
  using A = Accumulator<X>;
  constexpr int kSize = static_cast<int>(sizeof(X));
  constexpr int kColumns = kChunkColumns<X>;
  constexpr int kRows = kBulkLaneRows<X, kLanes, kChunks>;
  constexpr int kTeams = kWarpSize / kLanes;  // rows side by side in a warp
  constexpr int kWarps = kBulkRowThreads / kWarpSize;
  constexpr int kStep = kWarps * kTeams;  // rows from one of a lane to its next
  extern __shared__ __align__(kSectorBytes) unsigned char bulk_rows[];
  __shared__ uint64_t barrier_storage;
  X* const staged = reinterpret_cast<X*>(bulk_rows);
  const unsigned barrier = shared_address(&barrier_storage);
  const int thread = static_cast<int>(threadIdx.x);
  const int cols = static_cast<int>(p.cols);
  start_bulk_block(p, barrier);
  const auto bytes_from = [&](int64_t row) {
    return static_cast<int>(min(p.rows - row, int64_t{kStep * kRows})) * cols * kSize;
  };
  if (thread == 0) {
    const int64_t row = first_row_of_block<kStep * kRows>();
    arrive_and_expect(barrier, bytes_from(row));
    copy_bulk(shared_address(staged), p.x + row * cols, bytes_from(row), barrier);
  }

  // The first of this lane's rows in the block. Eight lanes read at a time; if those are of more
  // than one team, their rows are as far apart as puts them into different banks.
  const int warp = thread / kWarpSize;
  const int team = thread % kWarpSize / kLanes, lane = thread % kWarpSize % kLanes;
  const bool idle = kTeams * kLanes < kWarpSize && team == kTeams;  // a lane that is left over
  const int chunks = cols / kColumns;
  const int apart = kLanes < 8 ? min(kWarps, max(1, kLanes / (chunks & -chunks))) : 1;
  const int own = idle ? 0 : warp / apart * apart * kTeams + team * apart + warp % apart;
  const Share<X, true> share{idle ? cols : lane, kLanes, cols};
  X* const mine = staged + own * cols;
  const auto place = [&](int r, int k) { return mine + r * kStep * cols + share.column(k); };
  const auto read = [&](int r, int k) {
    Pack<X, kColumns> chunk = {};
    if (share.left(k) > 0) chunk = *reinterpret_cast<const Pack<X, kColumns>*>(place(r, k));
    return chunk;
  };
  __syncthreads();
  wait_barrier<false>(barrier, 0);

  // (Rows that do not exist are whatever is in shared memory.)
  const auto add_up = [&](auto& threads) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        threads[r].add_chunk(k, read(r, k), share.left(k) > 0);
      }
    }
  };
  const auto by_differences = [&](SetMoments<A>(&rows)[kRows]) {
    ChunkMoments<A, kChunks, kColumns> threads[kRows];
    add_up(threads);
    merge_threads<kLanes>(rows, threads, static_cast<A>(cols), p.inverse_cols);
  };
  SetMoments<A> moments[kRows];
  if constexpr (kSumsFirst<kColumns, kLanes, kChunks>) {
    ThreadSums<A> threads[kRows];
    add_up(threads);
    merge_sums<kLanes>(moments, threads, p.inverse_cols, by_differences);
  } else {
    by_differences(moments);
  }
  Standardizer<A> standardizers[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first_row_of_block<kStep * kRows>() + own + r * kStep;
    const A rstd = rstd_of(moments[r], p.inverse_cols, p.eps);
    standardizers[r] = {rstd, moments[r].mean};
    if (lane == 0 && !idle && row < p.rows) put_statistics(p, row, moments[r].mean, rstd);
  }
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (share.left(k) <= 0) continue;
    const int column = share.column(k);
    const auto weight = load_wide<W, kColumns>(p.weight + column, p.weight != nullptr, 1);
    const auto bias = load_wide<W, kColumns>(p.bias + column, p.bias != nullptr, 0);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      store_pack(place(r, k), normalize<X>(read(r, k), standardizers[r], weight, bias));
    }
  }
  publish_to_copies();
  __syncthreads();
  if (thread == 0) {
    const int64_t row = first_row_of_block<kStep * kRows>();
    store_bulk(p.y + row * cols, shared_address(staged), bytes_from(row));
    wait_bulk_reads();
  }
}

// `shape` as in shape_of (forward.cuh).
template <class X, class W, class LaunchRows>
cudaError_t launch_bulk_rows(int shape, const LaunchRows& launch_rows) {
  switch (shape) {
    case 43:
      return launch_rows(forward_bulk_rows<X, W, 4, 3>);
    case 45:
      return launch_rows(forward_bulk_rows<X, W, 4, 5>);
    case 83:
      return launch_rows(forward_bulk_rows<X, W, 8, 3>);
    case 84:
      return launch_rows(forward_bulk_rows<X, W, 8, 4>);
    case 85:
      return launch_rows(forward_bulk_rows<X, W, 8, 5>);
    case 163:
      return launch_rows(forward_bulk_rows<X, W, 16, 3>);
    case 164:
      return launch_rows(forward_bulk_rows<X, W, 16, 4>);
    case 165:
      return launch_rows(forward_bulk_rows<X, W, 16, 5>);
    case 323:
      return launch_rows(forward_bulk_rows<X, W, 32, 3>);
  }
  if constexpr (kIs16Bit<X>) {
    if (shape == 25) return launch_rows(forward_bulk_rows<X, W, 2, 5>);
    if constexpr (std::is_same_v<X, W>) {
      if (shape == 105) return launch_rows(forward_bulk_rows<X, W, 10, 5>);
    } else {
      if (shape == 44) return launch_rows(forward_bulk_rows<X, W, 4, 4>);
    }
  }
  return cudaErrorInvalidValue;
}

}  // namespace fastnorm::cuda
