// The forward of wide 16-bit rows that end within a chunk, a row in a block: x comes by one bulk
// copy, wherever the row begins, and y leaves by another. Lanes have pairs of columns.
#pragma once

#include "element_tile.cuh"
#include "wide_row.cuh"

namespace fastnorm::cuda {

// Few warps, with many columns in each lane, and many blocks. Of a copy on an H200, 134 MB of
// bfloat16, in chunks and so, by as many warps as in brackets: 6002 columns .97 and .985 (4), .975
// (5), .93 (6); 8191 .93 and .99 (5), .98 (6); 10001 .905 and .97 (6), .965 (8); 12289 .92 and .965
// (8), .90 (10); 16385 .90 and .945 (11), .83 (16); 20001 .84 and .96 (11), .95 (12), .90 (16).
// With one less than the first of each, or two, all blocks leave the L1 cache too little room for
// weight and bias (see wide_warps): 8191 .87, 10001 .945, 12289 .84 (6), 16385 .84 (9), 20001 .925
// (10). Rows of clusters of two to eight such blocks are slow: 16385 .68, 32767 .65, 50257 .65,
// 65537 .63.
template <class X, class W, int kSteps>
__global__ void __launch_bounds__(kMaxThreadsPerRow, kStreams ? 3 : 1)
    forward_wide_elements(const ForwardParameters<X, X, W> p) {
  if (!kStreams) return;
  constexpr int kWhole = kSteps - 4 / kSideBySide<X>;
  using Runs = ElementRuns<X, W, 1>;
  extern __shared__ __align__(kSectorBytes) unsigned char wide_sectors[];
  __shared__ typename Runs::Storage warp_moments;
  __shared__ uint64_t barrier_storage;
  X* const stage = reinterpret_cast<X*>(wide_sectors) + kSectorBytes / WideRow<X>::kSize;
  const unsigned barrier = shared_address(&barrier_storage);
  start_bulk_block(p, barrier);
  const int cols = static_cast<int>(p.cols), thread = static_cast<int>(threadIdx.x);
  // Each time anew, or what follows from them would stay in registers.
  const auto find_x = [&] {
    return WideRow<const X>(p.x + first_row_of_block<1>() * p.x_row_stride, cols);
  };
  const auto find_y = [&] { return WideRow<X>(p.y + first_row_of_block<1>() * p.cols, cols); };
  // y takes the place of x, or so many elements before it that it lies in granules as in memory.
  const auto find_shift = [&] {
    return (find_x().begin - find_y().begin) & (WideRow<X>::kGranule - 1);
  };
  const auto find_stage_of_y = [&] {
    return stage + find_x().begin - find_shift() - find_y().begin;
  };
  {
    // Rows that do not lie one behind the other end in memory that may not be the tensor's.
    const auto x = find_x();
    const bool dense = p.x_row_stride == p.cols;
    const Granules all =
        x.granules(dense ? p.x : x.sector + x.begin, dense ? p.x_end : x.sector + x.end);
    if (thread == 0) {
      arrive_and_expect(barrier, (all.to - all.from) * x.kSize);
      x.copy_in(stage, all, barrier);
    }
    x.copy_ends(stage, x.sector, all, thread);
  }
  __syncthreads();
  wait_barrier<false>(barrier, 0);

  const Runs runs{p};
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const auto standardize = [&](auto pairing, auto shifts) {
    const int begin = runs.begin_of(warp), mine = runs.begin_of(warp + 1) - begin;
    ElementTile<X, kWarpSize, kSteps, kWhole, 1, decltype(pairing)::value, false> tile(mine);
    tile.leave(0, shared_address(stage + find_x().begin + begin));
    SetMoments<float> sets[1];
    float rstd[1];
    tile.moments(sets, mine, quotient(1.f, static_cast<float>(mine)));
    runs.merge(sets, rstd, warp_moments, first_row_of_block<1>());
    X* const y = find_stage_of_y() + find_y().begin + begin;
    if constexpr (decltype(shifts)::value) {
      const auto first = tile.put_before(sets, rstd, p.weight, p.bias, begin, y, find_shift());
      __syncthreads();
      tile.put_kept(y, first, find_shift());
    } else {
      tile.put(sets, rstd, p.weight, p.bias, begin, [&](int) { return y; });
    }
  };
  constexpr std::integral_constant<Pairing, Pairing::kAlternate> kPairs;
  constexpr std::integral_constant<Pairing, Pairing::kNone> kSingle;
  if (find_shift() != 0) {
    standardize(kSingle, std::true_type());
  } else if (find_x().begin % 2 == 0) {
    standardize(kPairs, std::false_type());
  } else {
    standardize(kSingle, std::false_type());
  }
  publish_to_copies();
  __syncthreads();
  const auto y = find_y();
  const X* const staged = find_stage_of_y();
  const Granules whole = y.granules();
  if (thread == 0) y.copy_out(staged, whole);
  y.copy_ends(y.sector, staged, whole, thread);
  if (thread == 0) wait_bulk_reads();
}

template <class X, class W>
cudaError_t launch_wide_elements(ForwardParameters<X, X, W> p, const ForwardPlan& plan,
                                 cudaStream_t stream) {
  share_out_runs(p, plan.threads_per_row / kWarpSize);
  const auto launch = [&](auto steps) {
    const auto kernel = forward_wide_elements<X, W, decltype(steps)::value>;
    static std::atomic<uint64_t> prepared{0};  // a bit per device
    const cudaError_t error = allow_blocks(reinterpret_cast<const void*>(kernel),
                                           wide_row_bytes(kMostWideColumns), false, prepared);
    if (error != cudaSuccess) return error;
    return launch_in_turns(kernel, dim3(plan.threads_per_row), p, plan, stream);
  };
  constexpr bool kOneDtype = std::is_same_v<X, W>;
  return visit_number<kOneDtype ? 24 : 18, kOneDtype ? kMostWideSteps : 28, 2>(
      plan.columns_per_thread / 2, launch);
}

}  // namespace fastnorm::cuda
