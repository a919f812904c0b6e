// The forward of rows that fit in registers and shared memory: each is read once, and stays packed
// with the threads that hold it.
//
// Lanes, warps and blocks take the moments of what they hold and merge them. forward_short_rows: a
// row in the lanes of a warp or fewer. forward_rows: in the warps of a block or of a cluster of
// blocks. forward_warp_rows: in one warp.
#pragma once

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
        put_statistics(p, row, moments[r].mean, rstd);
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
  // While rows are on their way, where registers leave room for it.
  constexpr bool kSendsLate = kVectorized && kEarlyParameters<X, W>;
  if constexpr (!kCluster && !kSendsLate) send_for_late_parameters(p);
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
  if constexpr (!kCluster && kSendsLate) send_for_late_parameters(p);
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
  if (threadIdx.x == 0 && rank == 0) put_statistics(p, row, moments.mean, rstd);
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
  send_for_late_parameters(p);
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

}  // namespace fastnorm::cuda
