// The backward of few rows in one launch: some blocks take rows and write dx, others take tiles of
// columns and sum dw and db over all rows. Both read x and dy, which stay in the L2 cache. What two
// launches more and sums of partial sums cost is more than the second read.
//
// Those of a single row need no sums.
//
// Rows are held and summed as in backward_ring.cuh, so that dx has the same bits. Where one block
// holds a row, the rows of a tile are shared out over the blocks of a cluster, whose sums the first
// of them adds up. Wider rows are fewer, and each block of a cluster has a tile of its own.
#pragma once

#include "backward_parameters.cuh"
#include "realign.cuh"
#include "row_sums.cuh"
#include "stage.cuh"
#include "weight_grads.cuh"

namespace fastnorm::cuda {

// dw and db of a tile of columns: each block of the cluster adds up its slice of the rows, over its
// threads, its warps and the blocks in turn. kSliced: there may be several of those.
template <class X, int kLanes, bool kSliced>
struct ColumnTile {
  static constexpr int kColumns = kChunkColumns<X>;
  static constexpr int kWidth = kLanes * kColumns;

  struct Storage {
    float warp_sums[kRingRowWarps][2][kWidth];
    float slice_sums[kSliced ? kMaxClusterSize : 1][2 * kWidth];
  };

  template <bool kVectorized>
  static __device__ __forceinline__ void sum(const FewRowsParameters<X>& p, Storage& storage) {
    constexpr int kUnroll = kVectorized ? 4 : 2;  // rows in flight per thread
    const bool sliced = kSliced && p.slices > 1;
    if (sliced) cluster_arrive();  // no block may write into one that has not started
    const int64_t begin = static_cast<int64_t>(kSliced ? cluster_index() : blockIdx.x) * kWidth;
    if (!kSliced && begin >= p.cols) return;
    const int slice = sliced ? cluster_rank() : 0;
    const int64_t end = min(p.rows, (slice + 1) * p.slice_rows);
    const int lane = threadIdx.x % kLanes;
    const int teams = blockDim.x / kLanes;  // of threads that take a row each
    const int64_t column = begin + lane * kColumns;
    const int left = static_cast<int>(min(int64_t{kColumns}, p.cols - column));
    const X* const x_column = p.x + column;
    const X* const dy_column = p.dy + column;

    float sums[2][kColumns] = {};  // of dy * xhat and of dy
    for (int64_t row = slice * p.slice_rows + threadIdx.x / kLanes; row < end;
         row += kUnroll * teams) {
      Pack<X, kColumns> x[kUnroll], dy[kUnroll];
      float mean[kUnroll], rstd[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t r = row + u * teams;
        const bool active = r < end;
        const int count = active ? left : 0;
        x[u] = load_pack<kVectorized, X, kColumns>(x_column + r * p.x_row_stride, count);
        dy[u] = load_pack<kVectorized, X, kColumns>(dy_column + r * p.dy_row_stride, count);
        mean[u] = active ? p.mean[r] : 0.0f;
        rstd[u] = active ? p.rstd[r] : 0.0f;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          const float g = dy[u].template get<float>(i);
          const float centred = x[u].template get<float>(i) - mean[u];
          sums[0][i] = fma(g * rstd[u], centred, sums[0][i]);
          sums[1][i] += g;
        }
      }
    }

    // Over the lanes of a warp that hold the same columns, its warps, and the blocks of the tile.
#pragma unroll
    for (int offset = kLanes; offset < kWarpSize; offset *= 2) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          sums[s][i] += __shfl_xor_sync(kAllLanes, sums[s][i], offset);
        }
      }
    }
    const int warp = threadIdx.x / kWarpSize;
    if (threadIdx.x % kWarpSize < kLanes) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int i = 0; i < kColumns; i += 4) {
          *reinterpret_cast<float4*>(&storage.warp_sums[warp][s][lane * kColumns + i]) =
              make_float4(sums[s][i], sums[s][i + 1], sums[s][i + 2], sums[s][i + 3]);
        }
      }
    }
    __syncthreads();
    if (sliced) cluster_wait();
    const int warps = blockDim.x / kWarpSize;
    const auto store = [&](int i, float total) {
      const int64_t to = begin + i % kWidth;
      void* const target = i < kWidth ? p.dw : p.db;
      if (target != nullptr && to < p.cols) {
        store_element(target, i < kWidth ? p.dw_dtype : p.db_dtype, to, total);
      }
    };
    for (int i = threadIdx.x; i < 2 * kWidth; i += blockDim.x) {
      float total = 0;
      for (int w = 0; w < warps; ++w) total += storage.warp_sums[w][i / kWidth][i % kWidth];
      if (sliced) {
        store_remote(&storage.slice_sums[slice][i], total, 0);
      } else {
        store(i, total);
      }
    }
    if (!sliced) return;
    cluster_arrive();
    cluster_wait();
    if (slice > 0) return;
    for (int i = threadIdx.x; i < 2 * kWidth; i += blockDim.x) {
      float total = 0;
      for (int s = 0; s < p.slices; ++s) total += storage.slice_sums[s][i];
      store(i, total);
    }
  }
};

// The tiles of rows that a block holds, or a cluster.
template <class X, RingSpan kSpan>
struct ColumnTiles {
  static constexpr bool kSliced = kSpan != RingSpan::kCluster;
  using Narrow = ColumnTile<X, kSliced ? kMinTileLanes : kMaxTileLanes, kSliced>;
  using Wide = ColumnTile<X, kSliced ? kMaxTileLanes : kWideTileLanes, kSliced>;

  union Storage {
    typename Narrow::Storage narrow;
    typename Wide::Storage wide;
  };

  template <bool kVectorized>
  static __device__ __forceinline__ void sum(const FewRowsParameters<X>& p, Storage& storage) {
    if (p.tile_lanes * kChunkColumns<X> == Narrow::kWidth) {
      Narrow::template sum<kVectorized>(p, storage.narrow);
    } else {
      Wide::template sum<kVectorized>(p, storage.wide);
    }
  }
};

// dw and db of a single row, a chunk in each thread, by `blocks` blocks.
template <bool kVectorized, class X>
__device__ __forceinline__ void store_row_gradients(const FewRowsParameters<X>& p, int blocks) {
  constexpr int kColumns = kChunkColumns<X>;
  const float mean = p.mean[0], rstd = p.rstd[0];
  for (int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kColumns;
       column < p.cols; column += int64_t{blockDim.x} * blocks * kColumns) {
    const int left = static_cast<int>(min(int64_t{kColumns}, p.cols - column));
    const auto x = load_pack<kVectorized, X, kColumns>(p.x + column, left);
    const auto dy = load_pack<kVectorized, X, kColumns>(p.dy + column, left);
    const auto db = [&](int i) { return dy.template get<float>(i); };
    const auto dw = [&](int i) { return db(i) * rstd * (x.template get<float>(i) - mean); };
    store_columns<X, kVectorized>(p.dw, p.dw_dtype, column, left, dw);
    store_columns<X, kVectorized>(p.db, p.db_dtype, column, left, db);
  }
}

// The sums over a row of which each block has but one for a group of its warps.
template <RingSpan kSpan>
struct RowSumsExchange {
  static constexpr bool kCluster = kSpan == RingSpan::kCluster;

  struct Storage {
    float warps[2 * kRingRowWarps];  // first sums of each, then second
    alignas(16) float blocks[kCluster ? 2 * kMaxClusterSize : 1];
  };

  // At a kernel's start, by all threads of the block. In a cluster, blocks that do not exist add
  // zeros, and none may write into one that has not started.
  static __device__ __forceinline__ void begin(Storage& storage) {
    if constexpr (kCluster) {
      if (threadIdx.x < 2 * kMaxClusterSize) storage.blocks[threadIdx.x] = 0;
      cluster_arrive();
    }
  }

  // After `begin`, by all threads of the block. `lane`: see sum_row_lanes.
  static __device__ __forceinline__ Sums<float> sum(Storage& storage, Sums<float> sums, int lanes,
                                                    int warps, int group, int row_warp,
                                                    int cluster_size, int lane = 0) {
    if constexpr (kSpan == RingSpan::kWarp) return sum_row_lanes(sums, lanes, lane);
    const float mine = sum_halves(sums.xhat_wdy, sums.wdy);
    const int half = threadIdx.x % kWarpSize / (kWarpSize / 2);
    const int place = threadIdx.x % (kWarpSize / 2);
    float* const row_sums = storage.warps + half * kRingRowWarps + group * warps;
    if (place == 0) row_sums[row_warp] = mine;
    __syncthreads();
    const auto sum_warps = [&] { return sum_row_warps(place < warps ? row_sums[place] : 0.0f); };
    if constexpr (kCluster) {
      cluster_wait();
      if (row_warp == 0) {  // for all of the block
        const Sums<float> block = sum_warps();
        if (place < cluster_size) {
          store_remote(&storage.blocks[2 * cluster_rank() + half],
                       half == 0 ? block.xhat_wdy : block.wdy, place);
        }
      }
      cluster_arrive();
      cluster_wait();
      return sum_block_pairs(shared_address(storage.blocks), cluster_size);
    } else {
      return sum_warps();
    }
  }
};

// Lanes of three chunks have 80 registers, in which weights fit unpacked beside x and dy as they
// are in memory: dx alone of 134 MB of bfloat16, in parts of an elementwise sum on an H100, with
// 128 registers and so: 320 columns .93 and .99, 640 .93 and .995, 768 .98 and .995. (With 64 the
// same, and the weight packed as well; of two chunks 48, or 40, are 0 to 7 percent slower than 64.)
template <class X, bool kVectorized, int kChunks>
constexpr bool kFewWide = kVectorized && kChunks > kRingChunks<X>;

// 64 registers where they do, for 1024 threads on each multiprocessor.
template <class X, RingSpan kSpan, bool kVectorized, int kChunks>
constexpr int kFewRowsBlocks = kFewWide<X, kVectorized, kChunks>                             ? 3
                               : kVectorized && (kSpan != RingSpan::kWarp || sizeof(X) == 2) ? 2
                                                                                             : 1;

// kTail: see backward_ring.
template <class X, RingSpan kSpan, bool kVectorized, int kChunks = kRingChunks<X>,
          bool kTail = false>
__global__ void __launch_bounds__((kFewWide<X, kVectorized, kChunks> ? kMaxSharedBlock
                                                                     : kMaxThreadsPerRow),
                                  (kFewRowsBlocks<X, kSpan, kVectorized, kChunks>))
    backward_few_rows(const FewRowsParameters<X> p) {
  if (!kStreams) return;
  constexpr int kColumns = kChunkColumns<X>;
  constexpr bool kShort = kSpan == RingSpan::kWarp;
  constexpr bool kCluster = kSpan == RingSpan::kCluster;
  using Chunk = Pack<X, kColumns>;
  using Stage = WarpStage<X, kWarpSize * kChunks * kColumns>;
  struct Unused {};
  __shared__ union {
    typename ColumnTiles<X, kSpan>::Storage tiles;
    struct {
      typename RowSumsExchange<kSpan>::Storage sums;
      std::conditional_t<kVectorized, Unused, typename Stage::Buffer> stages[kRingRowWarps];
    } rows;
  } storage;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (static_cast<int>(blockIdx.x) < p.column_blocks) {
    if (p.rows == 1) {
      store_row_gradients<kVectorized>(p, p.column_blocks);
    } else {
      ColumnTiles<X, kSpan>::template sum<kVectorized>(p, storage.tiles);
    }
    return;
  }
  RowSumsExchange<kSpan>::begin(storage.rows.sums);

  const int warp = threadIdx.x / kWarpSize;
  const int lanes = kShort ? p.lanes : kWarpSize;
  const int teams = kShort ? p.teams : 1;
  const int team = kShort ? p.by_pitch.quotient(threadIdx.x % kWarpSize) : 0;
  const int lane = threadIdx.x % kWarpSize - team * p.pitch;
  const int group = kShort ? warp : kCluster ? 0 : p.by_warps.quotient(warp);
  const int row_warp = kShort ? 0 : warp - group * p.warps;
  const int rank = kCluster ? cluster_rank() : 0;
  constexpr int kWarpColumns = kWarpSize * kChunks * kColumns;
  const int run_columns = kTail ? p.run_columns : kWarpColumns;
  const int begin = (rank * p.warps + row_warp) * run_columns * (kShort ? 0 : 1);
  const int left = static_cast<int>(p.cols) - begin;
  const int run = min(left, lanes * kChunks * kColumns);
  const int tail_column = begin + kWarpColumns + lane;
  const bool has_tail = kTail && lane < min(left, run_columns) - run;
  const auto column = [&](int k) { return (lane + k * lanes) * kColumns; };  // of the run

  // Of the warp's rows.
  const int64_t first_row =
      kCluster ? cluster_index() - p.clusters_of_tiles
               : static_cast<int64_t>(blockIdx.x - p.column_blocks) * p.block_rows + group * teams;
  // Of a lane that is left over between two teams or behind the last one, beyond the last one.
  const int64_t row = !kShort || (lane < lanes && team < teams) ? first_row + team : p.rows;
  const bool active = row < p.rows;
  // Columns from this lane's chunk k on, unclamped (see Share::left).
  const auto left_of = [&](int k) { return run - column(k); };

  // What a lane does not have is not made zero, nor is it asked of each weight whether it is there
  // and of what dtype: rows of a warp are limited by instructions. (Those of several were slower
  // so: 24414 x 4096 bfloat16 148 us on an H200 for 143 us.)
  constexpr bool kTrims = kVectorized && kShort;
  const auto has = [&](int k) { return active && left_of(k) > 0; };

  Chunk x[kChunks], dy[kChunks];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const X* const x_chunk = p.x + row * p.x_row_stride + begin + column(k);
    const X* const dy_chunk = p.dy + row * p.dy_row_stride + begin + column(k);
    if constexpr (kTrims) {
      x[k] = load_pack_if<X, kColumns>(x_chunk, has(k));
      dy[k] = load_pack_if<X, kColumns>(dy_chunk, has(k));
    } else {
      const int count = active ? left_of(k) : 0;
      x[k] = load_pack<kVectorized, X, kColumns>(x_chunk, count);
      dy[k] = load_pack<kVectorized, X, kColumns>(dy_chunk, count);
    }
  }
  TailColumn tail;
  float tail_x = 0, tail_dy = 0;
  if (has_tail && active) {
    tail_x = widen(p.x[row * p.x_row_stride + tail_column]);
    tail_dy = widen(p.dy[row * p.dy_row_stride + tail_column]);
    tail.weight = load_weight<X>(p.weight, p.weight_dtype, tail_column);
  }
  const float mean = active ? p.mean[row] : 0.0f;
  const float rstd = active ? p.rstd[row] : 0.0f;
  // The rest. `constant`: the weights' dtype, where it has a branch of its own.
  const auto finish = [&](const void* weights, auto constant) {
    DType dtype = p.weight_dtype;
    if constexpr (!std::is_same_v<decltype(constant), DType>) dtype = decltype(constant)::value;
    PackedWeight<X, kChunks, kVectorized> packed_weight;
    packed_weight.load(weights, dtype, [&](int k) { return begin + column(k); }, left_of);
    const RingWeight<X, kChunks> weight(packed_weight, weights != nullptr, dtype);

    Sums<float> sums = sum_chunks<X>([&](int k) { return x[k]; }, [&](int k) { return dy[k]; },
                                     weight, mean, [&](int k) { return !kTrims || has(k); });
    if (has_tail) sums.merge(tail.sums(tail_x, tail_dy, mean));
    sums = RowSumsExchange<kSpan>::sum(storage.rows.sums, sums, lanes, p.warps, group, row_warp,
                                       p.cluster_size, lane);

    if constexpr (kTrims) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        forget_unpacked(x[k]);
        forget_unpacked(dy[k]);
      }
    }
    const RowGradient gradient(mean, rstd, sums, p.inverse_cols);
    if (has_tail && active) {
      p.dx[row * p.cols + tail_column] = narrow<X>(tail.finish(tail_x, tail_dy, gradient));
    }
    const auto dx_chunk = [&](int k) {
      Chunk out;
#pragma unroll
      for (int i = 0; i < kColumns; i += 2) {
        float values[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float centred = x[k].template get<float>(i + j) - mean;
          const float scaled = dy[k].template get<float>(i + j) * rstd;
          values[j] = gradient.dx(centred, scaled, weight.values[k][i + j]);
        }
        out.set_pair(i, values[0], values[1]);
      }
      return out;
    };
    if constexpr (kVectorized) {
      X* const dx_run = p.dx + row * p.cols + begin;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        if (has(k)) store_wide(dx_run + column(k), dx_chunk(k));
      }
    } else {
      Stage stage(storage.rows.stages[warp], p.dx + first_row * p.cols + begin);
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        stage.put(team * run + column(k), dx_chunk(k), active ? left_of(k) : 0);
      }
      const int64_t rows = min(static_cast<int64_t>(teams), p.rows - first_row);
      stage.flush(static_cast<int>(rows) * run);
    }
  };
  using Own = std::integral_constant<DType, kDTypeOf<X>>;
  using Float32 = std::integral_constant<DType, DType::kFloat32>;
  if constexpr (!kTrims) {
    finish(p.weight, p.weight_dtype);
  } else if (p.weight == nullptr) {
    finish(nullptr, Own());
  } else if (std::is_same_v<Own, Float32> || p.weight_dtype == Own::value) {
    finish(p.weight, Own());
  } else {
    finish(p.weight, Float32());
  }
}

template <class X>
cudaError_t launch_few_rows(const FewRowsParameters<X>& p, const BackwardPlan& plan,
                            cudaStream_t stream) {
  const auto launch_span = [&](auto span, auto chunks) {
    constexpr RingSpan kSpan = decltype(span)::value;
    constexpr int kChunks = decltype(chunks)::value;
    auto kernel = plan.vectorized ? backward_few_rows<X, kSpan, true, kChunks>
                                  : backward_few_rows<X, kSpan, false, kChunks>;
    if constexpr (kIs16Bit<X> && kSpan != RingSpan::kWarp) {
      if (plan.run_columns > 0) kernel = backward_few_rows<X, kSpan, false, kChunks, true>;
    }
    return Launch(plan.blocks, dim3(block_threads(plan)), stream)
        .in_clusters(few_rows_cluster(plan))
        .overlapping(plan.overlap_launches)(kernel, p);
  };
  const std::integral_constant<int, kRingChunks<X>> chunks;
  if (plan.cluster_size > 1) {
    return launch_span(std::integral_constant<RingSpan, RingSpan::kCluster>(), chunks);
  }
  if (plan.threads_per_row > kWarpSize) {
    return launch_span(std::integral_constant<RingSpan, RingSpan::kBlock>(), chunks);
  }
  const std::integral_constant<RingSpan, RingSpan::kWarp> warp;
  if constexpr (kIs16Bit<X>) {
    if (plan.chunks_per_thread == kMostLaneChunks) {
      return launch_span(warp, std::integral_constant<int, kMostLaneChunks>());
    }
  }
  return launch_span(warp, chunks);
}

}  // namespace fastnorm::cuda
