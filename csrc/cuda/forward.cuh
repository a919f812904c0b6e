// The forward kernels: y, mean and rstd of rows of X. Each reads a row once: it stays packed with
// the threads that hold it.
//
// Lanes, warps and blocks take the moments of what they hold and merge them. forward_short_rows: a
// row in the lanes of a warp or fewer. forward_rows: in the warps of a block or of a cluster of
// blocks. forward_warp_rows: in one warp.
// Rows too long for that are cut into segments: forward_segment_moments reads them and leaves their
// moments in the workspace, forward_segment_apply merges those and reads the row again.
#pragma once

#include <algorithm>
#include <limits>

#include "forward_bulk_rows.cuh"
#include "forward_start.cuh"
#include "row_tile.cuh"
#include "statistics.cuh"
#include "tile.cuh"

namespace fastnorm::cuda {

// A thread's chunks of weight and bias. A missing weight is one and a missing bias zero: exact, and
// without a branch.
template <class W, int kChunks, int kColumns>
struct ParameterTile {
  Pack<W, kColumns> weight[kChunks];
  Pack<W, kColumns> bias[kChunks];

  // Rows may be unaligned and the parameters not: whole chunks of them move by wide accesses then.
  template <class RowShare>
  __device__ __forceinline__ void load(const W* weights, const W* biases, const RowShare& share,
                                       int k) {
    load_wide_or_nothing(weights, biases, share, k);
    if constexpr (!RowShare::kWhole) {
      if (needs_more(weights, biases, share.left(k) > 0 && share.left(k) < kColumns)) {
        load_rest(weights, biases, share, k);
      }
    }
  }

  // Chunk k, which is whole. kPlain: both are there and aligned.
  template <bool kPlain, class RowShare>
  __device__ __forceinline__ void load_whole(const W* weights, const W* biases,
                                             const RowShare& share, int k) {
    const auto load = [&](const W* parameters, Accumulator<W> absent) {
      const W* const chunk = parameters + share.column(k);
      if (kPlain || parameters == nullptr || is_aligned(parameters)) {
        return load_wide<W, kColumns>(chunk, kPlain || parameters != nullptr, absent);
      }
      return load_unaligned<W, kColumns>(chunk, kColumns);
    };
    weight[k] = load(weights, 1);
    bias[k] = load(biases, 0);
  }

  // Chunk k where both are there and aligned; if it does not exist, whatever is in some registers.
  template <class RowShare>
  __device__ __forceinline__ void load_plain(const W* weights, const W* biases,
                                             const RowShare& share, int k) {
    const bool exists = share.left(k) > 0;
    weight[k] = load_pack_if<W, kColumns>(weights + share.column(k), exists);
    bias[k] = load_pack_if<W, kColumns>(biases + share.column(k), exists);
  }

  static __device__ __forceinline__ bool are_plain(const W* weights, const W* biases) {
    return weights != nullptr && biases != nullptr && is_aligned(weights) && is_aligned(biases);
  }

 private:
  static __device__ __forceinline__ bool is_aligned(const W* parameters) {
    return reinterpret_cast<uintptr_t>(parameters) % alignof(Pack<W, kColumns>) == 0;
  }

  static __device__ __forceinline__ bool needs_more(const W* weights, const W* biases,
                                                    bool partial) {
    return partial || !is_aligned(weights) || !is_aligned(biases);
  }

  template <class RowShare>
  __device__ __forceinline__ void load_wide_or_nothing(const W* weights, const W* biases,
                                                       const RowShare& share, int k) {
    const auto load = [&](const W* parameters, Accumulator<W> absent) {
      const bool wide = RowShare::kWhole ? share.left(k) > 0
                                         : share.left(k) >= kColumns && is_aligned(parameters);
      return load_wide<W, kColumns>(parameters + share.column(k), parameters != nullptr && wide,
                                    absent);
    };
    weight[k] = load(weights, 1);
    bias[k] = load(biases, 0);
  }

  template <class RowShare>
  __device__ __forceinline__ void load_rest(const W* weights, const W* biases,
                                            const RowShare& share, int k) {
    const int column = share.column(k), left = share.left(k);
    if (weights != nullptr) weight[k] = load_unaligned<W, kColumns>(weights + column, left);
    if (biases != nullptr) bias[k] = load_unaligned<W, kColumns>(biases + column, left);
  }
};

// Weight and bias can be fetched before the reduction's barrier if they take no more registers than
// a row of X: at 32768 x 4096 bfloat16 on an H200, 135 us instead of 138 us. With four chunks per
// thread instead of eight that loses (155 us instead of 134 us at 65536 x 2048): fewer blocks fit.
template <class X, class W>
constexpr bool kEarlyParameters = sizeof(W) <= sizeof(X);

// Rows that are not aligned but have whole chunks, enough of them, pass through shared memory as
// spans of longer ones do: 65536 x 1024 bfloat16, one element off, took 105 us on an H200 element
// by element, 75.5 us so.
template <int kLanes, int kChunks, bool kVectorized>
constexpr bool kBySpan =
    kLanes >= 8 && kIsPowerOfTwo<kLanes> && 2 * kChunks > kRegisterChunks && !kVectorized;

// Whether all tensors have one dtype, for which there are more kernels.
template <class X, class Y, class W>
constexpr bool kOneType = std::is_same_v<X, Y> && std::is_same_v<X, W>;

// Whether there are kernels of short rows for any number of chunks up to five in a lane.
template <class X, class Y>
constexpr bool kAnyChunks = std::is_same_v<X, Y> && !std::is_same_v<X, double>;

// Whether a thread's parameters and arithmetic leave registers for more threads.
template <class X, class W>
constexpr bool kFewRegisters = kEarlyParameters<X, W> && !std::is_same_v<X, double>;

// Lanes that may be idle, or rows that are gathered, of four chunks: 64 registers are faster then.
// 645277 x 208 bfloat16 took 139.8 us on an H200 with 80, 136.4 us so, 1118481 x 120 140.4 and
// 134.0 us; but in four lanes of an even number of chunks 1048576 x 128 133.6 and 134.3 us.
template <class X, class Y, class W, int kLanes, int kChunks, bool kVectorized, bool kGathers>
constexpr bool kFourInFewRegisters =
    kVectorized && kOneType<X, Y, W> && kChunks == kRegisterChunks && (kGathers || kLanes == 8);

// Blocks that an SM must hold: 80 registers per thread, or 128 where that would spill; 72 of four
// chunks, in which a lane's chunks that do not exist need not be zero: 316551 x 424 bfloat16 139.4
// us on an H200, 136.7 us so; 64 as above, or in one or two chunks: 8388608 x 16 152.7 us with 80
// and 149.8 us, 131072 x 64 .92 and .95 of a copy.
template <class X, class Y, class W, int kLanes, int kChunks, bool kVectorized, bool kGathers>
constexpr int kShortRowBlocks =
    std::is_same_v<X, double> ? 8
    : kFourInFewRegisters<X, Y, W, kLanes, kChunks, kVectorized, kGathers> ||
            (kVectorized && kOneType<X, Y, W> && kChunks <= 2)
        ? 16
    : kVectorized && kOneType<X, Y, W> && kIs16Bit<X> && kChunks == kRegisterChunks ? 14
    : kGathers && !kEarlyParameters<X, W> && kChunks > kRegisterChunks              ? 10
    : kBySpan<kLanes, kChunks, kVectorized> ||
            (kVectorized && (kEarlyParameters<X, W> || kChunks >= kRegisterChunks))
        ? 12
        : 8;

// kLanes is a constant because the loops over it must unroll: with blockDim.x instead 174764 x 768
// bfloat16 took 148 us on an H200, so 135 us. kGathers: see ShortRowWriter.
template <class X, class Y, class W, int kLanes, int kChunks, bool kVectorized,
          bool kGathers = false>
__global__ void __launch_bounds__(
    kShortRowThreads, (kShortRowBlocks<X, Y, W, kLanes, kChunks, kVectorized, kGathers>))
    forward_short_rows(const ForwardParameters<X, Y, W> p) {
  using A = Accumulator<X>;
  constexpr int kColumns = kChunkColumns<X>;
  // Four chunks in flight per thread, or five.
  constexpr int kRows = kChunks < kRegisterChunks ? kRegisterChunks / kChunks : 1;
  constexpr int kTeams = kWarpSize / kLanes;  // rows side by side in a warp
  start_block(p);
  const int team = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const bool idle = kTeams * kLanes < kWarpSize && team == kTeams;  // a lane that is left over
  const int warp = threadIdx.y;
  const int warps = kShortRowThreads / kWarpSize;
  const int64_t warp_row = (static_cast<int64_t>(blockIdx.x) * warps + warp) * (kTeams * kRows);
  constexpr bool kSpan = kBySpan<kLanes, kChunks, kVectorized>;
  constexpr bool kWhole = kVectorized || kSpan;
  // Weight and bias while registers are free, or chunk by chunk when they are needed.
  constexpr bool kEarly = kEarlyParameters<X, W> && !kSpan && kChunks <= kRegisterChunks;
  constexpr bool kLate = !kEarly && kRows == 1;
  // What a lane does not have is not made zero, nor a missing parameter one or zero where none is
  // missing: 48 of 560 instructions for four chunks. (It takes registers: in 64 it would spill.)
  constexpr bool kTrims = kVectorized && kEarly && kOneType<X, Y, W> &&
                          sizeof(X) < sizeof(double) &&
                          !kFourInFewRegisters<X, Y, W, kLanes, kChunks, kVectorized, kGathers>;
  const int cols = static_cast<int>(p.cols);
  const Share<X, kWhole> share{idle ? cols : lane, kLanes, cols};

  using Writer = ShortRowWriter<Y, kChunks, kColumns, kVectorized, kLanes % 2 == 0, kGathers>;
  using XSpan = SpanStage<kChunks, kLanes>;
  using YSpan = SpanStage<kChunks * (sizeof(Y) > sizeof(X) ? sizeof(Y) / sizeof(X) : 1), kLanes>;
  __shared__ std::conditional_t<kSpan, typename YSpan::Buffer[kTeams], typename Writer::Storage>
      storage[kShortRowThreads / kWarpSize];

  Tile<X, kChunks, kColumns> x[kRows];
  if constexpr (kSpan) {
    const XSpan stage{storage[warp][team].granules};
    const X* const row = p.x + (warp_row + team) * p.x_row_stride;
    stage.fetch(row, warp_row + team < p.rows ? share.cols : 0, p.x_end);
    stage.shift_into(x[0].chunks, row);
  } else {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = warp_row + r * kTeams + team;
      const bool active = row < p.rows && !idle;
      if constexpr (kTrims) {
        x[r].load_plain(p.x + row * p.x_row_stride, share, active);
      } else {
        x[r].load(active ? p.x + row * p.x_row_stride : nullptr, share);
      }
    }
  }
  ParameterTile<W, kChunks, kColumns> parameters;
  // One by one: each team has a partial chunk, but only as its last one.
  const auto load_parameters = [&] {
    if (kTrims && p.plain) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) parameters.load_plain(p.weight, p.bias, share, k);
    } else {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) parameters.load(p.weight, p.bias, share, k);
    }
  };
  if constexpr (kEarly) load_parameters();

  // Adds up what a thread has of each row.
  constexpr bool kSums = kSumsFirst<kColumns, kLanes, kChunks>;
  const auto add_up = [&](auto& threads, bool forgets) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int left = share.left(k);
        Pack<X, kColumns> chunk = x[r].chunks[k];
        if (forgets) forget_unpacked(chunk);
        threads[r].add_chunk(k, chunk, left >= kColumns);
        if (!kWhole && left > 0 && left < kColumns) {
#pragma unroll
          for (int i = 0; i < kColumns; ++i) {
            if (i < left) threads[r].add(chunk.template get<A>(i));
          }
        }
      }
    }
  };
  const auto by_differences = [&](SetMoments<A>(&rows)[kRows]) {
    ChunkMoments<A, kChunks, kColumns> threads[kRows];
    add_up(threads, kSums);
    merge_threads<kLanes>(rows, threads, static_cast<A>(cols), p.inverse_cols);
  };
  SetMoments<A> moments[kRows];
  if constexpr (kSums) {
    ThreadSums<A> threads[kRows];
    add_up(threads, false);
    merge_sums<kLanes>(moments, threads, p.inverse_cols, by_differences);
  } else {
    by_differences(moments);
  }
  Standardizer<A> standardizers[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // 316551 x 424 bfloat16 took 137.9 us on an H200 so, 142.2 us with 80 registers; but of two
    // chunks in a lane 2097152 x 64 134.8 us for 133.9 us.
    if constexpr (kVectorized && kChunks > 2) {
#pragma unroll
      for (auto& chunk : x[r].chunks) forget_unpacked(chunk);
    }
    const int64_t row = warp_row + r * kTeams + team;
    const A rstd = rstd_of(moments[r], p.inverse_cols, p.eps);
    standardizers[r] = {rstd, moments[r].mean};
    if (lane == 0 && !idle && row < p.rows) {
      // (Of more teams than these a warp's stores fill sectors: 8388608 x 16 bfloat16 took 148.0 us
      // on an H200 so, 148.9 us if they last.)
      if constexpr (kTeams <= 8) {
        store_statistics<kLanes * kChunks * kChunkBytes>(p, row, moments[r].mean, rstd);
      } else {
        p.mean[row] = moments[r].mean;
        p.rstd[row] = rstd;
      }
    }
  }

  if constexpr (!kEarly && !kLate) load_parameters();
  const auto y = [&](int r, int k) {
    return normalize<Y>(x[r].chunks[k], standardizers[r], parameters.weight[k], parameters.bias[k]);
  };
  if constexpr (kSpan) {
    const YSpan stage{storage[warp][team].granules};
    stage.open();
    const auto put = [&](auto plain) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        if (share.left(k) > 0) {
          parameters.template load_whole<decltype(plain)::value>(p.weight, p.bias, share, k);
          store_pack(stage.template element<Y>(share.column(k)), y(0, k));
        }
      }
    };
    if (parameters.are_plain(p.weight, p.bias)) {
      put(std::true_type());
    } else {
      put(std::false_type());
    }
    stage.store(p.y + (warp_row + team) * p.cols, warp_row + team < p.rows ? share.cols : 0);
  } else {
    const Writer writer{storage[warp], p.y, p.rows, kTeams, team};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto write = [&](auto plain) {
        writer.write(warp_row + r * kTeams, share, [&](int k) {
          if constexpr (decltype(plain)::value) {
            parameters.load_plain(p.weight, p.bias, share, k);
          } else if constexpr (kLate) {
            parameters.load(p.weight, p.bias, share, k);
          }
          return y(r, k);
        });
      };
      if (kVectorized && kLate && p.plain) {
        write(std::bool_constant<kVectorized && kLate>());
      } else {
        write(std::false_type());
      }
    }
  }
}

// Blocks of kShortRowThreads threads, or as many threads in larger ones, that an SM must hold where
// each has kChunks chunks in registers. With more of them rows that are written as wider types
// spill.
template <class X, class Y, class W, int kChunks, bool kVectorized>
constexpr int kWarpBlocks = kVectorized && sizeof(Y) > sizeof(X) ? (kChunks == 6 ? 10 : 12)
                            : !kEarlyParameters<X, W>            ? (kVectorized ? 12 : 8)
                            : kChunks <= kRegisterChunks         ? 16
                            : kVectorized                        ? (kChunks == 5 ? 16 : 14)
                            : kChunks == 5                       ? 12
                            : kChunks == 6                       ? 10
                                                                 : 8;

// One row per block, or per cluster of blocks. kMaxThreads and kMinBlocks set the registers: with
// 56 an SM holds three blocks of 384 threads, and 12288 columns of bfloat16 took 133 us on an H200
// instead of 143 us with 62.
template <class X, class Y, class W, int kMaxThreads, int kMinBlocks, int kChunks, int kShared,
          bool kCluster, bool kVectorized, RegisterUse kRegisterUse = RegisterUse::kMedium>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks)
    forward_rows(const ForwardParameters<X, Y, W> p) {
  using A = Accumulator<X>;
  constexpr bool kOverhang = !kVectorized && !kCluster;
  constexpr int kMostWarps = kMaxThreads > kMaxThreadsPerRow ? 32 : 16;
  using Tile = RowTile<X, Y, kChunks, kShared, kVectorized, kOverhang, kRegisterUse>;
  using RowSpan = typename Tile::RowSpan;
  extern __shared__ uint4 shared_chunks[];
  __shared__ SetMoments<A> warp_moments[kMaxThreads / kWarpSize];
  __shared__ SetMoments<A> block_moments[kMaxClusterSize];
  start_block(p);
  if constexpr (kCluster) cluster_arrive();  // no block may write into one that has not started

  // Where it saves instructions or spills: of a copy on an H200, 134 MB, 8193 columns of float32
  // .950 -> .975, 6145 of float16 .870 -> .895, 20001 of bfloat16 .78 -> .79. Others pay for the
  // shuffle: 2047 of bfloat16 .914 -> .906.
  constexpr bool kAsks = !kVectorized && (kChunks == kForwardChunks || kMaxThreads == 384 ||
                                          (sizeof(X) == 4 && std::is_same_v<X, Y>));
  const int warp = kAsks ? warp_index() : threadIdx.x / kWarpSize;
  const int rank = kCluster ? cluster_rank() : 0;
  const int64_t row = kCluster ? blockIdx.x / p.cluster_size : blockIdx.x;
  const int block_size = blockDim.x / kWarpSize * RowSpan::kSize;  // columns of a whole block
  const int block_begin = rank * block_size;
  const int begin = block_begin + warp * RowSpan::kSize;
  const int cols = static_cast<int>(p.cols);
  const RowSpan span{begin, cols - begin, static_cast<int>(threadIdx.x % kWarpSize)};
  Tile tile(shared_chunks, span);
  // All warps of a long row but its last one have all their chunks, and nothing behind them: code
  // of their own, by one branch, spares each some 200 of 938 instructions at 16385 columns.
  constexpr bool kSplits = kOverhang && kRegisterUse == RegisterUse::kLow;
  const bool inside = kSplits && p.plain && __all_sync(kAllLanes, span.is_inside());
  // Calls body(inside) with a constant.
  const auto with_inside = [&](const auto& body) {
    if (inside) {
      body(std::bool_constant<kSplits>());
    } else {
      body(std::false_type());
    }
  };
  with_inside([&](auto is_inside) {
    tile.template load<decltype(is_inside)::value>(p.x + row * p.x_row_stride, p.x_end);
  });
  SetMoments<A> moments;
  // Leaves the moments of the block's warps, by differences, where all find them.
  const auto share_moments = [&](auto again) {
    with_inside([&](auto is_inside) {
      moments = tile.template moments<decltype(is_inside)::value, decltype(again)::value>();
    });
    if (span.lane == 0) warp_moments[warp] = moments;
    __syncthreads();
  };
  const auto merge_warps = [&](auto again) {
    share_moments(again);
    const int overhang = kOverhang && cols >= Tile::kColumns ? cols % Tile::kColumns : 0;
    moments = merge_sets<kMostWarps>(warp_moments, cols, RowSpan::kSize, p.inverse_cols, overhang);
  };
  if constexpr (kCluster) {
    share_moments(std::false_type());
    const A block_cols = columns_of_set<A>(cols, block_size, rank);
    moments = merge_sets(warp_moments, static_cast<int>(block_cols), RowSpan::kSize,
                         quotient(A(1), block_cols));
    cluster_wait();
    if (threadIdx.x < p.cluster_size) {
      store_remote(&block_moments[rank].mean, moments.mean, threadIdx.x);
      store_remote(&block_moments[rank].m2, moments.m2, threadIdx.x);
    }
    cluster_arrive();
    cluster_wait();
    moments = merge_sets(block_moments, cols, block_size, p.inverse_cols);
  } else if constexpr (kSumsFirst<Tile::kColumns, kWarpSize, kChunks>) {
    __shared__ WarpSums<kMostWarps> warp_sums;
    with_inside([&](auto is_inside) {
      warp_sums.put(warp, tile.template sums<decltype(is_inside)::value>());
    });
    __syncthreads();
    const bool taken = take_sums(moments, warp_sums.merge(blockDim.x / kWarpSize), p.inverse_cols);
    if (!__all_sync(kAllLanes, taken)) merge_warps(std::true_type());  // all warps of the row
  } else {
    merge_warps(std::false_type());
  }
  const A rstd = rstd_of(moments, p.inverse_cols, p.eps);
  if (threadIdx.x == 0 && rank == 0) {
    p.mean[row] = moments.mean;
    p.rstd[row] = rstd;
  }
  const auto write = [&](auto is_centred, const Standardizer<A>& standardizer) {
    constexpr bool kCentred = decltype(is_centred)::value;
    if (inside) {
      tile.template write<kSplits, kCentred>(p.y + row * p.cols, standardizer, p.weight, p.bias,
                                             p.plain);
    } else {
      tile.template write<false, kCentred>(p.y + row * p.cols, standardizer, p.weight, p.bias,
                                           p.plain);
    }
  };
  // Not where rows may also be aligned: those have the same bits, and are limited by memory. On 92
  // multiprocessors of an H100 10922 x 12289 bfloat16 .963 -> .976 of a copy, 8192 x 16385 .918
  // -> .937, 5461 x 24577 .903 -> .92.
  if constexpr (kSplits) {
    if (__all_sync(kAllLanes, cols % Tile::kColumns != 0 && is_centred(moments, p.inverse_cols))) {
      return write(std::true_type(), {rstd, -moments.mean * rstd});
    }
  }
  write(std::false_type(), {rstd, moments.mean});
}

// One row for each warp of the block.
template <class X, class Y, class W, int kChunks, bool kVectorized>
__global__ void __launch_bounds__(kShortRowThreads, kWarpBlocks<X, Y, W, kChunks, kVectorized>)
    forward_warp_rows(const ForwardParameters<X, Y, W> p) {
  using A = Accumulator<X>;
  // (Of float32 it would be the same, and of mixed dtypes it takes up to half as many registers
  // again.)
  constexpr RegisterUse kUse =
      !kVectorized && kIs16Bit<X> && kOneType<X, Y, W> ? RegisterUse::kHigh : RegisterUse::kMedium;
  using Tile = RowTile<X, Y, kChunks, 0, kVectorized, !kVectorized, kUse>;
  extern __shared__ uint4 shared_chunks[];
  start_block(p);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= p.rows) return;
  const int lane = threadIdx.x;
  Tile tile(shared_chunks + threadIdx.y * Tile::kGranules, {0, static_cast<int>(p.cols), lane});
  tile.load(p.x + row * p.x_row_stride, p.x_end);
  // As forward_short_rows does, which takes such rows too if they are few.
  constexpr bool kSums = kSumsFirst<Tile::kColumns, kWarpSize, kChunks>;
  const auto by_differences = [&](SetMoments<A>(&rows)[1]) {
    rows[0] = tile.template moments<false, kSums>(static_cast<A>(p.cols), p.inverse_cols);
  };
  SetMoments<A> rows[1];
  if constexpr (kSums) {
    const ThreadSums<A> threads[] = {tile.sums()};
    merge_sums<kWarpSize>(rows, threads, p.inverse_cols, by_differences);
  } else {
    by_differences(rows);
  }
  const SetMoments<A> moments = rows[0];
  const A rstd = rstd_of(moments, p.inverse_cols, p.eps);
  if (lane == 0) {
    store_statistics<kWarpSize * kChunks * kChunkBytes>(p, row, moments.mean, rstd);
  }
  tile.write(p.y + row * p.cols, Standardizer<A>{rstd, moments.mean}, p.weight, p.bias, p.plain);
}

// Segments of kSplit: kSegmentThreads threads with kForwardChunks chunks each. Offsets are of 64
// bits, spans are relative to the segment.
template <class X>
struct ForwardSegment {
  using RowSpan = Span<X, kForwardChunks>;
  static constexpr int64_t kSize = int64_t{kSegmentThreads} / kWarpSize * RowSpan::kSize;
  int64_t row, index, begin;
  int cols;
  RowSpan span;

  __device__ __forceinline__ ForwardSegment(int64_t row_cols, int64_t segments)
      : row(blockIdx.x / segments),
        index(blockIdx.x - row * segments),
        begin(index * kSize),
        cols(static_cast<int>(min(kSize, row_cols - begin))) {
    const int warp_begin = warp_index() * RowSpan::kSize;
    span = {warp_begin, cols - warp_begin, static_cast<int>(threadIdx.x % kWarpSize)};
  }
};

template <class X, class Y, bool kVectorized>
using SegmentTile =
    RowTile<X, Y, kForwardChunks, kForwardChunks - kRegisterChunks, kVectorized, false>;

template <class X, class Y, class W, bool kVectorized>
__global__ void __launch_bounds__(kSegmentThreads)
    forward_segment_moments(const ForwardParameters<X, Y, W> p) {
  using A = Accumulator<X>;
  using RowSpan = Span<X, kForwardChunks>;
  extern __shared__ uint4 shared_chunks[];
  __shared__ SetMoments<A> warp_moments[kSegmentThreads / kWarpSize];
  const ForwardSegment<X> segment(p.cols, p.segments);
  SegmentTile<X, Y, kVectorized> tile(shared_chunks, segment.span);
  tile.load(p.x + segment.row * p.x_row_stride + segment.begin, p.x_end);
  const SetMoments<A> moments = tile.moments();
  if (segment.span.lane == 0) warp_moments[threadIdx.x / kWarpSize] = moments;
  __syncthreads();
  if (threadIdx.x >= kWarpSize) return;
  const SetMoments<A> merged = merge_sets(warp_moments, segment.cols, RowSpan::kSize,
                                          quotient(A(1), static_cast<A>(segment.cols)));
  if (threadIdx.x == 0) p.segment_moments[blockIdx.x] = merged;
}

template <class X, class Y, class W, bool kVectorized>
__global__ void __launch_bounds__(kSegmentThreads)
    forward_segment_apply(const ForwardParameters<X, Y, W> p) {
  using A = Accumulator<X>;
  extern __shared__ uint4 shared_chunks[];
  const ForwardSegment<X> segment(p.cols, p.segments);
  SegmentTile<X, Y, kVectorized> tile(shared_chunks, segment.span);
  tile.load(p.x + segment.row * p.x_row_stride + segment.begin, p.x_end);
  const SetMoments<A> moments =
      merge_many_sets<A, int64_t>(p.segment_moments + segment.row * p.segments, p.segments, p.cols,
                                  ForwardSegment<X>::kSize, p.inverse_cols);
  const A rstd = rstd_of(moments, p.inverse_cols, p.eps);
  tile.wait();
  const Standardizer<A> standardizer{rstd, moments.mean};
  tile.write(p.y + segment.row * p.cols + segment.begin, standardizer,
             p.weight == nullptr ? nullptr : p.weight + segment.begin,
             p.bias == nullptr ? nullptr : p.bias + segment.begin, p.plain);
  if (threadIdx.x == 0 && segment.index == 0) {
    p.mean[segment.row] = moments.mean;
    p.rstd[segment.row] = rstd;
  }
}

// The lanes of a row of a warp or less, times ten, and the chunks of a lane.
inline int shape_of(const ForwardPlan& plan) {
  return plan.threads_per_row * 10 + plan.chunks_per_thread;
}

// Launches the kernel for such rows.
template <bool kVectorized, class X, class Y, class W, class LaunchRows>
cudaError_t launch_short_rows(const ForwardPlan& plan, const LaunchRows& launch_rows) {
  const int shape = shape_of(plan);
  if constexpr (kAnyChunks<X, Y>) {
    if constexpr (kIs16Bit<X>) {  // gathered where they are aligned
      switch (shape) {
        case 13:
          return launch_rows(forward_short_rows<X, Y, W, 1, 3, kVectorized, kVectorized>);
        case 15:
          return launch_rows(forward_short_rows<X, Y, W, 1, 5, kVectorized, kVectorized>);
        case 24:
          return launch_rows(forward_short_rows<X, Y, W, 2, 4, kVectorized, kVectorized>);
        case 25:
          return launch_rows(forward_short_rows<X, Y, W, 2, 5, kVectorized, kVectorized>);
      }
    }
    if constexpr (kVectorized) {
      if (plan.gathers && shape == 44) {
        return launch_rows(forward_short_rows<X, Y, W, 4, 4, true, true>);
      }
      if (plan.gathers && shape == 45) {
        return launch_rows(forward_short_rows<X, Y, W, 4, 5, true, true>);
      }
    }
    switch (shape) {
      case 21:
        return launch_rows(forward_short_rows<X, Y, W, 2, 1, kVectorized>);
      case 43:
        return launch_rows(forward_short_rows<X, Y, W, 4, 3, kVectorized>);
      case 45:
        return launch_rows(forward_short_rows<X, Y, W, 4, 5, kVectorized>);
      case 83:
        return launch_rows(forward_short_rows<X, Y, W, 8, 3, kVectorized>);
      case 85:
        return launch_rows(forward_short_rows<X, Y, W, 8, 5, kVectorized>);
      case 105:
        if constexpr (kOneType<X, Y, W>) {
          return launch_rows(forward_short_rows<X, Y, W, 10, 5, kVectorized>);
        }
        break;
      case 163:
        return launch_rows(forward_short_rows<X, Y, W, 16, 3, kVectorized>);
      case 165:
        return launch_rows(forward_short_rows<X, Y, W, 16, 5, kVectorized>);
    }
  }
  switch (shape) {
    case 11:
      return launch_rows(forward_short_rows<X, Y, W, 1, 1, kVectorized>);
    case 22:
      return launch_rows(forward_short_rows<X, Y, W, 2, 2, kVectorized>);
    case 42:
      return launch_rows(forward_short_rows<X, Y, W, 4, 2, kVectorized>);
    case 44:
      return launch_rows(forward_short_rows<X, Y, W, 4, 4, kVectorized>);
    case 84:
      return launch_rows(forward_short_rows<X, Y, W, 8, 4, kVectorized>);
    case 164:
      return launch_rows(forward_short_rows<X, Y, W, 16, 4, kVectorized>);
    case 323:
      return launch_rows(forward_short_rows<X, Y, W, 32, 3, kVectorized>);
    case 324:
      return launch_rows(forward_short_rows<X, Y, W, 32, 4, kVectorized>);
  }
  // Two chunks of whole ones are in a lane each.
  if constexpr (!kVectorized || !kAnyChunks<X, Y>) {
    if (shape == 12) return launch_rows(forward_short_rows<X, Y, W, 1, 2, kVectorized>);
  }
  if constexpr (!kVectorized) {
    switch (shape) {
      case 82:
        return launch_rows(forward_short_rows<X, Y, W, 8, 2, false>);
      case 162:
        return launch_rows(forward_short_rows<X, Y, W, 16, 2, false>);
      case 322:
        return launch_rows(forward_short_rows<X, Y, W, 32, 2, false>);
    }
  }
  return cudaErrorInvalidValue;
}

// Whether rows in registers may have more than 512 threads (see most_row_threads in
// plan_forward.cpp).
template <class X, class Y, class W>
constexpr bool kHasWideBlocks = kOneType<X, Y, W> && !std::is_same_v<X, double>;

// Launches the kernel for rows with kRegisterChunks chunks in each thread's registers.
//
// With 40 registers, three blocks of 512 threads find a place on an SM. Of 268 MB on an H200, with
// two of them and so: aligned bfloat16 12544 columns 147.0 and 132.7 us, 14336 140.5 and 134.1 us,
// 16384 136.0 and 134.4 us; with float32 parameters 12288 144.4 and 138.3 us, 16384 153.2 and 143.3
// us, but 8192 135.0 and 136.4 us.
//
// Long 16-bit rows that are not aligned have code of their own for warps inside a row, and x
// unpacked anew for y, without which that spills 100 to 300 bytes of 40 registers (so 16). Of a
// copy on an H200, 268 MB, before and so: bfloat16 8191 columns .925 and .927, 10001 .873 and .905,
// 12289 .901 and .937, 14001 .860 and .894, 16385 .866 and .903; float16 7501 .833 and .894, 8191
// .879 and .949, 10001 .808 and .923, 12289 .881 and .949, 14001 .798 and .902, 16385 .824 and .909
// (on an H100 14001 .84 and .98). Shorter ones lose by it: 3001 .92 and .83, 5001 .92 and .88.
//
// More than 512 threads have 40 registers in any case, for two blocks on an SM. Of a copy on an
// H100, with eight chunks in each of half as many threads, in the ring if aligned, and so: bfloat16
// 16392 columns .93 and .98, 18432 .94 and .99, 24576 .95 and .985, 18001 .88 and .95, 22001 .895
// and .95, 24577 .845 and .94; float16 20001 .88 and .955; float32 8200 .95 and .99, 12288 .955 and
// .99, 8201 .94 and 1.00, 12289 .885 and .99. (On an H200, in two runs, float32 12288 .934 and
// .987.) A thousand threads with 32 registers: bfloat16 28160 .96 and .83, float32 16384 .96 and
// .915.
template <bool kVectorized, class X, class Y, class W, class LaunchRows>
cudaError_t launch_register_rows(const ForwardPlan& plan, const LaunchRows& launch_rows) {
  const int threads = plan.threads_per_row;
  constexpr int kChunks = kRegisterChunks;
  constexpr bool kWideY = sizeof(Y) > sizeof(X);
  constexpr bool kFew = kFewRegisters<X, W>;
  if constexpr (kHasWideBlocks<X, Y, W>) {
    if (threads > kMaxThreadsPerRow) {
      constexpr RegisterUse kUse = kIs16Bit<X> ? RegisterUse::kLow : RegisterUse::kMedium;
      return launch_rows(
          forward_rows<X, Y, W, kMaxRowThreads, 2, kChunks, 0, false, kVectorized, kUse>);
    }
  }
  if constexpr (kVectorized && kIs16Bit<X> && !kWideY) {
    if (threads > (kFew ? 384 : 256)) {
      return launch_rows(forward_rows<X, Y, W, 512, 3, kChunks, 0, false, true, RegisterUse::kLow>);
    }
    if constexpr (kFew) {
      // 131072 x 1600, with a fifth of 64 threads idle, reached .92 of a copy with 64 registers and
      // .98 with 56; these 48 were not measured there.
      if (threads > 256 || plan.more_warps) {
        return launch_rows(
            forward_rows<X, Y, W, 384, 3, kChunks, 0, false, true, RegisterUse::kLow>);
      }
    }
    constexpr RegisterUse kUse = kFew ? RegisterUse::kHigh : RegisterUse::kLow;
    return launch_rows(forward_rows<X, Y, W, 512, 2, kChunks, 0, false, true, kUse>);
  } else if constexpr (!kVectorized && kFew) {
    if constexpr (kIs16Bit<X> && !kWideY) {
      constexpr int kShort = 192;
      if (threads > kShort) {
        return launch_rows(
            forward_rows<X, Y, W, 512, 3, kChunks, 0, false, false, RegisterUse::kLow>);
      }
      // Short ones are as well off in 56 registers, and bfloat16 with parameters read with less
      // ado: of 268 MB on an H200 2601 columns .80 -> .82 of a copy, 4095 .91 -> .925. (Float16
      // spills.)
      constexpr RegisterUse kUse = std::is_same_v<X, BFloat16> && kOneType<X, Y, W>
                                       ? RegisterUse::kHigh
                                       : RegisterUse::kMedium;
      return launch_rows(forward_rows<X, Y, W, 384, 3, kChunks, 0, false, false, kUse>);
    } else {
      if constexpr (kWideY) {
        if (threads <= 384) {
          return launch_rows(forward_rows<X, Y, W, 384, 3, kChunks, 0, false, false>);
        }
      }
      return launch_rows(forward_rows<X, Y, W, 512, 3, kChunks, 0, false, false>);
    }
  } else {
    constexpr int kNarrowBlocks = kVectorized && kFew && !kWideY ? 3 : 2;
    constexpr int kWideBlocks = kVectorized ? 2 : 1;
    const auto narrow = forward_rows<X, Y, W, 384, kNarrowBlocks, kChunks, 0, false, kVectorized>;
    if (threads <= 384) return launch_rows(narrow);
    const auto wide = forward_rows<X, Y, W, 512, kWideBlocks, kChunks, 0, false, kVectorized>;
    return launch_rows(wide);
  }
}

template <bool kVectorized, class X, class Y, class W>
cudaError_t launch_forward(const ForwardParameters<X, Y, W>& p, const ForwardPlan& plan,
                           cudaStream_t stream) {
  const dim3 threads = plan.in_bulk ? dim3(kBulkRowThreads)
                       : plan.kernel == Kernel::kShortRows
                           ? dim3(kWarpSize, kShortRowThreads / kWarpSize)
                           : dim3(plan.threads_per_row, plan.rows_per_block / plan.rows_per_thread);
  const auto launch_rows = [&](auto kernel) {
    // More shared memory than 48 KB, the kernel's own included, has to be asked for.
    constexpr int kFreeBytes = 44 * 1024;
    if (plan.shared_bytes > kFreeBytes) {
      const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
      if (error != cudaSuccess) return error;
    }
    return launch_in_turns(kernel, threads, p, plan, stream);
  };
  // Blocks of 512 threads with kForwardChunks each that an SM holds at the least: fewer where more
  // registers are needed.
  constexpr bool kNarrow = kEarlyParameters<X, W> && sizeof(Y) <= sizeof(X);
  constexpr bool kFew = kFewRegisters<X, W>;
  constexpr int kBlocks = kVectorized ? (kNarrow ? 3 : 2) : (kFew ? 2 : 1);
  // In clusters three of float64 spill: 4096 x 16384 345 us on an H200 so, 335 us of two.
  constexpr int kClusterBlocks = std::is_same_v<X, double> ? std::min(kBlocks, 2) : kBlocks;
  // Whether there are rows of three, four and seven chunks in a lane of one warp.
  constexpr bool kAny = kIs16Bit<X> && kOneType<X, Y, W>;
  constexpr int kShared = forward_shared_chunks(kForwardChunks, kVectorized);
  switch (plan.kernel) {
    case Kernel::kShortRows:
      if constexpr (kVectorized && kAnyChunks<X, Y>) {
        if (plan.in_bulk) return launch_bulk_rows<X, W>(shape_of(plan), launch_rows);
      }
      return launch_short_rows<kVectorized, X, Y, W>(plan, launch_rows);
    case Kernel::kRows:
      if (plan.rows_per_block > 1) {  // in a warp each
        switch (plan.chunks_per_thread) {
          case 5:
            return launch_rows(forward_warp_rows<X, Y, W, 5, kVectorized>);
          case 6:
            return launch_rows(forward_warp_rows<X, Y, W, 6, kVectorized>);
        }
        if constexpr (!kVectorized || kAny) {
          if (plan.chunks_per_thread == 4) {
            return launch_rows(forward_warp_rows<X, Y, W, 4, kVectorized>);
          }
        }
        if constexpr (kVectorized && kAny) {
          if (plan.chunks_per_thread == 3) return launch_rows(forward_warp_rows<X, Y, W, 3, true>);
        }
        if constexpr (kAny) return launch_rows(forward_warp_rows<X, Y, W, 7, kVectorized>);
        return cudaErrorInvalidValue;
      }
      if (plan.chunks_per_thread == 5) {
        // (Not aligned, 80 registers would spill.)
        constexpr int kFiveBlocks = kVectorized ? kWarpBlocks<X, Y, W, 5, true> / 2 : kFew ? 5 : 4;
        return launch_rows(forward_rows<X, Y, W, 128, kFiveBlocks, 5, 0, false, kVectorized>);
      }
      if constexpr (kAny) {
        if (plan.chunks_per_thread == 7) {
          constexpr int kSevenBlocks = kVectorized ? 8 : 4;
          return launch_rows(forward_rows<X, Y, W, 128, kSevenBlocks, 7, 0, false, kVectorized>);
        }
      }
      if (plan.chunks_per_thread == kRegisterChunks) {
        return launch_register_rows<kVectorized, X, Y, W>(plan, launch_rows);
      }
      return launch_rows(forward_rows<X, Y, W, 512, kBlocks, 8, kShared, false, kVectorized>);
    case Kernel::kCluster:
      return launch_rows(forward_rows<X, Y, W, 512, kClusterBlocks, 8, kShared, true, kVectorized>);
    case Kernel::kSplit: {
      Launch launch(plan.blocks, threads, stream);
      launch.with_shared(plan.shared_bytes);
      const cudaError_t error = launch(forward_segment_moments<X, Y, W, kVectorized>, p);
      if (error != cudaSuccess) return error;
      return launch(forward_segment_apply<X, Y, W, kVectorized>, p);
    }
    case Kernel::kElements:
      if constexpr (std::is_same_v<X, Y> && !std::is_same_v<X, double>) {
        return launch_elements<X, W>(p, plan, stream);
      }
      break;
    case Kernel::kFewRows:
    case Kernel::kRing:
      break;
  }
  return cudaErrorInvalidValue;
}

// Rows of X to rows of Y: finds the type of the parameters, and launches.
template <class X, class Y>
cudaError_t forward_to(const ForwardArgs& args, const ForwardPlan& plan, void* workspace,
                       cudaStream_t stream) {
  using A = Accumulator<X>;
  const DType parameter_dtype = args.weight != nullptr ? args.weight_dtype : args.bias_dtype;
  return visit_parameter<X>(parameter_dtype, [&](auto parameter_type) {
    using W = typename decltype(parameter_type)::type;
    ForwardParameters<X, Y, W> p;
    static_assert(sizeof(p) <= 128 || sizeof(A) == 8);
    p.rows = args.rows;
    p.cols = args.cols;
    p.eps = static_cast<A>(args.eps);
    p.inverse_cols = static_cast<A>(1.0 / static_cast<double>(args.cols));
    if (args.cols == 0) {  // the mean of no columns is zero, their variance not a number
      p.inverse_cols = 0;
      p.eps = std::numeric_limits<A>::quiet_NaN();
    }
    p.x = static_cast<const X*>(args.x);
    p.x_row_stride = args.x_row_stride;
    p.x_end = p.x + std::max<int64_t>(0, (args.rows - 1) * args.x_row_stride) + args.cols;
    p.weight = static_cast<const W*>(args.weight);
    p.bias = static_cast<const W*>(args.bias);
    const auto is_plain = [](const W* parameters) {
      return parameters != nullptr &&
             reinterpret_cast<uintptr_t>(parameters) % alignof(Pack<W, kChunkColumns<X>>) == 0;
    };
    p.plain = is_plain(p.weight) && is_plain(p.bias);
    p.y = static_cast<Y*>(args.y);
    p.mean = static_cast<A*>(args.mean);
    p.rstd = static_cast<A*>(args.rstd);
    p.segment_moments = static_cast<SetMoments<A>*>(workspace);
    p.segments = static_cast<int>(plan.segments);
    p.cluster_size = plan.cluster_size;
    return plan.vectorized ? launch_forward<true>(p, plan, stream)
                           : launch_forward<false>(p, plan, stream);
  });
}

// 16-bit rows that are written in another dtype, two thirds of what there is to compile for them,
// have sources of their own.
extern template cudaError_t forward_to<Half, float>(const ForwardArgs&, const ForwardPlan&, void*,
                                                    cudaStream_t);
extern template cudaError_t forward_to<Half, BFloat16>(const ForwardArgs&, const ForwardPlan&,
                                                       void*, cudaStream_t);
extern template cudaError_t forward_to<BFloat16, float>(const ForwardArgs&, const ForwardPlan&,
                                                        void*, cudaStream_t);
extern template cudaError_t forward_to<BFloat16, Half>(const ForwardArgs&, const ForwardPlan&,
                                                       void*, cudaStream_t);

// Rows of X: finds the type of y.
template <class X>
cudaError_t forward_of(const ForwardArgs& args, const ForwardPlan& plan, void* workspace,
                       cudaStream_t stream) {
  if constexpr (!std::is_same_v<X, double>) {
    if (plan.kernel == Kernel::kRing) return launch_forward_ring<X>(args, plan, workspace, stream);
  }
  if constexpr (kIs16Bit<X>) {
    if (plan.bulk_stages > 0) return launch_forward_wide<X>(args, plan, stream);
  }
  return visit_other<X>(args.y_dtype, [&](auto y_type) {
    return forward_to<X, typename decltype(y_type)::type>(args, plan, workspace, stream);
  });
}

// One instantiation file per dtype of x.
extern template cudaError_t forward_of<float>(const ForwardArgs&, const ForwardPlan&, void*,
                                              cudaStream_t);
extern template cudaError_t forward_of<Half>(const ForwardArgs&, const ForwardPlan&, void*,
                                             cudaStream_t);
extern template cudaError_t forward_of<BFloat16>(const ForwardArgs&, const ForwardPlan&, void*,
                                                 cudaStream_t);
extern template cudaError_t forward_of<double>(const ForwardArgs&, const ForwardPlan&, void*,
                                               cudaStream_t);

}  // namespace fastnorm::cuda
