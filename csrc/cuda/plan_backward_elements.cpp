// The shape of what streams through shared memory by column in the backward (kElements); see
// plan_backward.h.
#include <algorithm>
#include <array>

#include "plan_backward.h"

namespace fastnorm::cuda {
namespace {

// Warps that stream rows by column on a multiprocessor, and how many of them are to have columns.
struct StreamWarps {
  int64_t most, busy;
};

// Clusters of four are rather replaced by ones of eight with fewer warps in a block: 8192 x 16385
// bfloat16 took 427 us on an H200 with four times 14 warps, 336 us with eight times 5. Of float32,
// whose stages take twice the shared memory, fewer warps leave the L1 cache room for copies: 32746
// x 1023, by two warps each, .79 of an elementwise sum with 16 of them, .89 with 12, 15914 x 2105,
// by five, .89 with 15 and .89 with 10; but 2726 x 12289 .85 in pairs with 13, .79 in fours
// with 10.
std::array<StreamWarps, 2> stream_warps(DType x_dtype) {
  if (size_in_bytes(x_dtype) == 2) return {{{16, 14}, {16, 14}}};
  return {{{kMostCachedThreads / kWarpSize, 10}, {15, 13}}};
}

// Of a block, if they are copied in bulk; none where one takes too many warps.
int rows_in_bulk(const BackwardPlan& plan) {
  const int lanes = plan.threads_per_row, columns = plan.columns_per_thread;
  if (lanes > kWarpSize) return most_bulk_warps(columns) / (lanes / kWarpSize) * kBulkRows;
  return bulk_warps(lanes, columns) * (kWarpSize / lanes) * kBulkRows;
}

// Whether tiles of rows are copied in bulk: 16-bit rows of a block and less that lie one behind the
// other, if there are many for each multiprocessor. Of an elementwise sum on an H200, by lanes and
// so: bfloat16 8192 x 257 .57 and .585, 32768 x 257 .67 and .69, 16384 x 129 .52 and .53, 65536 x
// 129 .64 and .685, but 8192 x 511 .58 and .57, 32768 x 511 .725 both; dx alone of 8192, 32768 and
// 65536 x 257 .68, .785, .795 and .675, .765, .805. Of several warps: tiles of 14 rows, 8192, 16384
// and 32768 x 769 .585, .66, .745 and .555, .665, .77; of ten, 8192, 16384 and 32768 x 1101 .63,
// .735, .78 and .595, .725, .815; of four, 4096, 8192 and 16384 x 2601 .63, .71, .755 and .635,
// .745, .83; of two, 2048, 4096 and 8192 x 3601 .565, .66, .74 and .575, .68, .78, 1024, 2048 and
// 4096 x 6145 .41, .625, .725 and .42, .635, .745. (On an H100 these are not measured.)
bool copies_in_bulk(const BackwardPlan& plan, const BackwardProblem& problem,
                    const DeviceProperties& device, const PlanRequest& request) {
  const int rows = rows_in_bulk(plan);
  const bool of_warps = plan.threads_per_row > kWarpSize;
  const int64_t turns = !of_warps ? 8 : rows <= 2 * kBulkRows ? 4 : 16;
  const int64_t blocks = request.blocks.value_or(device.sm_count);
  return can_stream(problem.x_dtype, device) && problem.contiguous && has_one_dtype(problem) &&
         size_in_bytes(problem.x_dtype) == 2 && plan.cluster_size == 1 && rows > 0 &&
         !(of_warps && has_slow_memory(device)) && problem.rows >= turns * rows * blocks;
}

// Tiles of them on their way: more are slower, perhaps as they come from memory ever farther ahead.
// Of an elementwise sum on an H200, by two, three, ... stages: bfloat16 500 columns (32 KB each)
// .86, .90, .88; 333 (21 KB) -, .90, .92, .90; 257 (16 KB) -, .82, .91, .935, .92, .90, .90; 191
// (24 KB) -, .925, .90, .865; 90 (23 KB) -, .92, .91, .91; but 67 (26 KB), whose 12 warps are kept
// busy, -, .89, .92. Of several warps 1101 (35 KB) .85, .89, -, .875, 3601 (29 KB) -, .88, .87,
// 4500 (36 KB) .855, .87, -, .865, 5001 (40 KB) .845, .855, .85, 6145 (49 KB) .84, -, .83, 7001 (56
// KB) .845, .815.
int bulk_stages(const BackwardPlan& plan, int64_t cols) {
  constexpr int kLeastBytes = 88 << 10, kManyWarpsBytes = 112 << 10;
  const int lanes = plan.threads_per_row;
  const bool many = lanes > kWarpSize || bulk_warps(lanes, plan.columns_per_thread) > 8;
  const int stage = bulk_stage_bytes(rows_in_bulk(plan), cols);
  const int least = 3 * stage <= kMostBulkBytes ? 3 : 2;
  return std::clamp((many ? kManyWarpsBytes : kLeastBytes) / stage, least, kMostBulkStages);
}

// Stages of wide rows: of clusters, whose warps are at the next row before they have read a row
// once more, another one. Of an elementwise sum on an H200, bfloat16 7001 columns (28 KB) in four
// .92, in five .917, 8191 (33 KB) in three .893, in four .874; in two blocks 12289 (25 KB) in four
// .83, in six .86, in eight .85, 16385 (33 KB) in four .88, in five .89, 20001 (40 KB) in three
// .735, in four and five .855.
int wide_stages(const BackwardPlan& plan, int64_t cols) {
  const int stage = 2 * wide_tensor_bytes(plan, cols);
  const bool alone = plan.cluster_size == 1;
  constexpr int kAloneBytes = 131 << 10, kBytes = 160 << 10, kLeast = 5;
  return alone ? kAloneBytes / stage : std::clamp(kBytes / stage, kLeast, kMostBulkStages);
}

}  // namespace

// Whether rows that end within a chunk are better off in the ring than by column: of a 16-bit type,
// long ones; float32 is not (of an elementwise sum, 134 MB on an H200, in the ring and by column,
// 1023 columns .91 and .90, 2105 .87 and .90, 4095 .88 and .87, 7799 .83 and .88).
//
// On an H200 tiles of rows that a block holds in up to seven pairs of columns, or eight in fewer
// warps, are copied in bulk (see copies_in_bulk). In the ring and so: bfloat16 513 columns .585 and
// .885, 769 .75 and .86, 1025 .84 and .87, 1101 .695 and .86, 1401 .84 and .87, 1701 .78 and .865,
// 2049 .83 and .87, 2401 .815 and .855, 3001 .82 and .845, 3601 .78 and .87, 4095 .835 and .86,
// 4097 .795 and .88, 5001 .73 and .86, 6145 .68 and .83; even ones alike. But those of up to four
// warps with hardly an idle lane are about the same: 1535 .88 and .865, 2047 .87 and .875, of 268
// MB 1023 .92 and .91. And rows elsewhere, or few of them, are slower by column than in the ring:
// 2047 .84 and .81, 3193 .72 and .69, 4095 .83 and .80, 4097 .79 and .715, 8192 x 1023 .65 and .63,
// 1024 x 4095 .55 and .47.
//
// Wide rows come in bulk one by one (see wide_shape). Those beyond them, which take clusters of 16,
// are in the ring: by column 120001 .58 and .56, 131071 .59 and .59, but 100001 .525 and .56.
//
// On an H100, where instructions count for less, the ring is better from 1025 columns on: 1101 .905
// and .865, 1201 .92 and .875, 1317 .915 and .90, 1701 .885 and .88, 2201 .915 and .89, 65537 .86
// and .615, 69633 .65 and .64, 80001 .72 and .655, 96001 .79 and .73, 112001 .785 and .75, 131071
// .81 and .78; but 100001 .73 and .76. And so it is up to there where few lanes are idle.
bool ring_holds_uneven_rows(const BackwardProblem& problem, const DeviceProperties& device) {
  const int64_t cols = problem.cols;
  if (size_in_bytes(problem.x_dtype) != 2) return false;
  if (has_slow_memory(device)) {
    if (cols > 2 * kUnevenColumns) return true;
    const int64_t warps = ceil_div(cols, kUnevenColumns);
    const double full = static_cast<double>(cols) / static_cast<double>(warps * kUnevenColumns);
    return warps > 1 && full >= 0.87;
  }
  if (cols >= kLeastWideRow) return true;
  constexpr int64_t kFewWarps = 4;
  const int64_t by_column = ceil_div(cols, kUnevenColumns) * kUnevenColumns;
  return cols > kUnevenColumns && cols <= kFewWarps * kUnevenColumns &&
         100 * cols >= 97 * by_column;
}

std::optional<ElementShape> element_shape(const BackwardProblem& problem,
                                          const DeviceProperties& device,
                                          const PlanRequest& request) {
  constexpr int64_t kMostPairs = 8;
  const int element_bytes = size_in_bytes(problem.x_dtype);
  const bool tiny = is_tiny(problem.cols, element_bytes);
  if (!(tiny || ends_within_a_chunk(problem)) || !has_one_dtype(problem) ||
      !can_stream(problem.x_dtype, device)) {
    return std::nullopt;
  }
  const bool asked = request.cluster_size && *request.cluster_size <= kMaxClusterSize;
  const int least_size = asked ? static_cast<int>(next_power_of_two(*request.cluster_size)) : 1;
  if (tiny) {
    if (least_size > 1) return std::nullopt;
    const TinyShape shape = tiny_shape(problem.cols, element_bytes);
    return ElementShape{{shape.lanes, 1}, shape.columns};
  }
  const auto columns_of = [&](int64_t lanes) { return 2 * ceil_div(problem.cols, 2 * lanes); };
  const int64_t lanes = ceil_div(problem.cols, 2 * kMostPairs);
  if (lanes <= kWarpSize && least_size == 1) {
    const int64_t team = std::max<int64_t>(kLeastElementLanes, next_power_of_two(lanes));
    // Of all threads, float32 too: rows of a warp have two stages and not three.
    return ElementShape{{static_cast<int>(team), 1},
                        static_cast<int>(columns_of(team)),
                        static_cast<int>(kMaxThreadsPerRow / team)};
  }
  const bool is_16_bit = size_in_bytes(problem.x_dtype) == 2;
  // 16-bit rows beyond a block are wide ones (see wide_shape), or in the ring.
  const int most_size = is_16_bit                   ? 1
                        : device.large_clusters > 0 ? kLargeClusterSize
                                                    : kMaxClusterSize;
  for (int size = least_size; size <= most_size; size *= 2) {
    int64_t warps = ceil_div(ceil_div(lanes, kWarpSize), size);
    bool busy = false;
    int64_t most = 0;
    for (const StreamWarps& all : stream_warps(problem.x_dtype)) {
      if (busy || warps > all.most) continue;
      busy = all.most / warps * warps >= all.busy;
      if (busy || most == 0) most = all.most;
    }
    if (most == 0) continue;
    const int64_t least_busy = stream_warps(problem.x_dtype)[0].busy;
    while (!busy && most / warps * warps < least_busy) ++warps;
    // Eight for seven, of six or seven pairs in a lane for seven or eight. In bulk (see
    // copies_in_bulk), of an elementwise sum on an H200, 268 MB of bfloat16, by seven and so: 2721
    // columns .896 and .914, 2849 .877 and .927, 2977 .912 and .929, 3105 .887 and .922, 3361 .914
    // and .916, 3425 .878 and .909, 3553 .888 and .898; 3002 .919 and .909; one element off 2801
    // .86 and .88, 3101 .92 and .89, 3401 .88 and .93. Up to 2657 .90 and .885. (By seven with the
    // last tile of an odd number of rows as it was, see backward_bulk.) Five pairs, in more warps,
    // are as good in bulk or better, 801 .905 and .933, 1313 .92 and .93, 4065 .907 and .917, but
    // not where rows lie elsewhere, or are few: 51000 x 1313, one element off, .945 and .75, 16384
    // x 4095 .935 and .76, 1024 x 4095 25 and 36 us.
    constexpr int64_t kLeastOfEight = 2689;
    if (is_16_bit && warps == 7 && problem.cols >= kLeastOfEight) ++warps;
    const int64_t columns = columns_of(warps * size * kWarpSize);
    if (columns <= 2 * kLeastElementPairs) break;  // more blocks than have enough to do
    return ElementShape{{static_cast<int>(warps * kWarpSize), size},
                        static_cast<int>(columns),
                        static_cast<int>(most / warps)};
  }
  return std::nullopt;
}

// By the blocks that promise most, if what they take for a row is as if a lane had some pairs more.
// (Of an elementwise sum on an H200, bfloat16: 50257 columns by five .84, 40001 by four .84, 24501
// by three .85, 16385 by two .89, by three .69.) On an H100 this is not measured, nor done.
std::optional<ElementShape> wide_shape(const BackwardProblem& problem,
                                       const DeviceProperties& device) {
  if (!ends_within_a_chunk(problem) || !has_one_dtype(problem) || !problem.dx ||
      size_in_bytes(problem.x_dtype) != 2 || problem.cols < kLeastWideRow ||
      !can_stream(problem.x_dtype, device) || has_slow_memory(device)) {
    return std::nullopt;
  }
  const int64_t steps = ceil_div(problem.cols, int64_t{2} * kWarpSize);
  constexpr int kMorePairs = 4;
  constexpr double kBetter = 0.98;
  std::optional<ElementShape> best;
  double least_time = 0;
  for (int size = 1; size <= kMaxClusterSize; ++size) {
    const auto pairs = static_cast<int>(ceil_div(steps, size * kWideRowWarps));
    if (pairs > kMostWideRowPairs) continue;
    const double time = (pairs + kMorePairs) * size / cluster_fit(size, 1);
    if (best && time > kBetter * least_time) continue;
    least_time = time;
    best = ElementShape{{kWideRowWarps * kWarpSize, size}, 2 * pairs, 1, true};
  }
  return best;
}

// Rows by column: how many a block works on at a time, and how many blocks there are.
int64_t shape_elements(BackwardPlan& plan, const ElementShape& shape,
                       const BackwardProblem& problem, const DeviceProperties& device,
                       const PlanRequest& request) {
  plan.kernel = Kernel::kElements;
  plan.chunks_per_thread = backward_chunks(problem.x_dtype);
  plan.columns_per_thread = shape.columns;
  plan.threads_per_row = shape.ring.threads;
  plan.cluster_size = shape.ring.cluster_size;
  const int element_bytes = size_in_bytes(problem.x_dtype);
  if (is_tiny(problem.cols, element_bytes)) {
    plan.rows_per_block =
        kTinyThreads / shape.ring.threads * tiny_backward_rows(shape.columns, element_bytes);
    return int64_t{tiny_backward_blocks(shape.columns)} * device.sm_count;
  }
  const bool in_cluster = plan.cluster_size > 1;
  const bool is_16_bit = size_in_bytes(problem.x_dtype) == 2;
  int64_t together = 1;
  if (shape.is_wide) {
    plan.is_wide = true;
    plan.rows_per_block = 1;
    plan.bulk_stages = wide_stages(plan, problem.cols);
  } else if (copies_in_bulk(plan, problem, device, request)) {
    plan.rows_per_block = rows_in_bulk(plan);
    plan.bulk_stages = bulk_stages(plan, problem.cols);
  } else {
    // On an H100 fewer rows at a time: 257 columns of bfloat16 .89 of an elementwise sum with 16 of
    // them, .915 with 12, 1317 .91 with five, .94 with three; but float32 769 .94 with four, .93
    // with three.
    const bool fewer = has_slow_memory(device) && !in_cluster && is_16_bit;
    together = std::max(1, fewer ? shape.together * 3 / 4 : shape.together);
    const int64_t least_rows = std::max(1, kWarpSize / plan.threads_per_row);
    const int64_t spread =
        ceil_div(ceil_div(problem.rows, device.sm_count), least_rows) * least_rows;
    plan.rows_per_block =
        in_cluster ? 1 : static_cast<int>(std::min(std::max(together, least_rows), spread));
  }
  const int sms = device.sm_count;
  if (plan.cluster_size == kLargeClusterSize) return device.large_clusters * kLargeClusterSize;
  // All multiprocessors: 16384 x 12289 bfloat16 .67 of an elementwise sum on an H200 with 132, .60
  // with 116; but no more clusters than find a place: in fours 4096 x 32767 .66 with 116 blocks,
  // .36 with 124. Blocks that merge their sums in fours are such clusters as well.
  if (!in_cluster) {
    const int merged = sms < kFewMultiprocessors ? 1 : least_merged(sms, problem);
    return merged == 4 ? resident_clusters(4, 1, device) * 4 : sms / merged * merged;
  }
  const int clusters = streaming_clusters(plan.cluster_size, together, problem, device);
  // (An odd number of wide rows apart those of a block begin at whole words in turns, but 2048 x
  // 65537 bfloat16 takes .827 of an elementwise sum on an H200 by 14 clusters of eight, .86 by 15.)
  return int64_t{clusters} * plan.cluster_size;
}

}  // namespace fastnorm::cuda
