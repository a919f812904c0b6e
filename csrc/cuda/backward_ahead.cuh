// The backward of float64 rows that a block holds, or a cluster: as in backward_rows.cuh, but x and
// dy of the next rows are on their way to shared memory while a row is worked on.
//
// A thread copies its own columns, and no other reads them, so that copies need no barrier. Rows
// that are not aligned move by accesses of eight bytes, two for a chunk: nothing is shifted.
//
// Of an elementwise sum on an H200, 134 MB, by backward_rows and so: aligned 4096 columns .84 and
// .91, 8208 .33 and .61, 12288 .43 and .78, 16384 .48 and .67, not aligned 271 .40 and .67, 2053
// .39 and .78, 2435 .43 and .84, 8349 .20 and .54, 25405 .23 and .58.
#pragma once

#include "backward_rows.cuh"
#include "row_sums.cuh"

namespace fastnorm::cuda {

template <bool kCluster>
constexpr int kAheadStages = ahead_stages(kCluster);

// Where a thread's chunks of x and dy, and mean and rstd, lie in shared memory, of several rows at
// once; and behind those chunks of the weight.
struct AheadStages {
  static constexpr int kChunks = kBackwardChunks<double>;

  unsigned first;  // this thread's
  int threads;     // of the block

  __device__ __forceinline__ unsigned place(int stage, int granule) const {
    return first + (stage * kAheadGranules + granule) * threads * kChunkBytes;
  }
  __device__ __forceinline__ unsigned x(int stage, int k) const { return place(stage, k); }
  __device__ __forceinline__ unsigned dy(int stage, int k) const {
    return place(stage, kChunks + k);
  }
  __device__ __forceinline__ unsigned statistics(int stage) const {
    return place(stage, 2 * kChunks);
  }
};

template <bool kWeightGrads, RingSpan kSpan, bool kVectorized>
__global__ void __launch_bounds__(kMaxThreadsPerRow, 1)
    backward_rows_ahead(const BackwardParameters<double, double, double> p) {
  if (!kStreams) return;
  using X = double;
  constexpr bool kWarp = kSpan == RingSpan::kWarp;
  constexpr bool kCluster = kSpan == RingSpan::kCluster;
  constexpr int kColumns = kChunkColumns<X>;
  constexpr int kSize = static_cast<int>(sizeof(X));
  constexpr int kChunks = kBackwardChunks<X>;
  constexpr int kStages = kAheadStages<kCluster>;
  using Reducer = RowReducer<Sums<X>, kCluster, kStages>;
  extern __shared__ uint4 ahead_memory[];
  __shared__ typename Reducer::Storage storage;
  Reducer reducer(storage, blockDim.x, p.cluster_size);
  let_next_kernel_start();

  const auto find_group = [] { return kCluster ? cluster_index() : static_cast<int>(blockIdx.x); };
  const int groups = kCluster ? gridDim.x / p.cluster_size : gridDim.x;
  const Piece piece = block_piece<kColumns, kChunks, kCluster>(p.cols, blockDim.x);
  const Share<X, kVectorized> share{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                                    piece.cols};
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const AheadStages stages{shared_address(ahead_memory + thread),
                           static_cast<int>(blockDim.x * blockDim.y)};
  const int step = groups * static_cast<int>(blockDim.y);
  int64_t row = find_group() * static_cast<int>(blockDim.y) + static_cast<int>(threadIdx.y);

  const int lanes = kWarp ? blockDim.x : kWarpSize;  // of a row and a warp
  const auto fetch = [&](int stage, int64_t wanted) {
    if (wanted < p.rows) {
      const auto copy = [&](const X* tensor, unsigned first) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          const X* const source = tensor + share.column(k);
          const unsigned target = first + k * stages.threads * kChunkBytes;
          if constexpr (kVectorized) {
            if (share.left(k) > 0) copy_async(target, source);
          } else {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
              if (i < share.left(k)) copy_8_bytes(target + i * kSize, source + i);
            }
          }
        }
      };
      copy(p.x + wanted * p.x_row_stride + piece.begin, stages.x(stage, 0));
      copy(p.dy + wanted * p.dy_row_stride + piece.begin, stages.dy(stage, 0));
      copy_8_bytes(stages.statistics(stage), p.mean + wanted);
      copy_8_bytes(stages.statistics(stage) + kSize, p.rstd + wanted);
    }
    commit_copies();
  };
  // Columns that do not exist stay zero.
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (share.left(k) < kColumns) {
        store_shared(stages.x(s, k), Granule());
        store_shared(stages.dy(s, k), Granule());
      }
    }
    fetch(s, row + s * step);
  }

  // The weight is there, too, of rows of a block, which have not registers enough else.
  Pack<X, kColumns> weights[kCluster ? kChunks : 1];
  const auto weight_place = [&](int k) { return stages.place(kStages, k); };
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const auto chunk = load_weight_chunk<kVectorized>(
        p.weight == nullptr ? nullptr : p.weight + piece.begin, share, k);
    if constexpr (kCluster) {
      weights[k] = chunk;
    } else {
      store_shared(weight_place(k), to_granule(chunk));
    }
  }
  const auto weight = [&](int k) {
    if constexpr (kCluster) return weights[k];
    return to_pack<X, kColumns>(load_shared(weight_place(k)));
  };
  WeightGradTile<X> weight_grads;
  using RowTile = BackwardTile<X, X, kVectorized>;
  const auto read = [&](RowTile& tile, int stage, int k) {
    tile.x.chunks[k] = to_pack<X, kColumns>(load_shared(stages.x(stage, k)));
    tile.dy.chunks[k] = to_pack<X, kColumns>(load_shared(stages.dy(stage, k)));
  };
  // The mean, and rstd, of the row in a stage.
  const auto statistics = [&](int stage) {
    return to_pack<X, 2>(load_shared(stages.statistics(stage)));
  };
  // Ends the row with chunk k of the tile.
  const auto finish = [&](const RowTile& tile, int k, X mean, X rstd, const Sums<X>& means) {
    const Pack<X, kColumns> dx = tile.dx(k, mean, rstd, means, weight(k));
    if constexpr (kWeightGrads) weight_grads.add(tile, k, mean, rstd);
    X* const target = p.dx + row * p.cols + piece.begin + share.column(k);
    if constexpr (kVectorized) {
      if (share.left(k) > 0) store_wide(target, dx);
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (i < share.left(k)) target[i] = dx.element(i);
      }
    }
  };

  // Every thread of a block takes part in every turn: the reduction has a barrier.
  int stage = 0;
  if constexpr (!kCluster) {
    for (; row - threadIdx.y < p.rows; row += step) {
      wait_copies<kStages - 1>();
      const X mean = statistics(stage).words[0], rstd = statistics(stage).words[1];
      RowTile tile;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) read(tile, stage, k);
      fetch(stage, row + kStages * step);
      Sums<X> sums = sum_lanes(tile.sums(share, mean, rstd, weight), lanes);
      if constexpr (!kWarp) {
        reducer.post(sums, stage);
        sums = reducer.collect(stage);
      }
      if (row < p.rows) {
        const Sums<X> means = sums.scaled(p.inverse_cols);
#pragma unroll
        for (int k = 0; k < kChunks; ++k) finish(tile, k, mean, rstd, means);
      }
      stage = stage + 1 < kStages ? stage + 1 : 0;
    }
  } else {
    // A cluster's barrier waits for all that a thread has asked for. So sums are on their way while
    // the row before is ended, and more is asked for behind the barrier, not before it.
    RowTile tile;
    const auto post = [&](int s) {
      const X mean = statistics(s).words[0], rstd = statistics(s).words[1];
      Sums<X> sums;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        read(tile, s, k);
        sums.merge(tile.sums(k, share, mean, rstd, weight(k)));
      }
      reducer.post(sum_lanes(sums, lanes), s);
    };
    wait_copies<kStages - 1>();
    post(0);
    Sums<X> sums = reducer.collect(0);
    for (; row < p.rows; row += step) {
      const int next_stage = stage + 1 < kStages ? stage + 1 : 0;
      const bool follows = row + step < p.rows;
      if (follows) {
        wait_copies<kStages - 2>();
        post(next_stage);
      }
      const X mean = statistics(stage).words[0], rstd = statistics(stage).words[1];
      const Sums<X> means = sums.scaled(p.inverse_cols);
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        read(tile, stage, k);
        finish(tile, k, mean, rstd, means);
      }
      if (follows) sums = reducer.collect(next_stage);
      fetch(stage, row + kStages * step);
      stage = next_stage;
    }
  }
  if constexpr (kWeightGrads) {
    wait_for_copies();
    auto* const staging = reinterpret_cast<X*>(ahead_memory);
    const int64_t offset = find_group() * p.cols + piece.begin;
    store_partials<X, kVectorized>(weight_grads.dw, share, staging, p.dw_partials + offset);
    store_partials<X, kVectorized>(weight_grads.db, share, staging, p.db_partials + offset);
  }
}

template <bool kVectorized>
cudaError_t launch_rows_ahead(const BackwardParameters<double, double, double>& p,
                              const BackwardPlan& plan, cudaStream_t stream) {
  const auto launch = [&](auto weight_grads, auto span) {
    constexpr RingSpan kSpan = decltype(span)::value;
    constexpr bool kCluster = kSpan == RingSpan::kCluster;
    const auto kernel = backward_rows_ahead<decltype(weight_grads)::value, kSpan, kVectorized>;
    static std::atomic<uint64_t> prepared{0};  // a bit per device
    const cudaError_t error =
        allow_blocks(reinterpret_cast<const void*>(kernel),
                     ahead_bytes(kMaxThreadsPerRow, kCluster), false, prepared);
    if (error != cudaSuccess) return error;
    const dim3 threads(plan.threads_per_row, plan.rows_per_block);
    return Launch(plan.blocks, threads, stream)
        .with_shared(ahead_bytes(plan.threads_per_row * plan.rows_per_block, kCluster))
        .in_clusters(plan.cluster_size)(kernel, p);
  };
  const auto launch_span = [&](auto span) {
    return plan.weight_grads == WeightGrads::kFused ? launch(std::true_type(), span)
                                                    : launch(std::false_type(), span);
  };
  if (plan.cluster_size > 1) {
    return launch_span(std::integral_constant<RingSpan, RingSpan::kCluster>());
  }
  if (plan.threads_per_row > kWarpSize) {
    return launch_span(std::integral_constant<RingSpan, RingSpan::kBlock>());
  }
  return launch_span(std::integral_constant<RingSpan, RingSpan::kWarp>());
}

}  // namespace fastnorm::cuda
