// The forward of wide rows that end within a chunk, wherever they begin. Blocks stay, or
// clusters of them, and have a row at a time, by 11 warps of each block, whose lanes have pairs of
// columns. One warp more copies rows of x into a ring of stages in shared memory, by bulk copies,
// and what the others have put in the place of x back, as y. Weight and bias are in registers.
//
// A warp finds its part of the next row's sums before it waits for those of a row, so that what
// blocks tell each other is there when it is asked for. A row whose mean is far from zero takes
// moments, too: rows behind such a one ahead of time, or each would wait for what blocks tell.
//
// Of a copy on an H200, 268 MB of bfloat16, in the ring or, to 32767, a block each, and so: 22021
// columns .88 and .95, 24577 .89 and .93, 28001 .785 and .92, 32767 .80 and .92, 36001 .67 and .93,
// 40001 .75 and .935, 44001 .855 and .93, 50257 .85 and .93, 57001 .80 and .91, 65537 .80 and .92,
// 75001 .80 and .925, 84001 .79 and .91, 98001 .80 and .93, 115001 .79 and .93, 131071 .73 and .93,
// 140001 .79 and .925, 168001 .85 and .915. Float32 in the ring and so, 134 or 268 MB: 11311 .91
// and .955, 14497 .87 and .935, 20001 .90 and .94, 28001 .89 and .93, 40001 .83 and .93, 45101 .78
// and .955, 50257 .80 and .95, 65537 .85 and .94; but 112001 .92 and .90.
#pragma once

#include "forward_parameters.cuh"
#include "launch.cuh"
#include "wide_stream.cuh"

namespace fastnorm::cuda {

template <class X>
struct WideForward {
  int64_t rows, cols;
  float eps;
  float inverse_cols;
  const X* x;
  const X* x_end;  // of the last row
  int64_t x_row_stride;
  const void* weight;
  const void* bias;
  DType parameter_dtype;
  X* y;
  float* mean;
  float* rstd;
  int cluster_size;
  int warps;                          // of a block, that have columns
  int warp_steps, first_longer_warp;  // see share_out_runs
  int stages, tensor_bytes;           // of the ring, behind which may be room for y
  int most_ahead;                     // see Pace; zero: nobody pauses
};

// A block's part of a row of x and of y.
template <class X>
struct WideForwardParts {
  WideRow<const X> x;
  WideRow<X> y;

  __device__ __forceinline__ WideForwardParts(const WideForward<X>& p, const WideShare& share,
                                              int64_t row)
      : x(p.x + row * p.x_row_stride + share.from, share.to - share.from),
        y(p.y + row * p.cols + share.from, share.to - share.from) {}
};

// Whether all of y lies in granules as x does, so that it may leave from its place. Else 16-bit y
// has room of its own, of two rows in turn, and float32 leaves from registers: such room is twice
// as large there, and 12289 columns, one element off, took 105 us on an H200 so, 80 us from
// registers (and 78 us in chunks realigned in registers).
template <class X>
__host__ __device__ inline bool is_in_place(const WideForward<X>& p) {
  const auto apart = reinterpret_cast<uintptr_t>(p.x) - reinterpret_cast<uintptr_t>(p.y);
  return apart % kChunkBytes == 0 && (p.x_row_stride - p.cols) % WideRow<X>::kGranule == 0;
}

constexpr int kWideOutputs = 2;

template <class X>
__host__ __device__ inline bool has_outputs(const WideForward<X>& p) {
  return kIs16Bit<X> && !is_in_place(p);
}

// Of the moments that warps tell each other: of the next row in each turn, or now and then of the
// row of that turn as well, but so rarely that those told eight times ago were at the least four
// rows before, and have been read by all.
constexpr int kWideMomentTurns = 8;

// What the warp that copies does. `left`: barriers that tell when a row of y has left its own room.
template <class X>
__device__ __forceinline__ void copy_wide_rows(const WideForward<X>& p, const WideShare& share,
                                               const BulkBarriers& barriers, unsigned left,
                                               unsigned char* memory) {
  const int lane = threadIdx.x % kWarpSize;
  const bool in_place = is_in_place(p), outputs = has_outputs(p);
  const auto stage_of = [&](int s) { return reinterpret_cast<X*>(memory + s * p.tensor_bytes); };
  const auto fetch = [&](int i, int s) {
    const int64_t row = share.row(i);
    const WideForwardParts<X> parts(p, share, row);
    // Between rows that do not lie one behind the other may be memory of others.
    const bool dense = p.x_row_stride == p.cols;
    const X* const first = p.x + row * p.x_row_stride;
    const Granules all = parts.x.granules(dense ? p.x : first, dense ? p.x_end : first + p.cols);
    const unsigned barrier = barriers.full_of(s);
    if (lane == 0) {
      arrive_and_expect(barrier, (all.to - all.from) * WideRow<X>::kSize);
      parts.x.copy_in(stage_of(s), all, barrier);
    } else {
      parts.x.copy_ends(stage_of(s), parts.x.sector, all, lane - 1);
      arrive(barrier);
    }
  };

  const auto send = [&](int i, int s) {
    if (!in_place && !outputs) return;
    const WideForwardParts<X> parts(p, share, share.row(i));
    const X* const y = in_place ? stage_of(s) + (parts.x.begin - parts.y.begin)
                                : stage_of(p.stages + i % kWideOutputs);
    const Granules whole = parts.y.granules();
    if (lane == 0) parts.y.copy_out(y, whole);
    parts.y.copy_ends(parts.y.sector, y, whole, lane);
    publish_to_copies();  // the ends have been read, too
  };
  copy_in_turns(p, share, barriers, p.stages, pause_of_wide_rows<X, 2>(p), fetch, send, [&](int i) {
    constexpr auto kBytes = static_cast<unsigned>(sizeof(uint64_t));
    if (outputs) arrive(left + i % kWideOutputs * kBytes);
  });
  __syncwarp();  // as one to the barrier behind
}

template <class X, int kPairs>
__global__ void __launch_bounds__((kWideRowWarps + 1) * kWarpSize, 1)
    forward_wide_stream(const WideForward<X> p) {
  if (!kStreams) return;
  constexpr int kSize = static_cast<int>(sizeof(X));
  // Pairs that are asked for before it is their turn; and chains in which a lane adds up.
  constexpr int kAhead = 4, kSlots = kAhead + 1, kChains = 4;
  using Columns = WideColumns<X, kPairs>;
  using RowSums = WideExchange<false>;
  using RowSets = WideExchange<false, kWideMomentTurns>;
  extern __shared__ __align__(kSectorBytes) unsigned char wide_memory[];
  __shared__ uint64_t full[kMostBulkStages], written[kMostBulkStages], left[kWideOutputs];
  __shared__ typename RowSums::Storage sums_storage;
  __shared__ typename RowSets::Storage sets_storage;

  const BulkBarriers barriers{shared_address(full), shared_address(written)};
  const int warp = warp_index(), warps = p.warps;
  const int rank = cluster_rank() % p.cluster_size;
  const RowSums row_sums(sums_storage, p.cluster_size, rank, warps, warp);
  const RowSets row_sets(sets_storage, p.cluster_size, rank, warps, warp);
  const auto left_of = [&](int i) {
    return shared_address(left) + i % kWideOutputs * static_cast<unsigned>(sizeof(uint64_t));
  };
  if (threadIdx.x == 0) {
    for (int s = 0; s < p.stages; ++s) {
      init_barrier(barriers.full_of(s), kWarpSize);
      init_barrier(barriers.written_of(s), kWarpSize * warps);
    }
    for (int i = 0; i < kWideOutputs; ++i) init_barrier(left_of(i), kWarpSize);
    row_sums.init();
    row_sets.init();
    publish_barriers();
  }
  cluster_arrive();
  cluster_wait();
  wait_for_previous_kernel();
  let_next_kernel_start();
  const WideShare share(p, rank, warps);

  // kApart: y does not take the place of x. kDirect: it leaves from registers then.
  const auto process = [&](auto paired, auto apart) {
    constexpr bool kPaired = decltype(paired)::value, kApart = decltype(apart)::value;
    constexpr bool kDirect = kApart && !kIs16Bit<X>;
    const int lane = threadIdx.x % kWarpSize;
    const int row_warp = rank * warps + warp;
    const int begin = begin_of_warp_run(p, row_warp), end = begin_of_warp_run(p, row_warp + 1);
    const int column = begin + first_of_lane<X>();
    const Columns columns{end - column};
    typename Columns::Values weight, bias;
    columns.load_parameters(weight, p.weight, p.parameter_dtype, column, 1);
    columns.load_parameters(bias, p.bias, p.parameter_dtype, column, 0);
    // Where this lane's x of a row is: by where in a sector rows begin, from turn to turn.
    const WideForwardParts<X> first_parts(p, share, share.first);
    const unsigned memory =
        shared_address(wide_memory) + static_cast<unsigned>(column - share.from) * kSize;
    const auto step = static_cast<unsigned>(p.x_row_stride * share.step) * kSize;
    const auto y_step = static_cast<unsigned>(p.cols * share.step) * kSize;
    unsigned x_begin = first_parts.x.begin * kSize, stage = 0, place = 0;
    unsigned y_begin = first_parts.y.begin * kSize;
    // Pairs of a row, those to come asked for while there is something to do.
    const auto visit = [&](unsigned from, const auto& visitor) {
      Pack<X, 2> x[kSlots];
      const auto load = [&](int s) {
        if (s < kPairs) x[s % kSlots] = columns.template load<kPaired>(from, s);
      };
#pragma unroll
      for (int s = 0; s < kAhead; ++s) load(s);
#pragma unroll
      for (int s = 0; s < kPairs; ++s) {
        load(s + kAhead);
        visitor(s, x[s % kSlots]);
      }
    };
    const auto put = [&](int i, unsigned target, const auto& xhat) {
      [[maybe_unused]] X* const direct = kDirect ? p.y + share.row(i) * p.cols + column : nullptr;
      visit(place, [&](int s, const Pack<X, 2>& x) {
        float y[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          y[j] = fma(xhat(x.template get<float>(j)), weight[s][j], bias[s][j]);
        }
        Pack<X, 2> pair;
        pair.set_pair(0, y[0], y[1]);
        if constexpr (kDirect) {
          columns.store_global(direct, s, pair);
        } else {
          columns.template store<kPaired>(target, s, pair);
        }
      });
    };
    // This lane's sums of a row.
    const auto sum_of = [](const float (&chains)[kChains]) {
      return (chains[0] + chains[1]) + (chains[2] + chains[3]);
    };
    const auto plain_sums = [&](unsigned from) {
      float sums[kChains] = {}, squares[kChains] = {};
      visit(from, [&](int s, const Pack<X, 2>& x) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int chain = (2 * s + j) % kChains;
          const float value = x.template get<float>(j);
          sums[chain] += value;
          squares[chain] = fma(value, value, squares[chain]);
        }
      });
      return ThreadSums<float>{sum_of(sums), sum_of(squares)};
    };
    // And besides, to the bit the same, the moments of the warp's columns, by differences from a
    // point within this lane's. In a loop, for registers are few.
    const auto moments_and_sums = [&](unsigned from, ThreadSums<float>& plain) {
      using Moments = ThreadMoments<float, 2 * kPairs>;
      constexpr int kFirst = 4, kLast = kPairs - 1;
      const auto load = [&](int s) {
        return Columns::template load_whole<kPaired>(from + s * Columns::kStep * kSize);
      };
      float first[kFirst];
#pragma unroll
      for (int i = 0; i < kFirst; ++i) first[i] = load(i / 2).template get<float>(i % 2);
      const float reference = reference_point(tree_mean(first));
      float sums[kChains] = {}, squares[kChains] = {};
      float differences[kChains] = {}, their_squares[kChains] = {};
      const auto add = [&](const Pack<X, 2>& x, int chain, bool first_exists, bool second_exists) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float value = x.template get<float>(j), difference = value - reference;
          const float delta = (j == 0 ? first_exists : second_exists) ? difference : 0.f;
          sums[chain + j] += value;
          squares[chain + j] = fma(value, value, squares[chain + j]);
          differences[chain + j] = fma(delta, Moments::kShare, differences[chain + j]);
          their_squares[chain + j] = fma(delta, delta, their_squares[chain + j]);
        }
      };
#pragma unroll 2
      for (int s = 0; s < kLast / 2; ++s) {
        add(load(2 * s), 0, true, true);
        add(load(2 * s + 1), 2, true, true);
      }
      if constexpr (kLast % 2 != 0) add(load(kLast - 1), 0, true, true);
      const bool exists = columns.has(kLast, 0), both_exist = columns.has(kLast, 1);
      add(columns.template load<kPaired>(from, kLast), kLast % 2 * 2, exists, both_exist);
      plain = {sum_of(sums), sum_of(squares)};
      const Moments thread{reference, sum_of(differences), sum_of(their_squares),
                           static_cast<float>(2 * kLast + exists + both_exist)};
      const auto cols = static_cast<float>(end - begin);
      return merge_warp(thread, cols, quotient(1.f, cols));
    };
    // Of a row, from those of its warps.
    const auto read_moments = [&](int k) {
      const unsigned sets = row_sets.await(k);
      SetMoments<float> row[1];
      const float points[] = {reference_point(load_element<float>(sets))};
      const auto total = static_cast<float>(p.cols);
      merge_differences<kWarpSize>(
          row, points, total, [&](int, float point, float& mean, float& squares) {
            mean = squares = 0;
#pragma unroll 1
            for (int w = lane; w < row_sets.warps; w += kWarpSize) {
              const float2 set = load_float2(sets + w * static_cast<unsigned>(sizeof(float2)));
              const auto count =
                  static_cast<float>(begin_of_warp_run(p, w + 1) - begin_of_warp_run(p, w));
              const float delta = set.x - point;
              mean = fma(count * p.inverse_cols, delta, mean);
              squares += fma(count * delta, delta, set.y);
            }
          });
      return row[0];
    };
    // How many rows warps have told moments of, and, of these, which the row i is, or none. They do
    // so before it is known whether a row needs them, if the one before did.
    int told = 0, moments_turn = -1;
    bool tells_early = false;
    BulkTurn turn, later;  // of the row i whose y, and the row n whose sums are found
#pragma unroll 1
    for (int n = 0; n <= share.count; ++n) {
      const int i = n - 1;
      const unsigned later_place = memory + stage + x_begin;
      int later_moments_turn = -1;
      if (n < share.count) {
        wait_barrier<false>(barriers.full_of(later.stage), later.parity);
        if (tells_early) {
          ThreadSums<float> sums;
          const SetMoments<float> mine = moments_and_sums(later_place, sums);
          row_sums.tell(n, sums.sum, sums.squares);
          later_moments_turn = told++;
          row_sets.tell_known(later_moments_turn, mine.mean, mine.m2);
        } else {
          const ThreadSums<float> sums = plain_sums(later_place);
          row_sums.tell(n, sums.sum, sums.squares);
        }
        later.advance(p.stages);
        stage = later.stage * p.tensor_bytes;
        x_begin = (x_begin + step) % kSectorBytes;
      }
      if (i >= 0) {
        const float2 sums = row_sums.read(i);
        SetMoments<float> moments;
        const bool near = take_sums(moments, {sums.x, sums.y}, p.inverse_cols);
        if (!near || moments_turn >= 0) {
          if (moments_turn < 0) {
            ThreadSums<float> known;
            const SetMoments<float> mine = moments_and_sums(place, known);
            moments_turn = told++;
            row_sets.tell_known(moments_turn, mine.mean, mine.m2);
          }
          const SetMoments<float> others = read_moments(moments_turn);
          if (!near) moments = others;
        }
        tells_early = !near;
        const float mean = moments.mean, rstd = rstd_of(moments, p.inverse_cols, p.eps);
        if (row_warp == 0 && lane == 0) put_statistics(p, share.row(i), mean, rstd);
        unsigned target = place;
        if constexpr (kApart && !kDirect) {
          target = memory + (p.stages + i % kWideOutputs) * p.tensor_bytes + y_begin;
          y_begin = (y_begin + y_step) % kSectorBytes;
          if (i >= kWideOutputs) {
            wait_barrier<false>(left_of(i), (i / kWideOutputs - 1) % 2);
          }
        }
        if (near) {
          const float constant = -mean * rstd;
          put(i, target, [&](float x) { return fma(x, rstd, constant); });
        } else {
          put(i, target, [&](float x) { return (x - mean) * rstd; });
        }
        publish_to_copies();
        arrive(barriers.written_of(turn.stage));
        turn.advance(p.stages);
      }
      place = later_place;
      moments_turn = later_moments_turn;
    }
  };
  constexpr std::true_type kYes;
  constexpr std::false_type kNo;
  if (warp == warps) {
    copy_wide_rows(p, share, barriers, shared_address(left), wide_memory);
  } else if (!is_in_place(p)) {
    process(kNo, kYes);
  } else {
    // Whether all rows of this block begin at whole words.
    const int64_t strides = share.count > 1 ? p.x_row_stride * share.step : 0;
    const WideForwardParts<X> parts(p, share, share.first);
    if (kIs16Bit<X> && (parts.x.begin | strides) % 2 == 0) {
      process(std::bool_constant<kIs16Bit<X>>(), kNo);
    } else {
      process(kNo, kNo);
    }
  }
  // No block leaves before all have sent and received their sums.
  cluster_arrive();
  cluster_wait();
}

template <class X>
cudaError_t launch_forward_wide(const ForwardArgs& args, const ForwardPlan& plan,
                                cudaStream_t stream) {
  WideForward<X> p;
  p.rows = args.rows;
  p.cols = args.cols;
  p.eps = static_cast<float>(args.eps);
  p.inverse_cols = static_cast<float>(1.0 / static_cast<double>(args.cols));
  p.x = static_cast<const X*>(args.x);
  p.x_row_stride = args.x_row_stride;
  p.x_end = p.x + std::max<int64_t>(0, (args.rows - 1) * args.x_row_stride) + args.cols;
  p.weight = args.weight;
  p.bias = args.bias;
  p.parameter_dtype = args.weight != nullptr ? args.weight_dtype : args.bias_dtype;
  p.y = static_cast<X*>(args.y);
  p.mean = static_cast<float*>(args.mean);
  p.rstd = static_cast<float*>(args.rstd);
  p.cluster_size = plan.cluster_size;
  p.warps = plan.threads_per_row / kWarpSize;
  share_out_runs(p, p.warps * p.cluster_size);
  p.most_ahead = plan.most_ahead;
  p.tensor_bytes = plan.shared_bytes / plan.bulk_stages;
  const int outputs = has_outputs(p) ? kWideOutputs : 0;
  p.stages = std::min(plan.bulk_stages, kMostStreamBytes / p.tensor_bytes - outputs);
  const auto launch = [&](auto pairs) {
    const auto kernel = forward_wide_stream<X, decltype(pairs)::value>;
    static std::atomic<uint64_t> prepared{0};  // a bit per device
    const cudaError_t error =
        allow_blocks(reinterpret_cast<const void*>(kernel), kMostStreamBytes, false, prepared);
    if (error != cudaSuccess) return error;
    return Launch(plan.blocks, dim3((p.warps + 1) * kWarpSize), stream)
        .with_shared((p.stages + outputs) * p.tensor_bytes)
        .in_clusters(plan.cluster_size)
        .overlapping(plan.overlap_launches)(kernel, p);
  };
  return visit_number<least_stream_pairs(sizeof(X)), most_stream_pairs(sizeof(X))>(
      plan.columns_per_thread / 2, launch);
}

}  // namespace fastnorm::cuda
