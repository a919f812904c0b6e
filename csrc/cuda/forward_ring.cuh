// The forward of rows that a block or a cluster of blocks holds, by blocks that stay. The order of
// summation is that of forward_rows, so that results are the same bit for bit; but long 16-bit rows
// with float32 parameters are always here, in fewer chunks for each thread. Rows that no cluster
// holds are shared by blocks of a grid that runs as a whole.
//
// Every thread copies its own chunks of the rows to come into a ring in shared memory, reads them
// twice from there (for the moments, then for y) and refills the slot. As threads read only what
// they, or in unaligned rows their warp, copied themselves, the ring needs no barrier. Weight and
// bias stay in registers, packed: read again for each row they take as much of the L2 cache's
// bandwidth as two rows of x.
//
// Moments are exchanged through barriers in shared memory, one row ahead: a warp posts those of row
// i + 1 before it waits for all of row i's. The warps of a block take turns in merging what the
// block has and sending it to all blocks of the cluster, or a warp does nothing else; in a grid one
// always does, and moments may be posted two or three rows ahead.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>
#include <utility>

#include "async.cuh"
#include "forward_parameters.cuh"
#include "grid_exchange.cuh"
#include "launch.cuh"
#include "pace.cuh"
#include "row_tile.cuh"

namespace fastnorm::cuda {

template <class X, class W>
struct ForwardRingParameters {
  int64_t rows;
  int cols;
  float eps;
  float inverse_cols;
  int most_ahead;  // see ForwardPlan
  const X* x;
  const X* x_end;  // of the last row
  int64_t x_row_stride;
  int64_t x_step, y_step;  // bytes between a cluster's rows
  const W* weight;
  const W* bias;
  X* y;
  float* mean;
  float* rstd;
  int clusters;  // each with a row at a time
  int cluster_size;
  int warps;          // of a block, with columns
  int filled_blocks;  // those of a cluster that have columns
  uint4* exchange;    // kGrid: [clusters][kGridExchanges][cluster_size]
};

constexpr int kForwardExchanges = 4;  // rows whose moments may be on their way at once
constexpr int kForwardWarps = kMaxThreadsPerRow / kWarpSize;  // of a block

// Chunks of each lane.
template <class X, class W>
constexpr int kForwardRingChunks = sizeof(W) == sizeof(X) ? kForwardChunks : kWideRingChunks;

// The largest block, a warp that only exchanges moments included.
template <class X, class W, int kAhead>
constexpr int kForwardRingThreads = sizeof(W) > sizeof(X) ? kMaxWideThreads
                                    : kAhead == 2         ? kTwoAheadThreads + kWarpSize
                                    : kAhead > 2          ? kAheadThreads + kWarpSize
                                                          : kMaxThreadsPerRow;

// Rows under way, those being summed and written among them. (With one more and with two, where
// float32 parameters leave room for that, 20480 columns reached .92 and .90 of a copy on an H200
// for .93, 40960 .905 and .83 for .915, 20001 .825 and .695 for .85, but 24576 .93 and .94 for
// .88.)
template <int kAhead>
constexpr int kForwardStages = kAhead + 2;

// Granules of a row and warp. An unaligned row reaches into one more.
template <int kChunks, bool kVectorized>
constexpr int kForwardGranules = kWarpSize * kChunks + (kVectorized ? 0 : 1);

template <int kChunks, bool kVectorized, int kAhead>
constexpr int kForwardRingBytes =
    kForwardStages<kAhead> * kForwardGranules<kChunks, kVectorized> * kChunkBytes;

// Chunks of an unaligned row that are shifted together.
template <int kChunks>
constexpr int kForwardTogether = kChunks % 2 == 0 ? 2 : 1;

// Writes a warp's chunks, `bytes` bytes that begin at this lane's `slot`, to memory that starts at
// any element: in whole granules but for the first and the last one. The whole warp comes here.
// kSkips: see forward_ring.
template <int kSize, int kChunks, bool kSkips>
__device__ __forceinline__ void write_unaligned(char* target, unsigned slot, int bytes) {
  constexpr int kStep = kWarpSize * kChunkBytes;
  constexpr int kTogether = kForwardTogether<kChunks>;
  const int lane = threadIdx.x % kWarpSize;
  const int shifted = static_cast<int>(reinterpret_cast<uintptr_t>(target) % kChunkBytes);
  const bool whole = bytes == kChunks * kStep;
  char* const granules = target + lane * kChunkBytes - shifted;
  // Granule j of device memory has the last bytes of chunk j - 1 and the first of chunk j.
#pragma unroll
  for (int k = 0; k < kChunks; k += kTogether) {
    if (kSkips && k == kChunks / 2 && bytes + kChunkBytes <= k * kStep) break;
    Granule chunks[kTogether];
    if (shifted == 0) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) chunks[j] = load_shared(slot + (k + j) * kStep);
    } else {
      Granule before[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        chunks[j] = load_shared(slot + (k + j) * kStep);
        const bool first = k + j == 0 && lane == 0;
        before[j] = load_shared(slot + (k + j) * kStep - (first ? 0 : kChunkBytes));
      }
      with_offset(kChunkBytes - shifted, [&](auto word, int bits) {
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          chunks[j] = shift<decltype(word)::value>(before[j], chunks[j], bits);
        }
      });
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int at = (k + j) * kStep + lane * kChunkBytes - shifted;
      if ((k + j > 0 || at >= 0) && (whole || at + kChunkBytes <= bytes)) {
        *reinterpret_cast<uint4*>(granules + (k + j) * kStep) = make_uint4(
            chunks[j].words[0], chunks[j].words[1], chunks[j].words[2], chunks[j].words[3]);
      }
    }
  }
  // The elements before the first whole granule and after the last one.
  const int head = shifted > 0 ? min(kChunkBytes - shifted, bytes) : 0;
  const int tail = (bytes + shifted) / kChunkBytes * kChunkBytes - shifted;
  const int at = lane * kSize;
  const unsigned start = slot - lane * kChunkBytes;
  if (at < head) store_element<kSize>(target + at, start + at);
  if (tail >= 0 && at < kChunkBytes && tail + at < bytes) {
    store_element<kSize>(target + tail + at, start + tail + at);
  }
}

// Which blocks hold a row together: those of a cluster, or of a grid that runs as a whole. In a
// served cluster and in a grid each of them has a warp more, which only exchanges moments. Paced
// ones are kept from drifting apart: that takes a register, which others should not miss.
enum class ForwardSpan { kCluster, kPacedCluster, kServedCluster, kGrid };

template <ForwardSpan kSpan>
constexpr bool kIsServed = kSpan == ForwardSpan::kServedCluster || kSpan == ForwardSpan::kGrid;

// The exchange of a row's moments within its cluster. One warp of each block merges what all have
// posted and sends it to all blocks: each by turns, or one that does nothing else (kServed), and
// then also merges what blocks send.
template <bool kServed>
class MomentsExchange {
 public:
  using Set = SetMoments<float>;

  struct Storage {
    // [exchange][warp of the block] and [exchange][block of the cluster]: a mean and an m2 each
    alignas(16) float warps[kForwardExchanges][kForwardWarps][2];
    float blocks[kForwardExchanges][kLargeClusterSize][2];
    float2 rows[kForwardExchanges];  // of all blocks, that a warp of its own has collected
    uint64_t warp_barriers[kForwardExchanges];
    uint64_t block_barriers[kForwardExchanges];
    uint64_t row_barriers[kForwardExchanges];
  };

  // All threads of the block must come here, and then meet at a barrier of the cluster.
  // `warps` that have columns, `size` of them each.
  __device__ __forceinline__ MomentsExchange(Storage& storage, int warp, int warps, int size,
                                             int cols, float inverse_cols, int cluster_size)
      : storage_(storage),
        warp_(warp),
        warps_(warps),
        size_(size),
        cols_(cols),
        inverse_cols_(inverse_cols),
        cluster_size_(cluster_size) {
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int i = 0; i < kForwardExchanges; ++i) {
        init_barrier(shared_address(&storage.warp_barriers[i]), kWarpSize * warps_);
        init_barrier(shared_address(&storage.block_barriers[i]), 1);
        init_barrier(shared_address(&storage.row_barriers[i]), kWarpSize);
      }
      publish_barriers();
    }
  }

  __device__ __forceinline__ void post(int row, const Set& moments) {
    const int turn = row % kForwardExchanges;
    // The turn's last row has long been relayed: by a warp that has since posted row - 2, which
    // this warp has collected. Where it is served, a wait has told it so; where not, this one says
    // it to who looks for races. (By one lane, the loop would leave it open to ptxas whether the
    // warp's lanes are still together.)
    if (!kServed && row >= 2) {
      const int before = row - 2;
      wait_barrier<false>(shared_address(&storage_.warp_barriers[before % kForwardExchanges]),
                          phase(before));
    }
    if (threadIdx.x % kWarpSize == 0) *sets(storage_.warps[turn][warp_]) = moments;
    // By every lane, for each has read what others post anew behind this barrier.
    arrive(shared_address(&storage_.warp_barriers[turn]));
  }

  // After post and before collect.
  __device__ __forceinline__ void relay(int row) const {
    if (!kServed && row % warps_ == warp_) send(row);
  }

  // The moments of a row.
  __device__ __forceinline__ Set collect(int row) const {
    if constexpr (!kServed) return receive(row);
    const int turn = row % kForwardExchanges;
    wait_barrier<false>(shared_address(&storage_.row_barriers[turn]), phase(row));
    const volatile float2& moments = storage_.rows[turn];
    return {moments.x, moments.y};
  }

  // What a warp of its own does for `count` rows.
  __device__ __forceinline__ void serve(int count) const {
    send(0);
#pragma unroll 1
    for (int row = 0; row < count; ++row) {
      const Set moments = receive(row);
      if (threadIdx.x % kWarpSize == 0) {
        storage_.rows[row % kForwardExchanges] = make_float2(moments.mean, moments.m2);
      }
      // By every lane, for each has read what the block's warps had posted, which they post anew.
      arrive(shared_address(&storage_.row_barriers[row % kForwardExchanges]));
      if (row + 1 < count) send(row + 1);
    }
  }

 private:
  Storage& storage_;
  const int warp_, warps_, size_, cols_;
  const float inverse_cols_;
  const int cluster_size_;

  static __device__ __forceinline__ Set* sets(float* first) {
    return reinterpret_cast<Set*>(first);
  }
  static __device__ __forceinline__ int phase(int row) { return row / kForwardExchanges % 2; }

  __device__ __forceinline__ void send(int row) const {
    const int turn = row % kForwardExchanges;
    const int lane = threadIdx.x % kWarpSize;
    const int rank = cluster_rank();
    const int block_size = warps_ * size_;
    const float block_cols = columns_of_set<float>(cols_, block_size, rank);
    const unsigned barrier = shared_address(&storage_.block_barriers[turn]);
    const bool alone = cluster_size_ == 1;
    if (!alone && lane == 0) {
      arrive_and_expect(barrier, cluster_size_ * static_cast<int>(sizeof(Set)));
    }
    wait_barrier<false>(shared_address(&storage_.warp_barriers[turn]), phase(row));
    const float inverse = alone ? inverse_cols_ : quotient(1.f, block_cols);
    const Set moments =
        merge_sets(sets(storage_.warps[turn][0]), static_cast<int>(block_cols), size_, inverse);
    if (alone) {  // st.async is for clusters
      if (lane == 0) {
        *sets(storage_.blocks[turn][0]) = moments;
        arrive(barrier);
      }
    } else if (lane < cluster_size_) {
      store_async(remote_address(shared_address(&storage_.blocks[turn][rank]), lane), moments.mean,
                  moments.m2, remote_address(barrier, lane));
    }
  }

  __device__ __forceinline__ Set receive(int row) const {
    const int turn = row % kForwardExchanges;
    wait_barrier<true>(shared_address(&storage_.block_barriers[turn]), phase(row));
    return merge_sets(sets(storage_.blocks[turn][0]), cols_, warps_ * size_, inverse_cols_);
  }
};

// The same between blocks of a grid that runs as a whole, each of which has a warp for it.
class GridMomentsExchange : public GridExchange {
 public:
  using Set = SetMoments<float>;

  struct Storage : GridExchange::Storage {
    Set blocks[kMaxGridBlocks];
  };

  // All threads of the block must come here, and then meet those of the whole grid. `warps` that
  // have columns, `size` of them each; `filled`: blocks that have columns.
  __device__ __forceinline__ GridMomentsExchange(Storage& storage, const GridPlace& place, int warp,
                                                 int warps, int size, int cols, float inverse_cols,
                                                 int filled)
      : GridExchange(storage, place, warps),
        blocks_(storage.blocks),
        place_(place),
        warp_(warp),
        size_(size),
        block_size_(warps * size),
        cols_(cols),
        inverse_cols_(inverse_cols),
        filled_(filled) {}

  __device__ __forceinline__ void post(int row, const Set& moments) const {
    if (threadIdx.x % kWarpSize == 0) {
      sets(warps(row))[warp_] = moments;
      arrive_at(row);
    }
  }

  // The moments of a row.
  __device__ __forceinline__ Set collect(int row) const {
    const float2 moments = wait_for(row);
    return {moments.x, moments.y};
  }

  __device__ __forceinline__ void serve(int ahead, int count) const {
    GridExchange::serve(
        place_, ahead, count, [&](float* numbers) { return of_warps(numbers); },
        [&](const GridWord(&words)[kWordsOfLane]) { return of_blocks(words); });
  }

 private:
  Set* const blocks_;
  const GridPlace place_;
  const int warp_, size_, block_size_, cols_;
  const float inverse_cols_;
  const int filled_;

  static __device__ __forceinline__ Set* sets(float* first) {
    return reinterpret_cast<Set*>(first);
  }
  __device__ __forceinline__ float2 of_warps(float* numbers) const {
    const float block_cols = columns_of_set<float>(cols_, block_size_, place_.rank);
    const Set set =
        merge_sets(sets(numbers), static_cast<int>(block_cols), size_, quotient(1.f, block_cols));
    return make_float2(set.mean, set.m2);
  }
  __device__ __forceinline__ float2 of_blocks(const GridWord (&words)[kWordsOfLane]) const {
#pragma unroll
    for (int j = 0; j < kWordsOfLane; ++j) {
      const int block = threadIdx.x % kWarpSize + j * kWarpSize;
      if (block < filled_) blocks_[block] = {words[j].first, words[j].second};
    }
    __syncwarp();
    // In the same order as those of a cluster.
    const Set set = filled_ <= kLargeClusterSize
                        ? merge_sets(blocks_, cols_, block_size_, inverse_cols_)
                        : merge_many_sets(blocks_, filled_, cols_, block_size_, inverse_cols_);
    return make_float2(set.mean, set.m2);
  }
};

// kAhead: rows whose moments are posted before a row is written.
template <class X, class W, bool kVectorized, ForwardSpan kSpan, int kAhead>
__global__ void __launch_bounds__(kForwardRingThreads<X, W, kAhead>, 1)
    forward_ring(const ForwardRingParameters<X, W> p) {
  if (!kStreams) return;
  constexpr int kColumns = kChunkColumns<X>;
  constexpr int kSize = static_cast<int>(sizeof(X));
  constexpr int kChunks = kForwardRingChunks<X, W>;
  constexpr int kStages = kForwardStages<kAhead>;
  constexpr unsigned kStageBytes = kForwardGranules<kChunks, kVectorized> * kChunkBytes;
  constexpr unsigned kStep = kWarpSize * kChunkBytes;  // between a lane's chunks
  constexpr int kTogether = kForwardTogether<kChunks>;
  using Chunk = Pack<X, kColumns>;
  using RowSpan = Span<X, kChunks>;
  using Set = SetMoments<float>;
  constexpr bool kGrid = kSpan == ForwardSpan::kGrid, kServed = kIsServed<kSpan>;
  using Exchange = std::conditional_t<kGrid, GridMomentsExchange, MomentsExchange<kServed>>;
  // Whether a row's last warp leaves out the second half of its chunks where it has none of them:
  // it has more to ask than others, and all of them wait for it. 4096 x 50257 bfloat16 .81 of a
  // copy on an H200 and .84 so, 33001 columns .67 and .74. (Without a warp that exchanges it
  // spills. In a grid 65537 columns .775 and .81, but 98001 .81 and .78, whose last warp has more
  // than half.)
  constexpr bool kSkips = kSpan == ForwardSpan::kServedCluster && !kVectorized;
  constexpr int kHalf = kChunks / 2;
  extern __shared__ __align__(16) unsigned char ring_memory[];
#pragma nv_diag_suppress 20054  // a set's initial values, which are not needed
  __shared__ typename Exchange::Storage storage;
#pragma nv_diag_default 20054

  // Who owns what: as in forward_rows.
  // Aligned rows are limited by memory: 1024 x 131072 float32 .96 of a copy on an H200 so, .94 if
  // ptxas knows that warps are whole; but 4096 x 50257 bfloat16 .78 and .83.
  constexpr bool kAsks = !kVectorized || (kGrid && kIs16Bit<X>);
  const int warp = kAsks ? warp_index() : threadIdx.x / kWarpSize;
  // Spills less, in 16-bit rows.
  const int lane = kServed && kAsks ? lane_index() : threadIdx.x % kWarpSize;
  const int rank = kGrid ? static_cast<int>(blockIdx.x) % p.cluster_size : cluster_rank();
  const int warps = kServed ? p.warps : static_cast<int>(blockDim.x / kWarpSize);
  const int begin = (rank * warps + warp) * RowSpan::kSize;
  const RowSpan span{begin, p.cols - begin, lane};
  const bool whole = span.whole();
  const int run = max(0, min(span.cols, RowSpan::kSize));  // columns of the warp

  // Rows of this cluster: `first`, first + clusters, ...; `count` of them.
  const int first = blockIdx.x / p.cluster_size;
  const int count = static_cast<int>((p.rows - 1 - first) / p.clusters) + 1;

  const unsigned ring = shared_address(ring_memory) +
                        warp * kForwardRingBytes<kChunks, kVectorized, kAhead> + lane * kChunkBytes;
  const auto next_slot = [&](unsigned slot) {
    slot += kStageBytes;
    return slot == ring + kStages * kStageBytes ? ring : slot;
  };

  // ---- copies into the ring

  // Of the warp's run in the row to be copied next; with kVectorized of this lane's first chunk.
  const int64_t lane_offset = begin + (kVectorized ? lane * kColumns : 0);
  const char* x = reinterpret_cast<const char*>(p.x + first * p.x_row_stride + lane_offset);
  unsigned x_low = static_cast<unsigned>(reinterpret_cast<uintptr_t>(x));  // of the row summed next

  // The granules in which an unaligned run lies.
  const auto copy_run = [&](unsigned slot) {
    const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(x) % kChunkBytes);
    const char* granules = x - offset + lane * kChunkBytes;
    const int64_t to_end = reinterpret_cast<const char*>(p.x_end) - granules;
    if (whole && to_end >= static_cast<int64_t>(kStageBytes)) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) copy_async(slot + k * kStep, granules + k * kStep);
      if (lane == 0 && offset > 0) copy_async(slot + kChunks * kStep, granules + kChunks * kStep);
      return;
    }
    const int bytes = run > 0 ? offset + run * kSize : 0;
#pragma unroll
    for (int k = 0; k <= kChunks; ++k) {
      const int at = k * static_cast<int>(kStep);
      if (at + lane * kChunkBytes < bytes && (k < kChunks || lane == 0)) {
        const int64_t rest = to_end - at;
        if (rest >= kChunkBytes) {
          copy_async(slot + at, granules + at);
        } else {  // the tensor's last granule, of which not all is the tensor's
          copy_elements<kSize>(slot + at, granules + at, static_cast<int>(rest));
        }
      }
    }
  };
  const auto copy_row = [&](unsigned slot, int i) {
    if (i < count) {
      if constexpr (kVectorized) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          if (whole || span.has(k)) copy_async(slot + k * kStep, x + k * kStep);
        }
      } else {
        copy_run(slot);
      }
      x += p.x_step;
    }
    commit_copies();
  };

  // ---- the start: what is small first, for it would wait behind the copies that fill the ring

  [[maybe_unused]] const GridPlace place{p.exchange + first * (kGridExchanges * p.cluster_size),
                                         p.cluster_size, rank};
  Exchange exchange = [&] {
    if constexpr (kGrid) {
      return Exchange(storage, place, warp, warps, RowSpan::kSize, p.cols, p.inverse_cols,
                      p.filled_blocks);
    } else {
      return Exchange(storage, warp, warps, RowSpan::kSize, p.cols, p.inverse_cols, p.cluster_size);
    }
  }();
  // All blocks' places for what they tell are clear once all have come here. (A grid waited for
  // that at once: 447 x 300001 bfloat16 165.7 us on an H200, 163.4 so.)
  [[maybe_unused]] auto arrival = [] {
    if constexpr (kGrid) {
      return cooperative_groups::this_grid().barrier_arrive();
    } else {
      cluster_arrive();
      return 0;
    }
  }();
  const bool serves = kServed && warp == warps;
  Pack<W, kColumns> weight[kChunks], bias[kChunks];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const int left = span.cols - (k * kWarpSize + lane) * kColumns;
    const auto load = [&](const W* parameters, float absent) {
      return parameters == nullptr
                 ? fill_pack<W, kColumns>(absent)
                 : load_pack<kVectorized, W, kColumns>(parameters + span.column(k), left);
    };
    weight[k] = load(p.weight, 1);
    bias[k] = load(p.bias, 0);
  }
  // Stages that are asked for before the first row is summed, which waited until all had been: of a
  // copy on an H200, by all and so, bfloat16 256 x 65536 .80 and .83, 512 x 32768 .86 and .89, 1024
  // x 131072 .913 and .92, 4096 x 65536 .961 and .966, float32 1024 x 131072 .954 and .963. (By one
  // less .78, .84, .895, .963, .94.)
  constexpr int kFirstStages = kAhead + 1;
  if (!serves) {
#pragma unroll 1
    for (int s = 0; s < kFirstStages; ++s) copy_row(ring + s * kStageBytes, s);
  }

  // ---- a row

  // Moments of the warp's span; leaves the chunks of an unaligned one where they belong.
  const auto sum_span = [&](unsigned slot, auto is_whole) {
    constexpr bool kWhole = decltype(is_whole)::value;
    // Of a row's last warp in a grid ptxas worked out before the first row what follows from its
    // columns, for which it spilled 12 bytes of 16-bit rows. Copies pass the L1 cache there, so
    // that such bytes seem to come from L2: 2048 x 65537 bfloat16 took 180 us on an H200 with them,
    // 170 us without, 1024 x 140001 190 and 178 us, 447 x 300001 170 and 167 us.
    int cols = p.cols - begin;
    if constexpr (!kWhole && !kVectorized && (kGrid || kSkips)) asm volatile("" : "+r"(cols));
    const RowSpan span{begin, cols, lane};
    const int run = max(0, min(cols, RowSpan::kSize));
    using ByDifferences = ChunkMoments<float, kChunks, kColumns>;
    constexpr bool kSums = kSumsFirst<kColumns, kWarpSize, kChunks>;
    std::conditional_t<kSums, ThreadSums<float>, ByDifferences> thread;
    const auto tail = [&] {
      return load_element<X>(slot - lane * kChunkBytes + (span.tail_column() - begin) * kSize);
    };
    if constexpr (kVectorized) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        thread.add_chunk(k, to_pack<X, kColumns>(load_shared(slot + k * kStep)),
                         kWhole || span.has(k));
      }
    } else {
      __syncwarp();  // the lanes' copies have arrived
      const int offset = static_cast<int>(x_low % kChunkBytes);
#pragma unroll
      for (int k = 0; k < kChunks; k += kTogether) {
        if (kSkips && !kWhole && k == kHalf && run <= k * kWarpSize * kColumns) break;
        Granule chunks[kTogether], beyond[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          chunks[j] = load_shared(slot + (k + j) * kStep);
          beyond[j] = load_shared(slot + (k + j) * kStep + kChunkBytes);
        }
        __syncwarp();  // the lane before has read this one's
        with_offset(offset, [&](auto word, int bits) {
#pragma unroll
          for (int j = 0; j < kTogether; ++j) {
            chunks[j] = shift<decltype(word)::value>(chunks[j], beyond[j], bits);
          }
        });
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          store_shared(slot + (k + j) * kStep, chunks[j]);
          thread.add_chunk(k + j, to_pack<X, kColumns>(chunks[j]), kWhole || span.has(k + j));
        }
      }
      if (!kWhole && span.tail() > 0) {
        __syncwarp();
        if (lane < span.tail()) thread.add(tail());
      }
      x_low += static_cast<unsigned>(p.x_step);
    }
    float total = RowSpan::kSize, inverse = 1.f / RowSpan::kSize;
    if (!kWhole) {
      total = static_cast<float>(run);
      inverse = run > 0 ? quotient(1.f, total) : 0.f;
    }
    if constexpr (kSums) {
      Set row[1];
      const ThreadSums<float> threads[] = {thread};
      merge_sums<kWarpSize>(row, threads, inverse, [&](Set(&others)[1]) {
        ByDifferences differences;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          differences.add_chunk(k, to_pack<X, kColumns>(load_shared(slot + k * kStep)),
                                kWhole || span.has(k));
        }
        if (!kVectorized && !kWhole && lane < span.tail()) differences.add(tail());
        others[0] = merge_warp(differences, total, inverse);
      });
      return row[0];
    } else {
      return merge_warp(thread, total, inverse);
    }
  };
  const auto moments_of = [&](unsigned slot) {
    return whole ? sum_span(slot, std::true_type()) : sum_span(slot, std::false_type());
  };

  char* y = reinterpret_cast<char*>(p.y + first * static_cast<int64_t>(p.cols) + lane_offset);
  const auto write_row = [&](unsigned slot, int i, const Set& moments) {
    const float rstd = rstd_of(moments, p.inverse_cols, p.eps);
    // Before y, or asked in another order, 16-bit rows that are kept together spill 8 bytes.
    constexpr bool kTellsLast =
        kSpan == ForwardSpan::kPacedCluster && kIs16Bit<X> && sizeof(W) == sizeof(X);
    if constexpr (!kTellsLast) {
      if (threadIdx.x == 0 && (kGrid ? begin : rank) == 0) {  // (a grid's rank takes a register)
        put_statistics(p, first + static_cast<int64_t>(i) * p.clusters, moments.mean, rstd);
      }
    }
    const Standardizer<float> standardizer{rstd, moments.mean};
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (kSkips && k == kHalf && run <= k * kWarpSize * kColumns) break;
      keep_packed(weight[k]);
      keep_packed(bias[k]);
      const Chunk out = normalize<X>(to_pack<X, kColumns>(load_shared(slot + k * kStep)),
                                     standardizer, weight[k], bias[k]);
      if constexpr (kVectorized) {
        if (whole || span.has(k)) store_pack(reinterpret_cast<X*>(y + k * kStep), out);
      } else {
        store_shared(slot + k * kStep, to_granule(out));  // in the place of x
      }
    }
    if constexpr (!kVectorized) {
      __syncwarp();
      write_unaligned<kSize, kChunks, kSkips>(y, slot, run * kSize);
      __syncwarp();  // before the slot is filled again
    }
    y += p.y_step;
    if (kTellsLast && p.mean != nullptr && threadIdx.x == 0 && rank == 0) {
      put_statistics(p, first + static_cast<int64_t>(i) * p.clusters, moments.mean, rstd);
    }
  };

  // ---- all rows

  if constexpr (kGrid) {
    cooperative_groups::this_grid().barrier_wait(std::move(arrival));
  } else {
    cluster_wait();
  }
  if (serves) {
    if constexpr (kGrid) {
      exchange.serve(kAhead, count);
    } else if constexpr (kServed) {
      exchange.serve(count);
    }
  } else {
    unsigned slot = ring;
    // A pause of 6 us for a row, where a turn of all blocks takes 2 to 4 (see
    // plan_forward_ring.cpp).
    __shared__ unsigned pace_start;
    const bool keeps = kSpan == ForwardSpan::kPacedCluster && rank == 0 && threadIdx.x == 0;
    Pace<1> pace(pace_start, keeps, p.clusters, p.most_ahead, 12000);
    const auto post_first = [&](auto first, unsigned from) {
      constexpr int kFirst = decltype(first)::value;
      if (kFirst == 0 || count > kFirst) {
        wait_copies<kFirstStages - 1 - kFirst>();
        exchange.post(kFirst, moments_of(from));
      }
    };
    post_first(std::integral_constant<int, 0>(), slot);
    static_assert(kAhead <= 3);
    if constexpr (kAhead > 1) post_first(std::integral_constant<int, 1>(), next_slot(slot));
    if constexpr (kAhead > 2) {
      post_first(std::integral_constant<int, 2>(), next_slot(next_slot(slot)));
    }
#pragma unroll 1
    for (int s = kFirstStages; s < kStages; ++s) copy_row(ring + s * kStageBytes, s);
    if constexpr (!kGrid) exchange.relay(0);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const unsigned next = next_slot(slot);
      if (i + kAhead < count) {
        unsigned ahead = next;  // of the row summed
#pragma unroll
        for (int a = 1; a < kAhead; ++a) ahead = next_slot(ahead);
        wait_copies<kStages - 1 - kAhead>();
        exchange.post(i + kAhead, moments_of(ahead));
      }
      write_row(slot, i, exchange.collect(i));
      pace.keep(i + 1);
      copy_row(slot, i + kStages);
      if constexpr (!kGrid) {
        if (i + 1 < count) exchange.relay(i + 1);
      }
      slot = next;
    }
    wait_copies<0>();
  }
  if constexpr (!kGrid) {
    cluster_arrive();  // no block leaves before all have sent and received their moments
    cluster_wait();
  }
}

template <class X, class W, bool kVectorized, ForwardSpan kSpan, int kAhead>
cudaError_t launch_ring(const ForwardRingParameters<X, W>& p, const ForwardPlan& plan,
                        cudaStream_t stream) {
  constexpr bool kGrid = kSpan == ForwardSpan::kGrid, kServed = kIsServed<kSpan>;
  const auto kernel = forward_ring<X, W, kVectorized, kSpan, kAhead>;
  constexpr int kChunks = kForwardRingChunks<X, W>;
  constexpr int kWarpBytes = kForwardRingBytes<kChunks, kVectorized, kAhead>;
  constexpr int kMostWarps = kForwardRingThreads<X, W, kAhead> / kWarpSize - (kServed ? 1 : 0);
  if (p.warps > kMostWarps || plan.exchange_warp != kServed) return cudaErrorInvalidValue;
  static std::atomic<uint64_t> prepared{0};  // a bit per device
  const cudaError_t error = allow_blocks(reinterpret_cast<const void*>(kernel),
                                         kMostWarps * kWarpBytes, !kGrid, prepared);
  if (error != cudaSuccess) return error;
  const dim3 threads((p.warps + (kServed ? 1 : 0)) * kWarpSize);
  Launch launch(plan.blocks, threads, stream);
  launch.with_shared(p.warps * kWarpBytes);
  return (kGrid ? launch.together() : launch.in_clusters(plan.cluster_size))(kernel, p);
}

// Rows of X, and y; weight and bias of W.
template <class X, class W>
cudaError_t launch_ring_of(const ForwardArgs& args, const ForwardPlan& plan, void* workspace,
                           cudaStream_t stream) {
  constexpr int kChunks = kForwardRingChunks<X, W>;
  ForwardRingParameters<X, W> p;
  p.exchange = static_cast<uint4*>(workspace);
  p.rows = args.rows;
  p.cols = static_cast<int>(args.cols);
  p.eps = static_cast<float>(args.eps);
  p.inverse_cols = static_cast<float>(1.0 / static_cast<double>(args.cols));
  p.x = static_cast<const X*>(args.x);
  p.x_row_stride = args.x_row_stride;
  p.x_end = p.x + std::max<int64_t>(0, (args.rows - 1) * args.x_row_stride) + args.cols;
  p.weight = static_cast<const W*>(args.weight);
  p.bias = static_cast<const W*>(args.bias);
  p.y = static_cast<X*>(args.y);
  p.mean = static_cast<float*>(args.mean);
  p.rstd = static_cast<float*>(args.rstd);
  p.clusters = static_cast<int>(plan.blocks / plan.cluster_size);
  p.x_step = p.clusters * args.x_row_stride * static_cast<int64_t>(sizeof(X));
  p.y_step = p.clusters * args.cols * static_cast<int64_t>(sizeof(X));
  p.most_ahead = plan.most_ahead;
  p.cluster_size = plan.cluster_size;
  p.warps = plan.threads_per_row / kWarpSize;
  const int block_cols = plan.threads_per_row * kChunks * kChunkColumns<X>;
  p.filled_blocks = (p.cols - 1) / block_cols + 1;
  const auto launch = [&](auto vectorized) {
    constexpr bool kVectorized = decltype(vectorized)::value;
    using Span = ForwardSpan;
    if (plan.in_grid) {
      if constexpr (kChunks == kForwardChunks) {
        if (plan.rows_ahead == 1) {
          return launch_ring<X, W, kVectorized, Span::kGrid, 1>(p, plan, stream);
        }
      }
      constexpr bool kTwo = !kVectorized && kIs16Bit<X> && kChunks == kForwardChunks;
      return launch_ring<X, W, kVectorized, Span::kGrid, kTwo ? 2 : kGridAhead>(p, plan, stream);
    }
    if constexpr (!kVectorized) {
      if (plan.exchange_warp) {
        return launch_ring<X, W, kVectorized, Span::kServedCluster, 1>(p, plan, stream);
      }
    }
    if constexpr (kVectorized) {
      if (plan.most_ahead > 0) {
        return launch_ring<X, W, kVectorized, Span::kPacedCluster, 1>(p, plan, stream);
      }
    }
    return launch_ring<X, W, kVectorized, Span::kCluster, 1>(p, plan, stream);
  };
  return plan.vectorized ? launch(std::true_type()) : launch(std::false_type());
}

// Finds the type of weight and bias.
template <class X>
cudaError_t launch_forward_ring(const ForwardArgs& args, const ForwardPlan& plan, void* workspace,
                                cudaStream_t stream) {
  if constexpr (kIs16Bit<X>) {
    if (plan.chunks_per_thread < kForwardChunks) {
      return launch_ring_of<X, float>(args, plan, workspace, stream);
    }
  }
  return launch_ring_of<X, X>(args, plan, workspace, stream);
}

}  // namespace fastnorm::cuda
