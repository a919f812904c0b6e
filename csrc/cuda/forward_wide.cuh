// The forward of wide rows that end within a chunk, a row in a block: x comes by one bulk
// copy, wherever the row begins, and y leaves by another. Lanes have pairs of columns, which they
// read from shared memory for the sums and once more for y.
//
// In loops, and one kernel for all widths. A kernel for each number of steps, all of them one after
// the other, has 16 KB of code to go through for its first row, which comes from memory if other
// kernels have run since: of 268 MB of bfloat16 on an H200 such took, behind copies alone and
// behind other kernels, and this one takes, behind those: 6002 columns 133.2, 138.2 and 133.5 us,
// 8191 135.1, 138.2 and 135.8, 10001 136.3, 139.3 and 137.2, 12289 135.9, 139.5 and 137.3, 16385
// 137.7, 139.9 and 138.3, 20001 139.2, 143.2 and 140.8; 2048 x 12289 34.3, 37.7 and 34.4, 256 x
// 8191 9.8, 14.2 and 10.7.
#pragma once

#include "element_tile.cuh"
#include "wide_row.cuh"

namespace fastnorm::cuda {

// The columns that a warp has of a row in shared memory: steps of a pair in each lane.
template <class X>
struct WideRun {
  static constexpr int kStep = kPairStep, kGap = kPairGap<X>;
  static constexpr auto kSize = static_cast<unsigned>(sizeof(X));
  // Chains in which a lane adds up, each of a quarter of its columns.
  static constexpr int kChains = 4;
  using Chains = float[kChains];

  int cols;    // of all lanes
  int column;  // this lane's first, in the row
  int left;    // columns from there on

  __device__ __forceinline__ WideRun(int begin, int end) : cols(end - begin) {
    column = begin + first_of_lane<X>();
    left = end - column;
  }

  // visitor(s, group, all): `group` steps from s on, kGroup of them as long as there are as many,
  // then fewer, all of which certainly exist; at last the one of which some lanes have no columns.
  template <int kGroup, class Visitor>
  __device__ __forceinline__ void visit(const Visitor& visitor) const {
    int s = 0;
    const int whole = cols / kStep;
#pragma unroll 1
    for (; s + kGroup <= whole; s += kGroup) {
      visitor(s, std::integral_constant<int, kGroup>(), std::true_type());
    }
    visit_rest<kGroup / 2>(s, whole, visitor);
  }
  template <int kGroup, class Visitor>
  __device__ __forceinline__ void visit_rest(int s, int whole, const Visitor& visitor) const {
    if constexpr (kGroup > 0) {
      if (s + kGroup <= whole) {
        visitor(s, std::integral_constant<int, kGroup>(), std::true_type());
        s += kGroup;
      }
      visit_rest<kGroup / 2>(s, whole, visitor);
    } else if (s * kStep < cols) {
      visitor(s, std::integral_constant<int, 1>(), std::false_type());
    }
  }
  template <class All>
  __device__ __forceinline__ bool has(All, int s, int j) const {
    return All::value || s * kStep + j * kGap < left;
  }

  // From where this lane's first column is; zero what does not exist. kPaired: in whole words.
  template <bool kPaired, int kGroup, class All>
  __device__ __forceinline__ void load(Pack<X, 2> (&pairs)[kGroup], unsigned mine, int s,
                                       All all) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const unsigned from = mine + (s + i) * kStep * kSize;
      if constexpr (kPaired && All::value) {
        pairs[i] = load_pair<X>(from);
      } else {
        pairs[i] = load_pair<X>(from, has(all, s + i, 0), has(all, s + i, 1));
      }
    }
  }

  // Weight or bias, `absent` where there is none. kPlain: it is there, and pairs are aligned.
  template <bool kPlain, class W, int kGroup, class All>
  __device__ __forceinline__ void load_parameters(float (&values)[kGroup][2], const W* parameters,
                                                  int s, All all, float absent) const {
    const W* const mine = parameters + column + s * kStep;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if constexpr (kIs16Bit<X> && kPlain && All::value) {
        const auto pair = *reinterpret_cast<const Pack<W, 2>*>(mine + i * kStep);
#pragma unroll
        for (int j = 0; j < 2; ++j) values[i][j] = pair.template get<float>(j);
      } else {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          values[i][j] = absent;
          if ((kPlain || parameters != nullptr) && has(all, s + i, j)) {
            values[i][j] = widen(mine[i * kStep + j * kGap]);
          }
        }
      }
    }
  }

  // visitor(chain, value, exists), of this lane's columns, group by group, and those beside them in
  // the last step.
  template <bool kPaired, int kGroup, class Visitor>
  __device__ __forceinline__ void visit_columns(unsigned mine, const Visitor& visitor) const {
    visit<kGroup>([&](int s, auto group, auto all) {
      Pack<X, 2> pairs[decltype(group)::value];
      load<kPaired>(pairs, mine, s, all);
#pragma unroll
      for (int i = 0; i < decltype(group)::value; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          visitor((2 * i + j) % kChains, pairs[i].template get<float>(j), has(all, s + i, j));
        }
      }
    });
  }

  static __device__ __forceinline__ float sum_of(const Chains& chains) {
    return (chains[0] + chains[1]) + (chains[2] + chains[3]);
  }

  // This lane's sums. (Of a copy on an H200, by eight steps and by four: bfloat16 10001 columns
  // 137.2 and 138.4 us, 20001 140.8 and 141.4, 16385 138.3 and 137.8.)
  template <bool kPaired>
  __device__ __forceinline__ ThreadSums<float> sums(unsigned mine) const {
    Chains sums = {}, squares = {};
    visit_columns<kPaired, 8>(mine, [&](int chain, float value, bool) {
      sums[chain] += value;
      squares[chain] = fma(value, value, squares[chain]);
    });
    return {sum_of(sums), sum_of(squares)};
  }

  // The moments of all lanes' columns, by differences from a point within each lane's.
  template <bool kPaired>
  __device__ __forceinline__ SetMoments<float> moments(unsigned mine) const {
    using Moments = ThreadMoments<float, 2 * kMostWideSteps>;
    constexpr int kFirst = 4;
    Pack<X, 2> firsts[kFirst / 2];
    load<kPaired>(firsts, mine, 0, std::true_type());
    float first[kFirst];
#pragma unroll
    for (int i = 0; i < kFirst; ++i) first[i] = firsts[i / 2].template get<float>(i % 2);
    const float reference = reference_point(tree_mean(first));
    Chains sums = {}, squares = {};
    visit_columns<kPaired, 4>(mine, [&](int chain, float value, bool exists) {
      const float delta = exists ? value - reference : 0.f;
      sums[chain] = fma(delta, Moments::kShare, sums[chain]);
      squares[chain] = fma(delta, delta, squares[chain]);
    });
    const int rest = left % kStep;
    const int count = left / kStep * 2 + (rest > 0 ? 1 : 0) + (rest > kGap ? 1 : 0);
    const Moments thread{reference, sum_of(sums), sum_of(squares), static_cast<float>(count)};
    const auto total = static_cast<float>(cols);
    return merge_warp(thread, total, quotient(1.f, total));
  }

  // y in the place of x, or `shift` elements before it (kShifts): what all lanes have of a group
  // they read before one of them writes, and the first columns, which fall into the place of other
  // warps, are not put but returned. kPlain: as in load_parameters. kCentred: of a row that is
  // centred; in a difference and a product 16385 columns of bfloat16 took 3 us more on an H200.
  template <bool kPaired, bool kPlain, bool kShifts, bool kCentred, class W>
  __device__ __forceinline__ Pack<X, 2> put(unsigned mine, int shift,
                                            const Standardizer<float>& standardizer,
                                            const W* weight, const W* bias) const {
    const unsigned target = mine - shift * kSize;
    Pack<X, 2> kept = {};
    visit<4>([&](int s, auto group, auto all) {
      constexpr int kGroup = decltype(group)::value;
      Pack<X, 2> pairs[kGroup];
      float weights[kGroup][2], biases[kGroup][2];
      load<kPaired>(pairs, mine, s, all);
      load_parameters<kPlain>(weights, weight, s, all, 1);
      load_parameters<kPlain>(biases, bias, s, all, 0);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const auto y = [&](int j) {
          const float xhat = standardizer.template xhat<kCentred>(pairs[i].template get<float>(j));
          return fma(xhat, weights[i][j], biases[i][j]);
        };
        pairs[i].set_pair(0, y(0), y(1));
      }
      if constexpr (kShifts) {
        __syncwarp();
        if (s == 0) kept = pairs[0];
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const unsigned to = target + (s + i) * kStep * kSize;
        if constexpr (kPaired && decltype(all)::value) {
          put_pair(to, pairs[i]);
        } else {
          const auto puts = [&](int j) {
            return has(all, s + i, j) && !(kShifts && s + i == 0 && is_kept(j, shift));
          };
          put_pair(to, pairs[i], puts(0), puts(1));
        }
      }
    });
    return kept;
  }

  // Puts what `put` returned.
  __device__ __forceinline__ void put_kept(unsigned mine, int shift, const Pack<X, 2>& kept) const {
    put_pair(mine - shift * kSize, kept, is_kept(0, shift), is_kept(1, shift));
  }

 private:
  static __device__ __forceinline__ bool is_kept(int j, int shift) {
    return first_of_lane<X>() + j * kGap < shift;
  }
};

// Few warps, with many columns in each lane, and many blocks. Of a copy on an H200, 134 MB of
// bfloat16, in chunks and so (but not yet in loops), by as many warps as in brackets: 6002 columns
// .97 and .985 (4), .975 (5), .93 (6); 8191 .93 and .99 (5), .98 (6); 10001 .905 and .97 (6), .965
// (8); 12289 .92 and .965 (8), .90 (10); 16385 .90 and .945 (11), .83 (16); 20001 .84 and .96 (11),
// .95 (12), .90 (16). With one less than the first of each, or two, all blocks leave the L1 cache
// too little room for weight and bias (see wide_warps): 8191 .87, 10001 .945, 12289 .84 (6), 16385
// .84 (9), 20001 .925 (10). Rows of clusters of two to eight such blocks are slow: 16385 .68, 32767
// .65, 50257 .65, 65537 .63.
template <class X, class W>
__global__ void __launch_bounds__(kMaxThreadsPerRow, kStreams ? 3 : 1)
    forward_wide_elements(const ForwardParameters<X, X, W> p) {
  if (!kStreams) return;
  using Run = WideRun<X>;
  using Runs = ElementRuns<X, W, 1>;
  extern __shared__ __align__(kSectorBytes) unsigned char wide_sectors[];
  __shared__ WarpSums<Runs::kMaxWarps> warp_sums;
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
  send_for_late_parameters(p);
  __syncthreads();
  wait_barrier<false>(barrier, 0);

  const int warp = warp_index();
  const auto standardize = [&](auto paired, auto plain, auto shifts) {
    constexpr bool kPaired = decltype(paired)::value, kPlain = decltype(plain)::value;
    constexpr bool kShifts = decltype(shifts)::value;
    const Run run(begin_of_warp_run(p, warp), begin_of_warp_run(p, warp + 1));
    const unsigned mine = shared_address(stage + find_x().begin + run.column);
    warp_sums.put(warp, run.template sums<kPaired>(mine));
    __syncthreads();
    SetMoments<float> row[1];
    float rstd[1];
    const int shift = kShifts ? find_shift() : 0;
    Pack<X, 2> kept;
    if (take_sums(row[0], warp_sums.merge(blockDim.x / kWarpSize), p.inverse_cols)) {
      rstd[0] = rstd_of(row[0], p.inverse_cols, p.eps);
      if (threadIdx.x == 0) {
        put_statistics(p, first_row_of_block<1>(), row[0].mean, rstd[0]);
      }
      kept = run.template put<kPaired, kPlain, kShifts, true>(
          mine, shift, {rstd[0], -row[0].mean * rstd[0]}, p.weight, p.bias);
    } else {
      row[0] = run.template moments<kPaired>(mine);
      Runs{p}.merge(row, rstd, warp_moments, first_row_of_block<1>());
      kept = run.template put<kPaired, kPlain, kShifts, false>(mine, shift, {rstd[0], row[0].mean},
                                                               p.weight, p.bias);
    }
    if constexpr (kShifts) {
      __syncthreads();
      run.put_kept(mine, shift, kept);
    }
  };
  constexpr std::true_type kYes;
  constexpr std::false_type kNo;
  if (!p.plain) {
    standardize(kNo, kNo, kYes);
  } else if (find_shift() != 0) {
    standardize(kNo, kYes, kYes);
  } else if (kIs16Bit<X> && find_x().begin % 2 == 0) {
    standardize(kYes, kYes, kNo);
  } else {
    standardize(kNo, kYes, kNo);
  }
  publish_to_copies();
  __syncthreads();
  const auto y = find_y();
  const X* const staged = stage + find_x().begin - find_shift() - y.begin;
  const Granules whole = y.granules();
  if (thread == 0) y.copy_out(staged, whole);
  y.copy_ends(y.sector, staged, whole, thread);
  if (thread == 0) wait_bulk_reads();
}

template <class X, class W>
cudaError_t launch_wide_elements(ForwardParameters<X, X, W> p, const ForwardPlan& plan,
                                 cudaStream_t stream) {
  share_out_runs(p, plan.threads_per_row / kWarpSize);
  const auto kernel = forward_wide_elements<X, W>;
  static std::atomic<uint64_t> prepared{0};  // a bit per device
  const cudaError_t error =
      allow_blocks(reinterpret_cast<const void*>(kernel),
                   wide_row_bytes(most_wide_columns(sizeof(X)), sizeof(X)), false, prepared);
  if (error != cudaSuccess) return error;
  return launch_in_turns(kernel, dim3(plan.threads_per_row), p, plan, stream);
}

}  // namespace fastnorm::cuda
