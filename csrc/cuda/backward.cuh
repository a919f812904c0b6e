// The backward kernels: dx of rows of X, and dw and db from the same read of x and dy.
//
// backward_rows is persistent: a group of threads holds a row of x and dy packed in registers,
// reduces both of its sums behind one barrier and writes dx; the running sums of dw and db stay in
// its registers from row to row, the weight there or in shared memory. At the end each block (with
// clusters: each cluster) leaves one row of partial sums, which finish_weight_grads of
// weight_grads.cuh adds up, if there are several.
// Rows too long for registers are cut into segments: backward_segment_sums, then
// backward_segment_apply, which reads x and dy again; dw and db come from weight_grads.cuh.
#pragma once

#include "backward_parameters.cuh"
#include "launch.cuh"
#include "pieces.cuh"
#include "reduce.cuh"
#include "tile.cuh"
#include "warp_runs.cuh"
#include "weight_grads.cuh"

namespace fastnorm::cuda {

template <class X, class DY, class W>
struct BackwardParameters {
  using A = Accumulator<X>;
  int64_t rows, cols;
  const DY* dy;
  const DY* dy_end;  // of the last row
  int64_t dy_row_stride;
  const X* x;
  const X* x_end;
  int64_t x_row_stride;
  const A* mean;
  const A* rstd;
  const W* weight;
  X* dx;
  A* dw_partials;         // [partials, cols], of kFused
  A* db_partials;         // likewise
  Sums<A>* segment_sums;  // [rows, segments], of kSplit
  int64_t segments;
  int cluster_size;
};

template <class X>
constexpr int kBackwardChunks = sizeof(X) == 2 ? 2 : 4;

static_assert(kBackwardChunks<Half> == backward_chunks(DType::kFloat16));
static_assert(kBackwardChunks<BFloat16> == backward_chunks(DType::kBFloat16));
static_assert(kBackwardChunks<float> == backward_chunks(DType::kFloat32));
static_assert(kBackwardChunks<double> == backward_chunks(DType::kFloat64));

// A thread's columns of one row of x and dy. `weight(k)`, here and below: those of chunk k.
template <class X, class DY, bool kVectorized>
struct BackwardTile {
  using A = Accumulator<X>;
  static constexpr int kChunks = kBackwardChunks<X>;
  static constexpr int kColumns = kChunkColumns<X>;
  using RowShare = Share<X, kVectorized>;

  Tile<X, kChunks, kColumns> x;
  Tile<DY, kChunks, kColumns> dy;

  __device__ __forceinline__ A xhat(int k, int i, A mean, A rstd) const {
    return (x.template get<A>(k, i) - mean) * rstd;
  }

  // dy * weight
  template <class W>
  __device__ __forceinline__ A wdy(int k, int i, const Pack<W, kColumns>& weight) const {
    return dy.template get<A>(k, i) * weight.template get<A>(i);
  }

  // The sums over this thread's columns; those that do not exist add nothing.
  template <class Weight>
  __device__ __forceinline__ Sums<A> sums(const RowShare& share, A mean, A rstd,
                                          const Weight& weight) const {
    Sums<A> sums;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const auto weights = weight(k);
      Sums<A> chunk;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const A g = wdy(k, i, weights);
        // Zero minus the mean, times rstd, may be infinite.
        const bool exists = kVectorized ? share.left(k) > 0 : i < share.left(k);
        chunk.xhat_wdy = fma(exists ? xhat(k, i, mean, rstd) : A(0), g, chunk.xhat_wdy);
        chunk.wdy += g;
      }
      sums.merge(chunk);
    }
    return sums;
  }

  // dx = rstd * (wdy - mean(wdy) - xhat * mean(xhat * wdy)). `amid(k)`: what is done with chunk k
  // besides.
  template <class Weight, class Amid>
  __device__ __forceinline__ Tile<X, kChunks, kColumns> dx(A mean, A rstd, const Sums<A>& sums,
                                                           A cols, const Weight& weight,
                                                           const Amid& amid) const {
    const A c1 = sums.xhat_wdy / cols;
    const A c2 = sums.wdy / cols;
    Tile<X, kChunks, kColumns> out;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const auto weights = weight(k);
      const auto value = [&](int i) {
        return rstd * fma(-c1, xhat(k, i, mean, rstd), wdy(k, i, weights) - c2);
      };
#pragma unroll
      for (int i = 0; i < kColumns; i += 2) out.chunks[k].set_pair(i, value(i), value(i + 1));
      amid(k);
    }
    return out;
  }
};

// Chunk k of the weight; ones where there is none.
template <bool kVectorized, class W, class RowShare>
__device__ __forceinline__ auto load_weight_chunk(const W* weight, const RowShare& share, int k) {
  constexpr int kColumns = RowShare::kColumns;
  return weight == nullptr
             ? fill_pack<W, kColumns>(1)
             : load_pack<kVectorized, W, kColumns>(weight + share.column(k), share.left(k));
}

// Running dw and db of a thread's columns.
template <class X>
struct WeightGradTile {
  using A = Accumulator<X>;
  static constexpr int kChunks = kBackwardChunks<X>;
  static constexpr int kColumns = kChunkColumns<X>;
  A dw[kChunks][kColumns] = {};
  A db[kChunks][kColumns] = {};

  template <class BackwardTile>
  __device__ __forceinline__ void add(const BackwardTile& tile, int k, A mean, A rstd) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const A dy = tile.dy.template get<A>(k, i);
      dw[k][i] = fma(dy, tile.xhat(k, i, mean, rstd), dw[k][i]);
      db[k][i] += dy;
    }
  }
};

// Writes one row of partial sums: the rows of the block (threadIdx.y) added up in their order.
template <class X, bool kVectorized>
__device__ __forceinline__ void store_partials(
    const typename WeightGradTile<X>::A (&values)[kBackwardChunks<X>][kChunkColumns<X>],
    const Share<X, kVectorized>& share, Accumulator<X>* staging, Accumulator<X>* partials) {
  using A = Accumulator<X>;
  constexpr int kChunks = kBackwardChunks<X>;
  constexpr int kColumns = kChunkColumns<X>;
  if (blockDim.y == 1) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      A* const target = partials + share.column(k);
      if constexpr (kVectorized) {
        Pack<A, kColumns> pack;
#pragma unroll
        for (int i = 0; i < kColumns; i += 2) pack.set_pair(i, values[k][i], values[k][i + 1]);
        if (share.left(k) > 0) store_pack(target, pack);
      } else {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          if (i < share.left(k)) target[i] = values[k][i];
        }
      }
    }
    return;
  }
  const int width = blockDim.x * kChunks * kColumns;  // of a row of the staging memory
  __syncthreads();                                    // it may still be read
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      staging[threadIdx.y * width + share.column(k) + i] = values[k][i];
    }
  }
  __syncthreads();
  for (int column = threadIdx.y * blockDim.x + threadIdx.x; column < share.cols;
       column += blockDim.x * blockDim.y) {
    partials[column] = sum_column(staging + column, width, blockDim.y);
  }
}

// Whether the weight is in shared memory. Of rows that are not aligned, and of float64, registers
// spilled 4 to 76 bytes for it beside dw and db; elsewhere it is as well off in them. With it, and
// dw and db added to along with dx instead of behind it: float64 8192 x 8191 770 -> 717 us on an
// H200, 300000 x 33 93 -> 87, float32 beside a bfloat16 dy 32768 x 2047 319 -> 304.
template <class X, bool kWeightGrads, bool kVectorized>
constexpr bool kStagesWeight = kWeightGrads && (!kVectorized || std::is_same_v<X, double>);

// Shared memory of backward_rows: the weight, where it is there; behind it what several rows of a
// block pass on their way out; and when all rows are done, partial sums.
template <class X, class W, bool kWeightGrads, bool kVectorized>
struct RowsMemory {
  static constexpr int kChunks = kBackwardChunks<X>;
  static constexpr int kColumns = kChunkColumns<X>;
  static constexpr bool kStages = kStagesWeight<X, kWeightGrads, kVectorized>;
  using WeightPack = Pack<W, kColumns>;
  using Writer = ShortRowWriter<X, kChunks, kColumns, kVectorized>;

  static constexpr int kPackBytes = kStages ? static_cast<int>(sizeof(WeightPack)) : 0;
  static constexpr int kWeightBytes = kMaxThreadsPerRow * kChunks * kPackBytes;
  static constexpr int kRowsBegin = kMaxSharedBlock * kChunks * kPackBytes;
  static constexpr int kRowsEnd =
      kRowsBegin + kMaxSharedBlock / kWarpSize * static_cast<int>(sizeof(typename Writer::Storage));
  static constexpr int kSumsBytes =
      kWeightGrads ? kMaxSharedBlock * kChunks * kColumns * static_cast<int>(sizeof(Accumulator<X>))
                   : 0;
  static constexpr int kBytes = std::max({kWeightBytes, kRowsEnd, kSumsBytes, kChunkBytes});
};

// Blocks of the largest size that an SM must hold, if that is said. Where it is not ptxas may keep
// to 64 registers, which is best for dx alone of aligned rows (65536 x 1024 float16 beside a
// bfloat16 dy 106 us on an H200, 134 us in 84 to 100), and for which others would spill.
template <bool kWeightGrads, bool kCluster, bool kVectorized>
constexpr int kRowsBlocks = kVectorized && !kWeightGrads && !kCluster ? 0 : 1;

template <class X, class DY, class W, bool kWeightGrads, bool kCluster, bool kVectorized>
__global__ void __launch_bounds__(kMaxThreadsPerRow,
                                  (kRowsBlocks<kWeightGrads, kCluster, kVectorized>))
    backward_rows(const BackwardParameters<X, DY, W> p) {
  using A = Accumulator<X>;
  constexpr int kColumns = kChunkColumns<X>;
  constexpr int kChunks = kBackwardChunks<X>;
  using Reducer = RowReducer<Sums<A>, kCluster>;
  __shared__ typename Reducer::Storage storage;
  Reducer reducer(storage, blockDim.x, p.cluster_size);

  const int64_t group = kCluster ? blockIdx.x / p.cluster_size : blockIdx.x;
  const int64_t groups = kCluster ? gridDim.x / p.cluster_size : gridDim.x;
  const Piece piece = block_piece<kColumns, kChunks, kCluster>(p.cols, blockDim.x);
  const Share<X, kVectorized> share{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                                    piece.cols};
  using Memory = RowsMemory<X, W, kWeightGrads, kVectorized>;
  __shared__ uint4 memory[Memory::kBytes / kChunkBytes];
  using Writer = RowWriter<X, kChunks, kColumns, kVectorized>;
  __shared__ typename Writer::Storage writer_storage;
  const int threads = kCluster ? kMaxThreadsPerRow : blockDim.x * blockDim.y;
  auto* const staged = reinterpret_cast<typename Memory::WeightPack*>(memory) +
                       threadIdx.y * blockDim.x + threadIdx.x;
  typename Memory::WeightPack held[kChunks];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    held[k] = load_weight_chunk<kVectorized>(p.weight == nullptr ? nullptr : p.weight + piece.begin,
                                             share, k);
    if constexpr (Memory::kStages) staged[k * threads] = held[k];
  }
  const auto weight = [&](int k) {
    if constexpr (Memory::kStages) return staged[k * threads];
    keep_packed(held[k]);  // or it would be kept unpacked, in twice the registers
    return held[k];
  };
  BackwardTile<X, DY, kVectorized> tile;
  WeightGradTile<X> weight_grads;

  // Rows have whole warps, several of them, or share a warp.
  const bool several_warps = kCluster || blockDim.x > kWarpSize;
  const int lanes = several_warps ? kWarpSize : blockDim.x;
  const int teams = kWarpSize / lanes;
  const int team = several_warps ? 0 : threadIdx.y % teams;
  const Writer writer{writer_storage};
  auto* const short_rows = reinterpret_cast<typename Memory::Writer::Storage*>(
      memory + Memory::kRowsBegin / kChunkBytes);
  const typename Memory::Writer short_row_writer{
      short_rows[several_warps ? 0 : threadIdx.y / teams], p.dx, p.rows, teams, team};

  // Every thread of a block takes part in every turn: the reduction has a barrier.
  for (int64_t first = group * blockDim.y; first < p.rows; first += groups * blockDim.y) {
    const int64_t row = first + threadIdx.y;
    const bool active = row < p.rows;
    const X* const x = active ? p.x + row * p.x_row_stride + piece.begin : nullptr;
    const DY* const dy = active ? p.dy + row * p.dy_row_stride + piece.begin : nullptr;
    if (several_warps) {
      tile.x.load_by_warps(x, share, p.x_end);
      tile.dy.load_by_warps(dy, share, p.dy_end);
    } else {
      tile.x.load(x, share);
      tile.dy.load(dy, share);
    }
    const A mean = active ? p.mean[row] : A(0);
    const A rstd = active ? p.rstd[row] : A(0);
    Sums<A> sums = sum_lanes(tile.sums(share, mean, rstd, weight), lanes);
    if (several_warps) sums = reducer.reduce(sums);
    const auto dx = tile.dx(mean, rstd, sums, static_cast<A>(p.cols), weight, [&](int k) {
      if constexpr (kWeightGrads) weight_grads.add(tile, k, mean, rstd);
    });
    const auto dx_chunk = [&](int k) { return dx.chunks[k]; };
    if (several_warps) {
      writer.write(p.dx + row * p.cols + piece.begin, active, share, dx_chunk);
    } else {
      short_row_writer.write(row - team, share, dx_chunk);
    }
  }
  if constexpr (kWeightGrads) {
    auto* const staging = reinterpret_cast<A*>(memory);
    const int64_t offset = group * p.cols + piece.begin;
    store_partials<X, kVectorized>(weight_grads.dw, share, staging, p.dw_partials + offset);
    store_partials<X, kVectorized>(weight_grads.db, share, staging, p.db_partials + offset);
  }
}

template <class X, class DY, class W, bool kVectorized>
__global__ void __launch_bounds__(kSegmentThreads)
    backward_segment_sums(const BackwardParameters<X, DY, W> p) {
  using A = Accumulator<X>;
  using Reducer = RowReducer<Sums<A>, false>;
  __shared__ typename Reducer::Storage storage;
  Reducer reducer(storage, kSegmentThreads, 1);
  const Segment<X, kBackwardChunks<X>, kVectorized> segment(p.cols, p.segments);
  const W* const weights = p.weight == nullptr ? nullptr : p.weight + segment.begin;
  const auto weight = [&](int k) {
    return load_weight_chunk<kVectorized>(weights, segment.share, k);
  };
  BackwardTile<X, DY, kVectorized> tile;
  tile.x.load_by_warps(p.x + segment.row * p.x_row_stride + segment.begin, segment.share, p.x_end);
  tile.dy.load_by_warps(p.dy + segment.row * p.dy_row_stride + segment.begin, segment.share,
                        p.dy_end);
  const Sums<A> mine = tile.sums(segment.share, p.mean[segment.row], p.rstd[segment.row], weight);
  const Sums<A> sums = reducer.reduce(sum_lanes(mine, kWarpSize));
  if (threadIdx.x == 0) p.segment_sums[blockIdx.x] = sums;
}

template <class X, class DY, class W, bool kVectorized>
__global__ void __launch_bounds__(kSegmentThreads)
    backward_segment_apply(const BackwardParameters<X, DY, W> p) {
  using A = Accumulator<X>;
  const Segment<X, kBackwardChunks<X>, kVectorized> segment(p.cols, p.segments);
  // The last rows first, of which x and dy may still be in the L2 cache.
  const int64_t row = p.rows - 1 - segment.row;
  const W* const weights = p.weight == nullptr ? nullptr : p.weight + segment.begin;
  const auto weight = [&](int k) {
    return load_weight_chunk<kVectorized>(weights, segment.share, k);
  };
  BackwardTile<X, DY, kVectorized> tile;
  tile.x.load_by_warps(p.x + row * p.x_row_stride + segment.begin, segment.share, p.x_end);
  tile.dy.load_by_warps(p.dy + row * p.dy_row_stride + segment.begin, segment.share, p.dy_end);
  const Sums<A> sums =
      reduce_array(p.segment_sums + row * p.segments, static_cast<int>(p.segments));
  const auto dx =
      tile.dx(p.mean[row], p.rstd[row], sums, static_cast<A>(p.cols), weight, [](int) {});
  using Writer = RowWriter<X, kBackwardChunks<X>, kChunkColumns<X>, kVectorized>;
  __shared__ typename Writer::Storage writer_storage;
  const Writer writer{writer_storage};
  writer.write(p.dx + row * p.cols + segment.begin, true, segment.share,
               [&](int k) { return dx.chunks[k]; });
}

template <bool kVectorized, class X, class DY, class W>
cudaError_t launch_dx(const BackwardParameters<X, DY, W>& p, const BackwardPlan& plan,
                      cudaStream_t stream) {
  const dim3 threads(plan.threads_per_row, plan.rows_per_block);
  const auto launch_rows = [&](auto kernel) {
    return Launch(plan.blocks, threads, stream).in_clusters(plan.cluster_size)(kernel, p);
  };
  const bool fused = plan.weight_grads == WeightGrads::kFused;
  switch (plan.kernel) {
    case Kernel::kShortRows:  // of the forward alone
    case Kernel::kElements:   // launched elsewhere
    case Kernel::kFewRows:
    case Kernel::kFewElements:
    case Kernel::kRing:
      return cudaErrorInvalidValue;
    case Kernel::kRows:
      return launch_rows(fused ? backward_rows<X, DY, W, true, false, kVectorized>
                               : backward_rows<X, DY, W, false, false, kVectorized>);
    case Kernel::kCluster:
      return launch_rows(fused ? backward_rows<X, DY, W, true, true, kVectorized>
                               : backward_rows<X, DY, W, false, true, kVectorized>);
    case Kernel::kSplit: {
      const cudaError_t error = launch_rows(backward_segment_sums<X, DY, W, kVectorized>);
      if (error != cudaSuccess) return error;
      return launch_rows(backward_segment_apply<X, DY, W, kVectorized>);
    }
  }
  return cudaErrorInvalidValue;
}

// The lanes or warps of a block that hold a row of kFewRows or kRing.
template <class Parameters>
void set_span(Parameters& p, const BackwardPlan& plan) {
  const bool several_warps = plan.cluster_size > 1 || plan.threads_per_row > kWarpSize;
  p.lanes = several_warps ? kWarpSize : plan.threads_per_row;
  p.teams = rows_per_warp(plan);
  p.pitch = kWarpSize / p.teams;
  p.warps = several_warps ? plan.threads_per_row / kWarpSize : 1;
  p.by_pitch = Divisor(p.pitch);
  p.by_warps = Divisor(p.warps);
  p.run_columns = plan.run_columns;
  p.cluster_size = plan.cluster_size;
}

template <class X>
FewRowsParameters<X> few_rows_parameters(const BackwardArgs& args, const BackwardPlan& plan) {
  FewRowsParameters<X> p;
  p.rows = args.rows;
  p.cols = args.cols;
  p.inverse_cols = 1.0f / static_cast<float>(args.cols);
  p.x = static_cast<const X*>(args.x);
  p.x_row_stride = args.x_row_stride;
  p.dy = static_cast<const X*>(args.dy);
  p.dy_row_stride = args.dy_row_stride;
  p.mean = static_cast<const float*>(args.mean);
  p.rstd = static_cast<const float*>(args.rstd);
  p.weight = args.weight;
  p.dx = static_cast<X*>(args.dx);
  p.dw = args.dw;
  p.db = args.db;
  p.weight_dtype = args.weight_dtype;
  p.dw_dtype = args.weight_dtype;
  p.db_dtype = args.bias_dtype;
  set_span(p, plan);
  p.slices = plan.slices;
  p.tile_lanes = plan.tile_lanes;
  p.column_blocks = static_cast<int>(plan.column_blocks);
  p.tiles = p.column_blocks / p.slices;
  p.block_rows = plan.rows_per_block;
  p.slice_rows = (args.rows + p.slices - 1) / p.slices;
  return p;
}

// dx from the ring, and with kFused the partial sums of dw and db.
template <class X, class DY>
cudaError_t stream_rows(const BackwardArgs& args, const BackwardPlan& plan, float* dw_partials,
                        float* db_partials, uint4* exchange, cudaStream_t stream) {
  RingParameters<X, DY> p;
  p.exchange = exchange;
  p.rows = args.rows;
  p.cols = args.cols;
  p.inverse_cols = 1.0f / static_cast<float>(args.cols);
  p.x = static_cast<const X*>(args.x);
  p.x_row_stride = args.x_row_stride;
  p.x_end = p.x + (args.rows - 1) * args.x_row_stride + args.cols;
  p.dy = static_cast<const DY*>(args.dy);
  p.dy_row_stride = args.dy_row_stride;
  p.dy_end = p.dy + (args.rows - 1) * args.dy_row_stride + args.cols;
  p.mean = static_cast<const float*>(args.mean);
  p.rstd = static_cast<const float*>(args.rstd);
  p.weight = args.weight;
  p.weight_dtype = args.weight_dtype;
  p.dx = static_cast<X*>(args.dx);
  const bool fused = plan.weight_grads == WeightGrads::kFused;
  p.dw_partials = fused ? dw_partials : nullptr;
  p.db_partials = fused ? db_partials : nullptr;
  set_span(p, plan);
  p.by_cluster_size = Divisor(plan.cluster_size);
  p.relays = Turns(p.warps);
  if (plan.cluster_size > 1 && plan.blocks * plan.cluster_size >= Divisor::kMost &&
      plan.kernel != Kernel::kFewElements) {
    return cudaErrorInvalidValue;  // no device runs so many at once
  }
  p.groups = block_threads(plan) / (p.warps * kWarpSize);
  p.merged = plan.merged;
  const int64_t units = (args.rows + p.teams - 1) / p.teams;
  p.unit_stride = (plan.blocks - plan.column_blocks) / plan.cluster_size * p.groups;
  const int64_t stride = p.unit_stride * p.teams;
  p.x_step = stride * args.x_row_stride * static_cast<int64_t>(sizeof(X));
  p.dy_step = stride * args.dy_row_stride * static_cast<int64_t>(sizeof(DY));
  p.dx_step = stride * args.cols * static_cast<int64_t>(sizeof(X));
  p.full_turns = static_cast<int>(units / p.unit_stride);
  p.last_turn = static_cast<int>(units % p.unit_stride);
  p.shares = plan.shares;
  p.share_turns = p.full_turns / plan.shares;
  p.brakes = plan.brakes;
  p.most_ahead = plan.most_ahead;
  if (plan.kernel == Kernel::kRing) {
    return plan.vectorized ? launch_ring<true>(p, plan, stream)
                           : launch_ring<false>(p, plan, stream);
  }
  if constexpr (std::is_same_v<X, DY>) {
    share_out_runs(p, p.warps * p.cluster_size);
    return launch_backward_elements(p, few_rows_parameters<X>(args, plan), plan, stream);
  }
  return cudaErrorInvalidValue;
}

// The same in as many launches as the plan has shares, each with some of the rows, and partial sums
// of its own. (A grid leaves them in one.)
template <class X, class DY>
cudaError_t stream_shares(const BackwardArgs& args, const BackwardPlan& plan, float* dw_partials,
                          float* db_partials, uint4* exchange, cudaStream_t stream) {
  const int64_t launches = plan.in_grid ? 1 : plan.shares;
  for (int64_t i = 0; i < launches; ++i) {
    const int64_t begin = args.rows * i / launches;
    BackwardArgs share = args;
    share.rows = args.rows * (i + 1) / launches - begin;
    share.x = static_cast<const X*>(args.x) + begin * args.x_row_stride;
    share.dy = static_cast<const DY*>(args.dy) + begin * args.dy_row_stride;
    share.mean = static_cast<const float*>(args.mean) + begin;
    share.rstd = static_cast<const float*>(args.rstd) + begin;
    share.dx = static_cast<X*>(args.dx) + begin * args.cols;
    const int64_t partial = plan.partials / launches * i * args.cols;
    const cudaError_t error = stream_rows<X, DY>(share, plan, dw_partials + partial,
                                                 db_partials + partial, exchange, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Types of x and dy whose rows stream through shared memory.
template <class X, class DY>
constexpr bool kRowsStream =
    !std::is_same_v<X, double> && (std::is_same_v<X, DY> || sizeof(DY) > sizeof(X));

// Rows of X: finds the types of dy and the weight, and launches what the plan asks for. The
// workspace holds the words of a grid's blocks, the partial sums of dw, those of db, then the
// segments' sums.
template <class X>
cudaError_t backward_of(const BackwardArgs& args, const BackwardPlan& plan, void* workspace,
                        cudaStream_t stream) {
  using A = Accumulator<X>;
  uint4* const exchange = static_cast<uint4*>(workspace);
  A* const behind =
      reinterpret_cast<A*>(exchange + (plan.in_grid ? plan.blocks * kGridExchanges : 0));
  const bool direct = plan.sums_are_results;
  const int64_t partial_sums = direct ? 0 : plan.partials * args.cols;
  A* const dw_partials = direct ? static_cast<A*>(args.dw) : behind;
  A* const db_partials = direct ? static_cast<A*>(args.db) : behind + partial_sums;
  Sums<A>* const segment_sums = reinterpret_cast<Sums<A>*>(behind + 2 * partial_sums);
  return visit_other<X>(args.dy_dtype, [&](auto dy_type) {
    using DY = typename decltype(dy_type)::type;
    cudaError_t error = cudaSuccess;
    if constexpr (std::is_same_v<X, DY> && !std::is_same_v<X, double>) {
      if (plan.kernel == Kernel::kFewRows) {
        return launch_few_rows(few_rows_parameters<DY>(args, plan), plan, stream);
      }
    }
    if (plan.dx && (plan.kernel == Kernel::kRing || plan.kernel == Kernel::kElements ||
                    plan.kernel == Kernel::kFewElements)) {
      error = cudaErrorInvalidValue;
      if constexpr (kRowsStream<X, DY>) {
        error = stream_shares<X, DY>(args, plan, dw_partials, db_partials, exchange, stream);
      }
    } else if (plan.dx) {
      error = visit_parameter<X>(args.weight_dtype, [&](auto parameter_type) {
        using W = typename decltype(parameter_type)::type;
        BackwardParameters<X, DY, W> p;
        p.rows = args.rows;
        p.cols = args.cols;
        p.dy = static_cast<const DY*>(args.dy);
        p.dy_row_stride = args.dy_row_stride;
        p.dy_end = p.dy + (args.rows - 1) * args.dy_row_stride + args.cols;
        p.x = static_cast<const X*>(args.x);
        p.x_row_stride = args.x_row_stride;
        p.x_end = p.x + (args.rows - 1) * args.x_row_stride + args.cols;
        p.mean = static_cast<const A*>(args.mean);
        p.rstd = static_cast<const A*>(args.rstd);
        p.weight = static_cast<const W*>(args.weight);
        p.dx = static_cast<X*>(args.dx);
        p.dw_partials = dw_partials;
        p.db_partials = db_partials;
        p.segment_sums = segment_sums;
        p.segments = plan.segments;
        p.cluster_size = plan.cluster_size;
        return plan.vectorized ? launch_dx<true>(p, plan, stream)
                               : launch_dx<false>(p, plan, stream);
      });
    }
    const bool fused = plan.weight_grads == WeightGrads::kFused;
    const bool by_columns = plan.weight_grads == WeightGrads::kColumns;
    if (error != cudaSuccess || (!fused && !by_columns)) return error;
    if (by_columns) {
      error = launch_column_sums<X, DY>(args, plan, dw_partials, db_partials, stream);
      if (error != cudaSuccess) return error;
    }
    if (direct) return cudaSuccess;
    return launch_finish_weight_grads<A>(args, plan, dw_partials, db_partials, stream);
  });
}

// One instantiation file per dtype of x.
extern template cudaError_t backward_of<float>(const BackwardArgs&, const BackwardPlan&, void*,
                                               cudaStream_t);
extern template cudaError_t backward_of<Half>(const BackwardArgs&, const BackwardPlan&, void*,
                                              cudaStream_t);
extern template cudaError_t backward_of<BFloat16>(const BackwardArgs&, const BackwardPlan&, void*,
                                                  cudaStream_t);
extern template cudaError_t backward_of<double>(const BackwardArgs&, const BackwardPlan&, void*,
                                                cudaStream_t);

}  // namespace fastnorm::cuda
