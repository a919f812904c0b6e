// The backward of rows that fit in registers: dx, and dw and db from the same read of x and dy.
//
// backward_rows is persistent: a group of threads holds a row of x and dy packed in registers,
// reduces both of its sums behind one barrier and writes dx; the running sums of dw and db stay in
// its registers from row to row, the weight there or in shared memory. At the end each block (with
// clusters: each cluster) leaves one row of partial sums, which finish_weight_grads of
// weight_grads.cuh adds up, if there are several.
#pragma once

#include <algorithm>

#include "backward_parameters.cuh"
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
  A inverse_cols;
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

  // The sums over chunk k; columns that do not exist add nothing.
  template <class W>
  __device__ __forceinline__ Sums<A> sums(int k, const RowShare& share, A mean, A rstd,
                                          const Pack<W, kColumns>& weight) const {
    Sums<A> chunk;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const A g = wdy(k, i, weight);
      // Zero minus the mean, times rstd, may be infinite.
      const bool exists = kVectorized ? share.left(k) > 0 : i < share.left(k);
      chunk.xhat_wdy = fma(exists ? xhat(k, i, mean, rstd) : A(0), g, chunk.xhat_wdy);
      chunk.wdy += g;
    }
    return chunk;
  }

  // The same over all of this thread's chunks.
  template <class Weight>
  __device__ __forceinline__ Sums<A> sums(const RowShare& share, A mean, A rstd,
                                          const Weight& weight) const {
    Sums<A> sums;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) sums.merge(this->sums(k, share, mean, rstd, weight(k)));
    return sums;
  }

  // Chunk k of dx = rstd * (wdy - mean(wdy) - xhat * mean(xhat * wdy)); `means`: these two.
  template <class W>
  __device__ __forceinline__ Pack<X, kColumns> dx(int k, A mean, A rstd, const Sums<A>& means,
                                                  const Pack<W, kColumns>& weight) const {
    const auto value = [&](int i) {
      return rstd * fma(-means.xhat_wdy, xhat(k, i, mean, rstd), wdy(k, i, weight) - means.wdy);
    };
    Pack<X, kColumns> out;
#pragma unroll
    for (int i = 0; i < kColumns; i += 2) out.set_pair(i, value(i), value(i + 1));
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
    const Sums<A> means = sums.scaled(p.inverse_cols);
    Tile<X, kChunks, kColumns> dx;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      dx.chunks[k] = tile.dx(k, mean, rstd, means, weight(k));
      if constexpr (kWeightGrads) weight_grads.add(tile, k, mean, rstd);
    }
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

}  // namespace fastnorm::cuda
