// How a forward runs whose rows stream through shared memory in chunks (kRing); see plan_forward.h.
#include <algorithm>

#include "plan_forward.h"

namespace fastnorm::cuda {
namespace {

// The blocks that hold a row of `chunks` of which a block holds `most`, in the ring.
//
// Uneven rows are held by three or five blocks where those are not too large. Of a copy, by four or
// eight and so: bfloat16 65537 columns .61 and .71 on an H200, .84 and .87 on an H100, 80001 .69
// and .77, .89 and .89, 90001 .73 and .75, .88 and .90, 140001 .66 and .73, .91 and .91; but 98001,
// by 512 threads, .76 and .73 on an H200; float32 32769 .80 and .92, .91 and .91, but 44001, by
// 480, .86 and .86, .96 and .92, 80001 .87 and .78. Aligned ones are not (80000 of bfloat16 on an
// H100 .94 and .92). Those with float32 parameters are in as few as hold them: 49152 by three .92,
// by four .85, 65536 by four .91, by five .81, 98304 by five .91, by six .825; beyond eight in a
// grid: 190000 by 13 times ten .90, by seven clusters of 16 .81.
int forward_ring_size(const ForwardProblem& problem, int64_t chunks, int64_t most,
                      const PlanRequest& request) {
  if (chunks <= most && request.cluster_size.value_or(1) <= 1) return 1;
  if (chunks > most * kMaxClusterSize) return kLargeClusterSize;
  const bool is_16_bit = size_in_bytes(problem.x_dtype) == 2;
  const int64_t least = ceil_div(chunks, most);
  const bool may_be_odd = least == 3 || (least == 5 && is_16_bit);
  const int most_threads = is_16_bit ? 480 : 416;
  const bool uneven_odd = is_uneven(problem) && may_be_odd &&
                          forward_threads(ceil_div(chunks, least), kForwardChunks) <= most_threads;
  if (!request.cluster_size && (has_wide_parameters(problem) || uneven_odd)) {
    return static_cast<int>(least);
  }
  return choose_cluster_size(chunks, most, request);
}

// How many rows ahead moments are posted in a grid. Not only instructions slow rows that are not
// aligned: of 2048 x 65537 bfloat16 they take 46 percent of the issue slots, and warps wait for a
// row's moments for 14 percent of the time. Two rows ahead, by blocks of up to 11 warps, whose four
// stages leave the L1 cache 60 KB for what is under way, 65537 .766 and .781 of a copy on an H200,
// 447 x 300001 .78 and .83. (13 warps, which leave it 28 KB, .69, ten .78, nine .74; three rows
// ahead in ten warps, 28 KB as well, 200 x 600001 .65. In clusters, two rows ahead, 50257 .80 and
// .66, in a block 26001 .76 and .61.)
int rows_ahead(const RingShape& shape, const ForwardProblem& problem) {
  if (shape.grid_rows == 0) return 1;
  if (has_wide_parameters(problem)) return kGridAhead;
  if (size_in_bytes(problem.x_dtype) == 2 && !is_vectorized(problem)) {
    return shape.threads <= kTwoAheadThreads ? 2 : 1;
  }
  return shape.threads <= kAheadThreads ? kGridAhead : 1;
}

// Blocks of the ring: one on nearly every multiprocessor. Alone an odd number, rather (2044 x
// 16383 float32 .88 of a copy on an H200 with 131, .86 with 132). In pairs all find a place: 4096 x
// 65536 bfloat16 reached .94 of a copy on an H200 with 65 clusters, .915 with 66, .86 with 58.
// Larger clusters do not fit into what is left of some GPCs; one that has to wait for another's end
// doubles the time. (2048 x 131072: .92 with 27 clusters of four, .93 with 28, .945 with 29 and 30,
// .64 with 33; 2048 x 262144 .94 with 14 of eight, .96 with 15; but float32 2048 x 131072 .96 and
// .94.)
//
// On an H100, whose memory is slower, blocks and pairs are on all multiprocessors: 4096 x 32768
// bfloat16 .94 of a copy with 131, .95 with 132, x 65536 .935 with 65 pairs, .965 with 66. Clusters
// of four are on seven tenths of them: 1024 x 131072 .92 with 28, .956 with 23, 1340 x 100000 .89
// and .94, 2048 x 65536 float32 .94 and .97. And with float32 parameters 65536 by 29 fours .92, by
// 23 .945, 110000 by 17 sixes .88, by 15 .965, 131072 by 15 sevens .925, by 13 .94; but 98304 by 22
// fives .94, by 19 .915, 57344 by 38 threes .92, by 31 .84.
//
// Where 16-bit rows are not aligned instructions set the pace, and clusters are as many as find a
// place: on an H100 131071 columns .755 with 23, .85 with 30, in eights 262143 .81 with 14, .83
// with 15, on an H200, with 28 and 30 fours, 131071 .70 and .74, with 65 and 66 pairs 33001 .64 and
// .65, 50257 .82 and .83. So it is with float32 in large blocks: on an H100 65535 columns .85 and
// .92, 57001 .90 and .925, on an H200 .785 and .82, .84 and .87, in eights 131071 .76 and .80; but
// on an H100 53001 .915 and .91, 44001 .94 and .92, on an H200 .86 and .74. And with float32
// parameters on an H200: 49152 by 38 threes .90, by 39 .92, 65536 by 29 fours .90, by 30 .915.
int64_t forward_ring_teams(const RingShape& shape, const ForwardProblem& problem,
                           const DeviceProperties& device) {
  const int sms = device.sm_count;
  if (shape.grid_rows > 0) return shape.grid_rows;
  const bool slow = has_slow_memory(device);
  if (shape.cluster_size == 1) return slow ? sms : (sms - 1) | 1;
  if (shape.cluster_size == kLargeClusterSize) return device.large_clusters;
  const int fit = resident_clusters(shape.cluster_size, 1, device);
  constexpr int kManyThreads = 416;
  const bool is_16_bit = size_in_bytes(problem.x_dtype) == 2;
  const bool many = is_16_bit || shape.threads > kManyThreads;
  if (!is_vectorized(problem) && many) return fit;
  if (has_wide_parameters(problem) && !slow && shape.cluster_size > 2) return fit;
  if (!slow && is_16_bit && shape.cluster_size >= 4) return (fit - 1) | 1;
  const int size = shape.cluster_size;
  const bool seven_tenths = size == 4 || size == 6 || size == 7;
  const int used = size == 2 ? (slow ? sms : sms - 2) : seven_tenths ? sms * 7 / 10 : sms - sms / 7;
  return std::max(1, used / size);
}

// Whether a block has a warp more that only exchanges moments, if there is room for it: in a grid,
// and in a cluster where instructions set the pace. Of a copy on an H200, without and so: bfloat16
// 65537 columns .685 and .74, 50257 .79 and .815, 98001 .72 and .78, 140001 .70 and .73, in one
// block 22001 .79 and .82, but 30001, of 15 warps, .84 and .82; float32 80001 .87 and .915, 44001
// .75 and .78, but 32769, in threes, .89 and .86, in one block 8201 .935 and .91; aligned ones gain
// nothing (bfloat16 24576 .91 and .905, float32 12288 .935 and .94). On an H100 bfloat16 loses (.87
// and .85, .90 and .89, .87 and .87, .90 and .87, .89 and .88).
bool has_forward_exchange_warp(const RingShape& shape, const ForwardProblem& problem,
                               const DeviceProperties& device, const PlanRequest& request) {
  if (shape.grid_rows > 0) return true;
  const int most_threads = has_wide_parameters(problem) ? kMaxWideThreads : kMaxThreadsPerRow;
  if (shape.threads + kWarpSize > most_threads || is_vectorized(problem)) return false;
  if (request.exchange_warp) return *request.exchange_warp;
  if (!is_uneven(problem) || has_slow_memory(device)) return false;
  constexpr int kMostAlone = 448, kLeastFloats = 4;
  return size_in_bytes(problem.x_dtype) == 2 ? shape.cluster_size > 1 || shape.threads <= kMostAlone
                                             : shape.cluster_size >= kLeastFloats;
}

// Whether blocks of the ring, or clusters of them, are kept together (see Pace): aligned rows, of
// up to three blocks, that are many for each. Of a copy on an H200, without and so: bfloat16 25000
// columns .88 and .94, 28672 .90 and .935, 32768 .92 and .945, 40960 .895 and .94, 65536 .935 and
// .965, float32 16384 .955 and .965, 32768 .94 and .965, beside float32 parameters 18432 .925 and
// .95, 40960 .925 and .955, 49152, in threes, .905 and .92. But larger clusters, on fewer
// multiprocessors, drift less, and know each other's progress too late: 131072 .905 and .89, 262144
// .95 and .93. Rows that are not aligned wait for instructions (50257 .80 and .79), and of a few
// rows each the pace takes more than it gives (512 x 32768 .87 and .83).
bool keep_together(const ForwardPlan& plan, int64_t turns, const DeviceProperties& device) {
  constexpr int kMostBlocks = 3;
  return plan.vectorized && !plan.in_grid && plan.cluster_size <= kMostBlocks &&
         turns > kFewTurns && !has_slow_memory(device);
}

}  // namespace

// The ring holds rows as kRows and kCluster do, and those that they cannot hold by more blocks;
// none where rows cannot be streamed so.
//
// In a grid aligned rows and those of float32 have blocks whose ring has room for three more. Of a
// copy on an H200, by blocks of up to 512 threads, of which the first warp exchanged moments, and
// so: 192 x 1000000 bfloat16 .76 and .885 (480 threads, one row more .83, 384, two rows .81),
// float32 64 x 1000000 .78 and .885, 64 x 1000001 .63 and .81; but 200 x 600001 bfloat16 .73 and
// .65.
//
// Uneven rows of a 16-bit type are slowed by instructions where memory is fast, and rather in many
// warps on all multiprocessors: in a grid instead of a cluster of 16 blocks, of which seven run,
// 447 x 300001 .64 and, by 13 times ten blocks, .78, but on an H100 .91 and .86. (200001 columns by
// eight .77, in a grid by seven .74.)
std::optional<RingShape> forward_ring_shape(const ForwardProblem& problem, int64_t chunks,
                                            const DeviceProperties& device,
                                            const PlanRequest& request) {
  const bool wide = has_wide_parameters(problem);
  if (!problem.one_dtype && !wide) return std::nullopt;
  if (!can_stream(problem.x_dtype, device)) return std::nullopt;
  if (wide && chunks <= block_chunks(kRegisterChunks)) return std::nullopt;
  const int in_thread = wide ? kWideRingChunks : kForwardChunks;
  const int64_t most = wide ? int64_t{kMaxWideThreads} * in_thread : block_chunks(in_thread);
  const bool large = device.large_clusters > 0;
  const bool held = chunks <= most * (large ? kLargeClusterSize : kMaxClusterSize);
  const bool by_memory = size_in_bytes(problem.x_dtype) == 4 || !is_uneven(problem);
  const bool slowed = is_slowed(problem, device);
  const bool rather_grid = (slowed || wide) && !request.cluster_size;
  if (asks_for_grid(request) || !held || (rather_grid && chunks > most * kMaxClusterSize)) {
    constexpr int kWideThreads = kMaxWideThreads - kWarpSize;
    const int most_threads = wide ? kWideThreads : kMaxGridThreads;
    const int threads = wide        ? kWideThreads
                        : by_memory ? kAheadThreads
                        : slowed    ? kTwoAheadThreads
                                    : kMaxGridThreads;
    const auto grid =
        grid_shape(ceil_div(chunks, in_thread), threads, most_threads, true, device, request);
    if (grid || !held) return grid;
  }
  const int size = forward_ring_size(problem, chunks, most, request);
  return RingShape{forward_threads(ceil_div(chunks, size), in_thread), size};
}

void shape_forward_ring(ForwardPlan& plan, const RingShape& shape, const ForwardProblem& problem,
                        const DeviceProperties& device, const PlanRequest& request) {
  plan.kernel = Kernel::kRing;
  const bool wide = has_wide_parameters(problem);
  plan.chunks_per_thread = wide ? kWideRingChunks : kForwardChunks;
  plan.cluster_size = shape.cluster_size;
  plan.threads_per_row = shape.threads;
  plan.in_grid = shape.grid_rows > 0;
  plan.exchange_warp = has_forward_exchange_warp(shape, problem, device, request);
  plan.rows_ahead = rows_ahead(shape, problem);
  // Few rows are shared evenly, and those of blocks that are kept together. Of others, clusters
  // would rather be an odd number: with 64 instead of 65 they read rows a power of two apart, and
  // 4096 x 65536 reached .915.
  int64_t teams = forward_ring_teams(shape, problem, device);
  if (request.blocks && !plan.in_grid) {
    teams = std::clamp<int64_t>(*request.blocks / plan.cluster_size, 1, teams);
  }
  const int64_t turns = ceil_div(problem.rows, teams);
  const bool paced = keep_together(plan, turns, device);
  if (turns <= kFewTurns || paced) teams = ceil_div(problem.rows, turns);
  plan.blocks = teams * plan.cluster_size;
  if (paced) {
    // A row each, for what a block knows of the others is as old, and more: beyond a row and 0, 1,
    // 2 and 3 MB (pauses of 4000, 4000, 8000 and 12000 cycles for a row, each the best that was
    // tried) 32768 columns .948, .941, .947 and .947, 40960 .895, .918, .919 and .940, 32768 beside
    // float32 parameters .86, .895, .91 and .92. (To wait for the others instead, beyond a row and
    // 4 MB, was as good.)
    constexpr int64_t kMoreBytes = 3 << 20;
    plan.most_ahead =
        static_cast<int>(teams + kMoreBytes / (problem.cols * size_in_bytes(problem.x_dtype)));
  }
  if (shape.grid_rows > 0) {
    plan.workspace_bytes = grid_exchange_bytes(plan.blocks);
  }
}

}  // namespace fastnorm::cuda
