// The backward of wide 16-bit rows that end within a chunk, wherever they begin. Blocks stay, or
// clusters of them, and have a row at a time, by 11 warps of each block, whose lanes have pairs of
// columns. One warp more copies rows of x and dy into a ring of stages in shared memory, by bulk
// copies, and what the others have put in the place of x back, as dx. Weights, dw and db are in
// registers.
//
// Of an elementwise sum on an H200, 268 MB of bfloat16, in the ring and so: 7001 columns .83 and
// .91, 8191 .86 and .91, 10001 .755 and .87, 12289 .77 and .90, 14001 .795 and .905, 16385 .83 and
// .92, 17001 .84 and .87, 20001 .775 and .905, 28001 .745 and .87, 32767 .825 and .865, 40001 .755
// and .84, 80001 .635 and .825; 50257 (412 MB) .73 and .90. (10001, 14001, 17001, 32767, 40001 and
// 80001 before clusters were kept together.)
#pragma once

#include "backward_parameters.cuh"
#include "partial_sums.cuh"
#include "row_sums.cuh"
#include "wide_stream.cuh"

namespace fastnorm::cuda {

// Of a stage, x and then as much for dy; and how many stages there are.
struct WideStages {
  int tensor_bytes, stages;

  __device__ __forceinline__ unsigned char* x_of(unsigned char* memory, int stage) const {
    return memory + 2 * stage * tensor_bytes;
  }
};

// Its part of a row.
template <class X>
struct WideParts {
  WideRow<const X> x, dy;
  WideRow<X> dx;

  __device__ __forceinline__ WideParts(const RingParameters<X>& p, const WideShare& share,
                                       int64_t row)
      : x(p.x + row * p.x_row_stride + share.from, share.to - share.from),
        dy(p.dy + row * p.dy_row_stride + share.from, share.to - share.from),
        dx(p.dx + row * p.cols + share.from, share.to - share.from) {}
};

// Whether all of dx lies in granules as x does, so that it may leave from its place.
template <class X>
__host__ __device__ inline bool is_in_place(const RingParameters<X>& p) {
  const auto apart = reinterpret_cast<uintptr_t>(p.x) - reinterpret_cast<uintptr_t>(p.dx);
  return apart % kChunkBytes == 0 && (p.x_row_stride - p.cols) % WideRow<X>::kGranule == 0;
}

// Whether all rows of this block begin at whole words, in x and dy.
template <class X>
__device__ __forceinline__ bool are_in_words(const RingParameters<X>& p, const WideShare& share) {
  const WideParts<X> parts(p, share, share.first);
  const int64_t strides = share.count > 1 ? (p.x_row_stride | p.dy_row_stride) * share.step : 0;
  return (parts.x.begin | parts.dy.begin | strides) % 2 == 0;
}

// What the warp that copies does.
template <class X>
__device__ __forceinline__ void copy_wide_rows(const RingParameters<X>& p, const WideShare& share,
                                               const WideStages& ring, const BulkBarriers& barriers,
                                               unsigned char* memory) {
  const int lane = threadIdx.x % kWarpSize;
  const auto fetch = [&](int i, int s) {
    const int64_t row = share.row(i);
    const WideParts<X> parts(p, share, row);
    X* const x = reinterpret_cast<X*>(ring.x_of(memory, s));
    X* const dy = x + ring.tensor_bytes / WideRow<X>::kSize;
    const unsigned barrier = barriers.full_of(s);
    // Between rows that do not lie one behind the other may be memory of others.
    const auto granules_of = [&](const WideRow<const X>& part, const X* tensor, const X* end,
                                 int64_t stride) {
      const bool dense = stride == p.cols;
      const X* const first = tensor + row * stride;
      return part.granules(dense ? tensor : first, dense ? end : first + p.cols);
    };
    const Granules of_x = granules_of(parts.x, p.x, p.x_end, p.x_row_stride);
    const Granules of_dy = granules_of(parts.dy, p.dy, p.dy_end, p.dy_row_stride);
    if (lane == 0) {
      const int elements = of_x.to - of_x.from + of_dy.to - of_dy.from;
      arrive_and_expect(barrier, elements * WideRow<X>::kSize);
      parts.x.copy_in(x, of_x, barrier);
      parts.dy.copy_in(dy, of_dy, barrier);
    } else {
      parts.x.copy_ends(x, parts.x.sector, of_x, lane - 1);
      parts.dy.copy_ends(dy, parts.dy.sector, of_dy, lane - 1);
      arrive(barrier);
    }
  };

  const bool in_place = is_in_place(p);
  const auto send = [&](int i, int s) {
    if (!in_place) return;
    const WideParts<X> parts(p, share, share.row(i));
    const X* const x = reinterpret_cast<const X*>(ring.x_of(memory, s));
    const X* const dx = x + (parts.x.begin - parts.dx.begin);
    const Granules whole = parts.dx.granules();
    if (lane == 0) parts.dx.copy_out(dx, whole);
    parts.dx.copy_ends(parts.dx.sector, dx, whole, lane);
    publish_to_copies();  // the ends have been read, too
  };
  copy_in_turns(p, share, barriers, ring.stages, pause_of_wide_rows<X, 3>(p), fetch, send,
                [](int) {});
}

// kAlone: a row has one block, whose warps wait for each other's sums, and in which it stays in
// registers until dx, which takes its place. Else, in clusters, of one block too, each warp finds
// the sums of the next row before it waits for those of one, and reads that once more for dx.
template <class X, int kPairs, bool kAlone>
__global__ void __launch_bounds__((kWideRowWarps + 1) * kWarpSize, 1)
    backward_wide(const RingParameters<X> p, const WideStages ring) {
  if (!kStreams) return;
  constexpr int kSize = static_cast<int>(sizeof(X));
  // Pairs that are asked for before it is their turn; and places for them.
  constexpr int kAhead = 2, kSlots = kAlone ? kPairs : kAhead + 1;
  using Columns = WideColumns<X, kPairs>;
  extern __shared__ __align__(kSectorBytes) unsigned char wide_memory[];
  __shared__ uint64_t full[kMostBulkStages], written[kMostBulkStages], finished_storage;
  using AllSums = WideExchange<kAlone>;
  __shared__ typename AllSums::Storage sums_storage;

  const BulkBarriers barriers{shared_address(full), shared_address(written)};
  const unsigned finished = shared_address(&finished_storage);
  const int warp = warp_index(), warps = p.warps;
  const int rank = kAlone ? 0 : cluster_rank() % p.cluster_size;
  const AllSums all_sums(sums_storage, p.cluster_size, rank, warps, warp);
  if (threadIdx.x == 0) {
    for (int s = 0; s < ring.stages; ++s) {
      init_barrier(barriers.full_of(s), kWarpSize);
      init_barrier(barriers.written_of(s), kWarpSize * warps);
    }
    init_barrier(finished, kWarpSize * (warps + 1));
    all_sums.init();
    publish_barriers();
  }
  if constexpr (kAlone) {
    __syncthreads();
  } else {
    cluster_arrive();
    cluster_wait();
  }
  let_next_kernel_start();
  const WideShare share(p, rank, warps);
  const int width = (share.to - share.from + 3) / 4 * 4;

  // kDirect: dx to device memory, and not by way of the place of x.
  const auto process = [&](auto paired, auto direct) {
    constexpr bool kPaired = decltype(paired)::value, kDirect = decltype(direct)::value;
    const int row_warp = rank * warps + warp;
    const int column = begin_of_warp_run(p, row_warp) + threadIdx.x % kWarpSize * 2;
    const Columns columns{begin_of_warp_run(p, row_warp + 1) - column};
    typename Columns::Values weight, dw = {}, db = {};
    columns.load_parameters(weight, p.weight, p.weight_dtype, column, 1);
    // Where this lane's x and dy of a row are: by where in a sector rows begin, from turn to turn.
    const WideParts<X> first_parts(p, share, share.first);
    const unsigned memory =
        shared_address(wide_memory) + static_cast<unsigned>(column - share.from) * kSize;
    const unsigned dy_memory = memory + ring.tensor_bytes, stage_bytes = 2 * ring.tensor_bytes;
    const auto x_step = static_cast<unsigned>(p.x_row_stride * share.step) * kSize;
    const auto dy_step = static_cast<unsigned>(p.dy_row_stride * share.step) * kSize;
    unsigned x_begin = first_parts.x.begin * kSize, dy_begin = first_parts.dy.begin * kSize;
    unsigned x_place = 0, dy_place = 0, stage = 0;
    Pack<X, 2> x[kSlots], dy[kSlots];
    // Pairs of a row, those to come asked for while there is something to do.
    const auto visit = [&](bool asks, unsigned x_from, unsigned dy_from, const auto& visitor) {
      const auto load = [&](int s) {
        if (!asks || s >= kPairs) return;
        x[s % kSlots] = columns.template load<kPaired>(x_from, s);
        dy[s % kSlots] = columns.template load<kPaired>(dy_from, s);
      };
#pragma unroll
      for (int s = 0; s < kAhead; ++s) load(s);
#pragma unroll
      for (int s = 0; s < kPairs; ++s) {
        load(s + kAhead);
        visitor(s, x[s % kSlots], dy[s % kSlots]);
      }
    };
    float mean = 0, rstd = 0;
    const float *next_mean = p.mean + share.first, *next_rstd = p.rstd + share.first;
    float later_mean = __ldg(next_mean), later_rstd = __ldg(next_rstd);
    BulkTurn turn, later;  // of the row i whose dx, and the row n whose sums are found
#pragma unroll 1
    for (int n = 0; n < share.count + (kAlone ? 0 : 1); ++n) {
      const int i = kAlone ? n : n - 1;
      const unsigned later_x = memory + stage + x_begin, later_dy = dy_memory + stage + dy_begin;
      const float row_mean = later_mean, row_rstd = later_rstd;
      if (kAlone) {
        mean = row_mean;
        rstd = row_rstd;
        x_place = later_x;
      }
      if (n < share.count) {
        if (n + 1 < share.count) {
          next_mean += share.step;
          next_rstd += share.step;
          later_mean = __ldg(next_mean);
          later_rstd = __ldg(next_rstd);
        }
        wait_barrier<false>(barriers.full_of(later.stage), later.parity);
        Sums<float> sums[2];
        visit(true, later_x, later_dy, [&](int s, const Pack<X, 2>& x, const Pack<X, 2>& dy) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float wdy = dy.template get<float>(j) * weight[s][j];
            const float centred = x.template get<float>(j) - row_mean;
            sums[j].xhat_wdy = fma(centred, wdy, sums[j].xhat_wdy);
            sums[j].wdy += wdy;
          }
        });
        sums[0].merge(sums[1]);
        all_sums.tell(n, sums[0].xhat_wdy, sums[0].wdy);
        later.advance(ring.stages);
        stage = later.stage * stage_bytes;
        x_begin = (x_begin + x_step) % kSectorBytes;
        dy_begin = (dy_begin + dy_step) % kSectorBytes;
      }
      if (kAlone || i >= 0) {
        const float2 row_sums = all_sums.read(i);
        const RowGradient gradient(mean, rstd, {row_sums.x, row_sums.y}, p.inverse_cols);
        visit(!kAlone, x_place, dy_place, [&](int s, const Pack<X, 2>& x, const Pack<X, 2>& dy) {
          float dx[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float given = dy.template get<float>(j);
            const float centred = x.template get<float>(j) - gradient.mean;
            const float scaled = given * gradient.rstd;
            dw[s][j] = fma(scaled, centred, dw[s][j]);
            db[s][j] += given;
            dx[j] = gradient.dx(centred, scaled, weight[s][j]);
          }
          Pack<X, 2> pair;
          pair.set_pair(0, dx[0], dx[1]);
          if constexpr (kDirect) {
            columns.store_global(p.dx + share.row(i) * p.cols + column, s, pair);
          } else {
            columns.template store<kPaired>(x_place, s, pair);
          }
        });
        if (!kDirect) publish_to_copies();
        arrive(barriers.written_of(turn.stage));
        turn.advance(ring.stages);
      }
      mean = row_mean;
      rstd = row_rstd;
      x_place = later_x;
      dy_place = later_dy;
    }
    if (p.dw_partials == nullptr) return;
    // (Not by meet_group, to which the warp that copies would come from another place: synccheck.)
    arrive(finished);
    wait_barrier<false>(finished, 0);
    float* const staged = reinterpret_cast<float*>(wide_memory) + column - share.from;
    columns.put_sums(dw, staged);
    columns.put_sums(db, staged + width);
  };
  constexpr std::true_type kYes;
  constexpr std::false_type kNo;
  if (warp == warps) {
    copy_wide_rows(p, share, ring, barriers, wide_memory);
    arrive(finished);
  } else if (!kAlone && !is_in_place(p)) {
    process(kNo, kYes);
  } else if (are_in_words(p, share)) {
    process(kYes, kNo);
  } else {
    process(kNo, kNo);
  }
  // No block leaves before all have sent and received their sums.
  if constexpr (!kAlone) {
    cluster_arrive();
    cluster_wait();
  }
  if (p.dw_partials == nullptr) return;

  // One row of partial sums per block or cluster.
  leave_partials<false>(p, reinterpret_cast<float*>(wide_memory), width, share.from, p.merged,
                        p.cluster_size);
}

template <class X>
cudaError_t launch_backward_wide(const RingParameters<X>& p, const BackwardPlan& plan,
                                 cudaStream_t stream) {
  const auto launch_kernel = [&](auto pairs, auto alone) {
    const auto kernel = backward_wide<X, decltype(pairs)::value, decltype(alone)::value>;
    static std::atomic<uint64_t> prepared{0};  // a bit per device
    const cudaError_t error =
        allow_blocks(reinterpret_cast<const void*>(kernel), kMostWideRowBytes, false, prepared);
    if (error != cudaSuccess) return error;
    const WideStages ring{wide_tensor_bytes(plan, p.cols), plan.bulk_stages};
    return Launch(plan.blocks, dim3(block_threads(plan) + kWarpSize), stream)
        .with_shared(2 * ring.stages * ring.tensor_bytes)
        .in_clusters(plan.cluster_size * plan.merged)(kernel, p, ring);
  };
  const auto launch = [&](auto pairs) {
    const bool alone = plan.cluster_size == 1 && is_in_place(p);
    return alone ? launch_kernel(pairs, std::true_type()) : launch_kernel(pairs, std::false_type());
  };
  const int pairs = plan.columns_per_thread / 2;
  constexpr int kOfHalves = 8;  // of two blocks at the least
  if (pairs == kOfHalves) {
    return launch_kernel(std::integral_constant<int, kOfHalves>(), std::false_type());
  }
  return visit_number<kOfHalves + 1, kMostWideRowPairs>(pairs, launch);
}

}  // namespace fastnorm::cuda
