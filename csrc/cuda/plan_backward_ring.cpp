// The shape of what streams through shared memory in chunks in the backward (kRing), and what
// merges there; see plan_backward.h.
#include <algorithm>
#include <cmath>

#include "plan_backward.h"

namespace fastnorm::cuda {
namespace {

// Threads that stream rows of x's dtype on one multiprocessor: 512 of a 16-bit type. With twice the
// bytes in flight float32 is slower: 16384 x 4096 took 216 us on an H200 with 512 threads, 200 us
// with 256.
int ring_threads(DType x_dtype) { return size_in_bytes(x_dtype) == 2 ? 512 : 256; }

// The threads that have columns when rows that take `threads` are held by `size` blocks of
// `block_threads`, as a share of the `most` that stream on every multiprocessor.
double busy_share(int64_t threads, int size, int64_t block_threads, int most) {
  const int64_t blocks = std::max<int64_t>(1, most / block_threads);
  return static_cast<double>(threads * blocks) / static_cast<double>(size * int64_t{most}) *
         cluster_fit(size, blocks);
}

// Lanes of a warp for a row that takes `threads` of them: a power of two, or of a 16-bit type fewer
// where more rows find a place in the warp then, for instructions limit those. Of an elementwise
// sum, on an H200: bfloat16 40 columns .83 and .92, 72 .76 and .91, 80 .81 and .91, 88 .84 and .92,
// 96 .89 and .92, 136 .72 and .91, 152 .77 and .92, 160 .80 and .92; but float32 40 .93 and .85, 76
// .91 and .89, 160 .93 and .93.
int64_t row_lanes(int64_t threads, bool is_16_bit) {
  const int64_t lanes = next_power_of_two(threads);
  return is_16_bit && kWarpSize / threads > kWarpSize / lanes ? threads : lanes;
}

// A row that a warp holds, or a part of one; none where it takes more than one. A lane of a 16-bit
// row has three chunks instead of two where that leaves no more of a warp idle, and fewer lanes to
// add up. Of an elementwise sum, on an H200, with two and three: 136 columns .91 and .93, 168 .83
// and .92, 192 .88 and .93, 200 .89 and .91, 240 .92 and .94, 264 .75 and .91, 320 .82 and .93, 384
// .89 and .94, 520 .78 and .93, 640 .92 and .94, 768 .94 and .96; but 40 .91 and .87, 72 .91 and
// .89, 88 .92 and .91.
std::optional<RingShape> warp_shape(const BackwardProblem& problem) {
  const bool is_16_bit = size_in_bytes(problem.x_dtype) == 2;
  const int64_t chunks = ceil_div(problem.cols, chunk_columns(problem.x_dtype));
  const auto shape = [&](int lane_chunks) {
    const int64_t threads = ceil_div(chunks, lane_chunks);
    const int64_t lanes = threads <= kWarpSize ? row_lanes(threads, is_16_bit)
                                               : ceil_div(threads, kWarpSize) * kWarpSize;
    return RingShape{static_cast<int>(lanes), 1, 0, lane_chunks};
  };
  // Chunks that there is room for, in the warps that hold a row or rows, for each of these.
  const auto room = [](const RingShape& held) {
    const int rows = std::max(1, kWarpSize / held.threads);
    return std::max(kWarpSize, held.threads) * held.lane_chunks / static_cast<double>(rows);
  };
  RingShape best = shape(backward_chunks(problem.x_dtype));
  constexpr int64_t kFewChunks = 12;
  if (is_16_bit && chunks > kFewChunks && chunks <= kWarpSize * kMostLaneChunks) {
    const RingShape other = shape(kMostLaneChunks);
    if (room(other) <= room(best)) best = other;
  }
  return best.threads <= kWarpSize ? std::optional(best) : std::nullopt;
}

// The most columns of such rows that a block holds, and with columns behind chunks.
constexpr int64_t kMostUnevenColumns = kRowWarps * kUnevenColumns;
constexpr int64_t kMostTailColumns = kRowWarps * (kUnevenColumns + kWarpSize);

// Rows of partial sums that take little memory: 2 % of x, or 8 MB if x has less than 128 MB. (With
// 4 MB 4096 x 8192 bfloat16 took 62.7 us on an H200, by two blocks each, 60.6 us with each for
// itself; 1024 x 8192 26.8 and 25.8 us.)
int64_t few_partials(const BackwardProblem& problem) {
  constexpr int64_t kLargeBytes = 128'000'000;
  constexpr int64_t kSmallBytes = 8'000'000;
  const int64_t x_bytes = bytes_of(problem);
  const int64_t most = x_bytes >= kLargeBytes ? x_bytes / 50 : kSmallBytes;
  return most / (2 * int64_t{sizeof(float)} * problem.cols);
}

bool are_few(int64_t partials, const BackwardProblem& problem) {
  return partials <= few_partials(problem);
}

// Whether the partial sums of so many clusters that hold rows take more memory than they may: 2 %
// of x to 8192 columns, which are float32 then. (Beyond, none takes more than 8 %.)
bool are_too_many(int64_t clusters, const BackwardProblem& problem) {
  constexpr int64_t kMostColumns = 8192;
  return problem.weight_grads && problem.cols <= kMostColumns && !are_few(clusters, problem);
}

// Columns of each warp of a row that has more than their chunks, so that lanes have a column each
// behind theirs; zero if it has no more.
int tail_columns(int64_t cols, int64_t warps) {
  if (cols <= warps * kUnevenColumns) return 0;
  return static_cast<int>(ceil_div(ceil_div(cols, warps), kUnevenChunk) * kUnevenChunk);
}

// Whether there is room for a warp more in each of the `together` blocks of clusters that are on a
// multiprocessor, beside `warps` that have columns: one that only exchanges sums. On an H200, of an
// elementwise sum, without and so: bfloat16 50257 columns .67 and .73, 100001 .53 and .64, 30001
// .76 and .79, 12544 .91 and .94, 12288 .92 and .935; float32 12288 .944 and .94, 32768 .965 and
// .97.
bool has_exchange_warp(int64_t warps, int64_t together) {
  return (warps + 1) * together <= kRowWarps;
}

// What 16-bit rows that end within a chunk reach, up to a factor, where a row has `warps` in each
// of `size` blocks, and `together` of them are under way on a multiprocessor.
//
// Instructions set the pace, and those are as many for idle lanes; on how many multiprocessors they
// are issued, and, less than that, in how many warps on each, and whether its four parts have equal
// numbers of these. Columns behind the chunks of lanes take some percent. Of an elementwise sum on
// an H200, bfloat16: 57001 columns in seven blocks of 16 warps .61, in eight of 14 .63; 20001 in
// fives of eight .71, in eights of five .705, in threes of 14 and sixes of seven .64; 8705 in sixes
// of three .695, in threes of six .655, in fours of five and fives of four, with more idle lanes,
// .64; 50257 in eights of 12, with columns behind chunks, .62, of 13 .58; 16383 in pairs of 16 .79,
// in fours of eight and eights of four .76.
double uneven_ratio(int64_t cols, int size, int64_t warps, int64_t together) {
  constexpr int64_t kParts = 4;  // of a multiprocessor
  constexpr int64_t kManyWarps = 12;
  const bool alone = size == 1;
  const int64_t resident = warps * together;
  const auto columns = static_cast<double>(size * warps * kUnevenColumns);
  const double full = std::min(1.0, static_cast<double>(cols) / columns);
  const double busy = std::sqrt(static_cast<double>(resident) / kRowWarps);
  const double even = std::cbrt(static_cast<double>(resident) /
                                static_cast<double>(ceil_div(resident, kParts) * kParts));
  const double tail = full < 1 ? 1 : warps > kManyWarps ? 0.94 : 0.95;
  const double served = alone || !has_exchange_warp(warps, together) ? 1 : 1.06;
  const double shared = alone || together == 1 ? 1 : served > 1 ? 0.95 : 0.905;
  return full * busy * even * tail * served * shared * cluster_fit(size, together) *
         (alone ? 1.02 : 1);
}

// Columns that stream on a multiprocessor, at its best.
struct StreamColumns {
  int64_t of_blocks;  // in rows that take more than a warp
  int64_t of_warps;   // in rows of a warp or a part of one
};

// Beside a float32 dy a column takes half as much again in the ring: 65536 x 1024 bfloat16, with
// eight rows in a block, took 147 us on an H200, with seven 143.6 us, with six 134.6 us, with five
// 165 us.
//
// An H100, whose memory is slower, is slower still if as much is asked of it. Of an elementwise sum
// there, as on an H200 and so: bfloat16 1024 columns .91 and .97, 1600 .90 and .97, 2560 .93 and
// .98, 5120 .94 and .975, 2047 .915 and .96, in rows of a warp 192 .94 and .97, 384 .935 and .98,
// 768 .94 and .98; beside a float32 dy 1024 .93 and .96; float32 1024 .93 and .99, 4096 .93 and
// .95, 512 .95 and .99, 320 .95 and .98.
StreamColumns stream_columns(DType x_dtype, bool wide_dy, const DeviceProperties& device) {
  const bool slow = has_slow_memory(device);
  if (size_in_bytes(x_dtype) != 2) {
    return slow ? StreamColumns{3072, 2560} : StreamColumns{4096, 3500};
  }
  if (wide_dy) return slow ? StreamColumns{4608, 3800} : StreamColumns{6144, 5400};
  return slow ? StreamColumns{6144, 5200} : StreamColumns{8192, 6600};
}

// Rows that are not aligned, for a block to work on at a time: what is nearest to so many columns,
// or one more where that is less than 72 percent of them.
int64_t unaligned_rows(int64_t cols, int64_t columns) {
  const int64_t rows = (columns + cols / 2) / cols;
  return 100 * rows * cols >= 72 * columns ? rows : rows + 1;
}

// The shape of 16-bit rows that end within a chunk, and take more than a warp: by the blocks and
// warps that promise most. Of an elementwise sum, before (by a block, or the smallest cluster that
// leaves few threads idle, without columns behind chunks) and so, bfloat16 on an H100: 1025 columns
// .82 and .94, 4097 .865 and .91, 8705 .86 and .905, 10001 .885 and .90, 12289 .885 and .905, 16385
// .835 and .895, 32769 .82 and .905, 50257 .815 and .855. Beside a float32 dy lanes have no columns
// behind their chunks.
std::optional<RingShape> uneven_shape(int64_t cols, bool wide_dy, const DeviceProperties& device) {
  std::optional<RingShape> best;
  double best_ratio = 0;
  // Of rows that a block holds, blocks merge their partial sums, which clusters of them do not:
  // those of 124 clusters of four would take 6 % of 134 MB of 8191 columns.
  const int most_blocks = cols <= kMostUnevenColumns ? 1 : kMaxClusterSize;
  const int64_t rows =
      unaligned_rows(cols, stream_columns(DType::kBFloat16, false, device).of_blocks);
  for (int size = 1; size <= most_blocks; ++size) {
    for (const int64_t most : {kUnevenColumns, kUnevenColumns + kWarpSize}) {
      const int64_t warps = ceil_div(ceil_div(cols, most), size);
      const int columns = tail_columns(cols, warps * size);
      if (warps > kRowWarps || warps * size == 1 || (wide_dy && columns > 0)) continue;
      const int64_t room = kRowWarps / warps;
      const int64_t together = size > 1 ? room : std::clamp<int64_t>(rows, 1, room);
      const double ratio = uneven_ratio(cols, size, warps, together);
      if (ratio <= best_ratio) continue;
      best_ratio = ratio;
      best = RingShape{static_cast<int>(warps * kWarpSize), size};
      best->run_columns = columns;
    }
  }
  // With columns behind chunks the largest cluster holds rows that would take a grid else: 131073
  // columns .64 of an elementwise sum on an H100 in a grid, .74 so, 139001 .65 and .78.
  constexpr int64_t kMostWarps = kLargeClusterSize * kRowWarps;
  if (!best && !wide_dy && device.large_clusters > 0 && cols > kMostWarps * kUnevenColumns &&
      cols <= kLargeClusterSize * kMostTailColumns) {
    best = RingShape{kMaxThreadsPerRow, kLargeClusterSize};
    best->run_columns = tail_columns(cols, kMostWarps);
  }
  return best;
}

// Of rows that take `threads`, on an H100: the smallest cluster of which near to three quarters of
// the columns stream on a multiprocessor, in one block or two; none for rows that a block streams
// as well, whose partial sums can be merged. Of an elementwise sum there, by a block or the
// smallest cluster that leaves few threads idle, and so: bfloat16 8704 columns .925 and .95, 9216
// .935 and .955, 14336 .94 and .95, 16384 .935 and .95, 18432 .935 and .95, 24576 .93 and .96,
// 32768 .93 and .95, 49152 .935 and .96; float32 8192 .945 and .965, 12288 .94 and .965, 24576 .935
// and .96. In three blocks and more 8704 .93, 14336 .93, 16384 .925.
std::optional<RingShape> slow_shape(int64_t threads, DType x_dtype) {
  const int64_t most = ring_threads(x_dtype);
  const bool is_16_bit = size_in_bytes(x_dtype) == 2;
  const int64_t most_threads = is_16_bit ? kMaxThreadsPerRow : kMostCachedThreads;
  if (threads <= (is_16_bit ? most : most * 3 / 2)) return std::nullopt;
  constexpr double kLeast = 0.6, kBest = 0.75, kMost = 0.81;
  std::optional<RingShape> best;
  double least_off = kBest;
  for (int size = 2; size <= kMaxClusterSize; ++size) {
    const int64_t each = ceil_div(ceil_div(threads, size), kWarpSize) * kWarpSize;
    const int64_t together = std::max<int64_t>(1, most / each);
    const double busy = static_cast<double>(threads * together) / static_cast<double>(size * most);
    if (each > most_threads || together > 2 || busy < kLeast || busy > kMost) continue;
    const double off = std::abs(busy - kBest);
    if (off >= least_off) continue;
    least_off = off;
    best = RingShape{static_cast<int>(each), size};
  }
  return best;
}

// As of a 16-bit x whose y was float32.
bool has_wide_dy(const BackwardProblem& problem) {
  return problem.dy_dtype == DType::kFloat32 && size_in_bytes(problem.x_dtype) == 2;
}

// Warps of a block whose rows take a warp or a part of one: rather an odd number, as of blocks. Of
// an elementwise sum on an H200: bfloat16 64 columns in 12 warps .914, in 13 .933, in 14 .923, in
// 16 .913; 192 in eight .915, in nine .945, in ten .94, 320 in ten .938, in 11 .945, in 12 .941,
// 768 in nine .957, in ten .955, in 11 .945; float32 64 columns in six .92, in seven .955, in eight
// .93, 128 .95, .96 and .94, 512 .95, .97 and .95, 76 in ten .937, in 11 .945. But an even one for
// three chunks in a lane where rows have an odd number of chunks: 200 columns in 11 warps .92, in
// 12 .934, in 13 .915, 264 in 12, 13, 14 and 15 .92, .905, .93 and .925, 520 .927, .907, .937 and
// .937, 568 .947, .941, .937 and .925.
//
// On an H100 64 columns of bfloat16 in ten warps .925, in nine or eleven .94, 320 in eight .94, in
// nine .965; float32 76 columns in eight .93, in nine .96; with an odd number of chunks either: 200
// in eight, nine and ten .94, .947 and .941, 264 in nine, ten and 11 .943, .954 and .946.
int64_t short_row_warps(const BackwardPlan& plan, const BackwardProblem& problem,
                        const DeviceProperties& device) {
  constexpr int64_t kFloatWarps = 11;
  constexpr int64_t kLeast = 5;
  const int64_t most = size_in_bytes(problem.x_dtype) != 2 ? kFloatWarps
                       : plan.chunks_per_thread == kMostLaneChunks && !plan.packed
                           ? kWideLaneWarps
                           : kMaxThreadsPerRow / kWarpSize;
  const int64_t columns = problem.cols * rows_per_warp(plan);
  const int64_t wanted = stream_columns(problem.x_dtype, has_wide_dy(problem), device).of_warps;
  const bool odd_chunks = plan.chunks_per_thread == kMostLaneChunks && problem.cols % 16 == 8;
  if (odd_chunks && !has_slow_memory(device)) {
    constexpr int64_t kMoreColumns = 600;
    const int64_t pairs = (wanted + kMoreColumns + columns) / (2 * columns);
    return std::clamp(2 * pairs, kLeast, most);
  }
  const int64_t warps = std::clamp((wanted + columns / 2) / columns, kLeast, most);
  return std::min(warps | 1, most);
}

// Rows of one warp and more that a block works on at a time, if it has room for them: aligned ones
// as many as stream no more than the best number of columns (and a few more, of float32), but for
// one more where that is less than 72 percent of it. By what is nearest to 8000 and 4300 3072
// columns of bfloat16 reached .94 of an elementwise sum on an H200, in two rows for three .95; 768
// of float32 .94, in five rows for six .96, 1536 .95 and .96; but 5120 of bfloat16 .93, in one row
// .91. Others are not limited by memory: 1023 columns .87, in seven rows for eight .79.
//
// With brakes (see shape_ring) one more is better in float32 as soon as less than 95 percent stream
// without it: 768 columns in five rows .955, in six, with brakes, .97; 1280 in three and four .955
// and .975, 1536 in two and three .945 and .98, 3072 in one and two .93 and .95.
int64_t block_rows(const BackwardPlan& plan, const BackwardProblem& problem,
                   const DeviceProperties& device) {
  const bool wide_dy = plan.vectorized && has_wide_dy(problem);
  const int64_t best = stream_columns(problem.x_dtype, wide_dy, device).of_blocks;
  const bool is_float = size_in_bytes(problem.x_dtype) != 2;
  const int64_t most = is_float ? best * 21 / 20 : best + 8;
  if (!plan.vectorized) return unaligned_rows(problem.cols, is_float ? most : best);
  const int64_t rows = most / problem.cols;
  const int64_t least = is_float && !has_slow_memory(device) ? 95 : 72;  // percent
  return 100 * rows * problem.cols >= least * best ? rows : rows + 1;
}

// Whether rows of the ring brake, each turn waiting for the next row's statistics, where so many
// columns stream on a multiprocessor, in parts of the best: more than are best. See shape_ring.
bool wants_brakes(const BackwardPlan& plan, const BackwardProblem& problem, double columns,
                  bool slow) {
  const bool is_16_bit = size_in_bytes(problem.x_dtype) == 2;
  const bool in_cluster = plan.cluster_size > 1;
  if (!has_one_dtype(problem)) return false;
  if (slow) {
    constexpr double kMost = 1.1;
    return columns > kMost && (!in_cluster || (plan.vectorized && is_16_bit));
  }
  constexpr double kMost = 1.05;
  return !in_cluster && plan.vectorized && columns > kMost;
}

}  // namespace

// Of `blocks` that leave rows of partial sums, so many have to merge theirs, in a cluster. No more
// than it takes: 32768 x 4096 bfloat16 took 199.7 us on an H200 with two of them, 196.3 us with
// each for itself; 16384 x 8191 (by column) 268.8 us with four, which do not fit on all
// multiprocessors, 241.6 us with two.
int least_merged(int64_t blocks, const BackwardProblem& problem) {
  constexpr int kMost = 4;
  int merged = 1;
  while (problem.weight_grads && merged < kMost && !are_few(blocks / merged, problem)) merged *= 2;
  return merged;
}

// Clusters that run side by side and hold rows: pairs of them, if they are too many else, and where
// a cluster has no place for a pair, no more than may be.
//
// 5067 x 6624 float32 .938 of an elementwise sum on an H100 with 60 pairs of blocks, .935 with 30
// clusters of two such pairs, 4097 x 8192 in pairs .91 and .92, by column 4097 x 8191 .88 and .88;
// in fives 4096 x 8192 .95 with 45 of them, .935 with 40, .93 in 30 clusters of two fours.
int64_t streaming_clusters(int size, int64_t together, const BackwardProblem& problem,
                           const DeviceProperties& device) {
  const int clusters = resident_clusters(size, together, device);
  if (!are_too_many(clusters, problem)) return clusters;
  if (2 * size <= kMaxClusterSize) return 2 * resident_clusters(2 * size, together, device);
  return few_partials(problem);
}

int choose_merged(int64_t groups, int cluster_size, const BackwardProblem& problem,
                  const DeviceProperties& device, const PlanRequest& request) {
  if (request.merged) {
    const int merged = std::max(1, *request.merged);
    return merged * cluster_size <= kMaxClusterSize && groups >= merged ? merged : 1;
  }
  if (cluster_size > 1) {
    const bool pairs = groups % 2 == 0 && 2 * cluster_size <= kMaxClusterSize;
    return pairs && are_too_many(groups, problem) ? 2 : 1;
  }
  // Clusters of four do not fit everywhere (see shape_ring).
  const int least = least_merged(groups, problem);
  if (least == 4 && groups % 4 == 0 && groups < device.sm_count) return 4;
  return least >= 2 && groups % 2 == 0 ? 2 : 1;
}

// A block that holds the row, or the smallest cluster of blocks, of any number of them, that leaves
// few threads without columns; or else the one that leaves the fewest. Of an elementwise sum, 134
// MB on an H200:
//
// bfloat16, 8704 columns: pairs with 288 threads .76, threes with 192 .81, fours with 160 .83.
//   11264: pairs with 352 .85, threes with 256, two on a multiprocessor, .86, eights with 96 .84.
//   17408: fours with 288 .70, threes with 384 .80, fives with 224 .84, eights with 160 .81.
//   24576: fours with 384 .84, threes with 512 .87. 34816: eights with 288 .71, fives with 448 .82.
//   268 MB: 10240 columns, threes with 224 .905, fours with 160 .93, 20480, threes with 448 .89,
//   fives with 256 .93; 12288, pairs with 384 .93, threes with 256 .92, sixes with 128 .91.
// float32, in twice the threads and columns that stream otherwise rather than with idle ones: 4352
//   columns, pairs with 160, one on a multiprocessor, .73, one block with 288 .92; 6144, one block
//   .90; 8192, one block .89, pairs .91; 9216, pairs with 160 .76, pairs with 288 .90; 18432,
//   eights with 160 .75, fours with 288 .89. But where no more threads than otherwise leave few
//   without columns, so (268 MB): 9216, pairs with 288 .935, fives with 128 .945; 10240, pairs with
//   320 .93, threes with 224 .915, fives with 128 .95; 12288, pairs with 384 .93, threes with 256
//   .94; 20480, fours with 320 .935, fives with 256 .945.
std::optional<RingShape> ring_shape(const BackwardProblem& problem, const DeviceProperties& device,
                                    const PlanRequest& request) {
  // Very short rows have too few columns per lane for the ring's bookkeeping: 8388608 x 16 bfloat16
  // took 369 us on an H200, 246 us in the other kernel; 4194304 x 32, with four chunks, 257 us and
  // 237 us. (And dx of a single column, exactly zero, takes the other kernel's order of
  // operations.)
  constexpr int64_t kFewChunks = 4;
  if (!can_stream(problem.x_dtype, device) ||
      problem.cols <= kFewChunks * chunk_columns(problem.x_dtype)) {
    return std::nullopt;
  }
  const bool wide_dy = has_wide_dy(problem);
  if (!has_one_dtype(problem) && !wide_dy) return std::nullopt;
  const bool asked = request.cluster_size && *request.cluster_size <= kMaxClusterSize;
  const int least_size = asked ? std::max(1, *request.cluster_size) : 1;
  const int64_t threads = ceil_div(ceil_div(problem.cols, chunk_columns(problem.x_dtype)),
                                   backward_chunks(problem.x_dtype));
  // Grids are compiled for one dtype only.
  const bool is_16_bit = size_in_bytes(problem.x_dtype) == 2;
  const auto grid = [&] {
    return wide_dy ? std::nullopt
                   : grid_shape(threads, is_16_bit ? kMaxGridThreads : kMaxThreadsPerRow,
                                kMaxThreadsPerRow, is_16_bit, device, request);
  };
  if (asks_for_grid(request)) return grid();
  if (least_size == 1) {
    if (const auto shape = warp_shape(problem)) return shape;
  }
  if (is_16_bit && ends_within_a_chunk(problem) && !asked) {
    if (const auto shape = uneven_shape(problem.cols, wide_dy, device)) return shape;
  } else if (has_slow_memory(device) && !wide_dy && !asked) {
    if (const auto shape = slow_shape(threads, problem.x_dtype)) return shape;
  }
  constexpr double kBusy = 0.755, kPairBusy = 0.74;
  // Of what float32 has otherwise: in clusters, rather, and at most.
  constexpr double kRatherBusy = 1.05, kTooBusy = 1.5;
  constexpr std::array<int, 8> kInTurn = {1, 2, 3, 4, 5, 6, 7, 8};
  constexpr std::array<int, 8> kPowersFirst = {1, 2, 4, 8, 3, 5, 6, 7};
  const int most = ring_threads(problem.x_dtype);
  RingShape best;
  double best_share = 0;
  for (const double too_busy : {kRatherBusy, kTooBusy}) {
    for (int size : asked || is_16_bit ? kInTurn : kPowersFirst) {
      const int64_t each = ceil_div(ceil_div(threads, size), kWarpSize) * kWarpSize;
      if (size < least_size || each > kMaxThreadsPerRow) continue;
      const RingShape shape{static_cast<int>(each), size};
      if (asked) return shape;
      const double share = busy_share(threads, size, each, most);
      const double busy = size == 2 ? kPairBusy : kBusy;
      if (size == 1 ? share <= kTooBusy : share >= busy && share <= too_busy) return shape;
      if (share > best_share) {
        best = shape;
        best_share = share;
      }
    }
  }
  if (best_share > 0) return best;
  const int64_t each = ceil_div(ceil_div(threads, kLargeClusterSize), kWarpSize) * kWarpSize;
  if (device.large_clusters > 0 && each <= kMaxThreadsPerRow) {
    return RingShape{static_cast<int>(each), kLargeClusterSize};
  }
  return grid();
}

// The ring's threads, the rows that a block works on at a time, and how many blocks there are.
//
// Fewer blocks than multiprocessors: each GPC has its own path to memory, GPCs have different
// numbers of multiprocessors, and with a block on each those of a large GPC get a smaller share and
// finish last. On an H200, whose 132 are in GPCs of 14 to 18, 16384 x 8192 bfloat16 took 216 us
// with 132 blocks, which ended between 171 and 205 us, and 201 us with 116, which ended within 6
// us. And an odd number, if possible: then the rows that a block has under way are not a multiple
// of a large power of two apart. 131072 x 1024 bfloat16 reached .95 of an elementwise sum with 115
// blocks, .925 with 116; 32768 x 4096 .96 and .95, and .93 with 112 and 120.
//
// It is otherwise where memory does not set the pace: where rows are not aligned (32768 x 4095: .66
// with 132 blocks, .59 with 116), and where fewer or more columns stream on a multiprocessor than
// is best (29079 x 1152 float32, three rows: .95 with 131 blocks, .91 with 115; 13085 x 2560, two:
// .91 and .88).
//
// Clusters of more than two are as many as find a place: 4096 x 65536 bfloat16 .955 with 120
// blocks, .942 with 112; 2180 x 15360 float32 .91 with 120, .90 with 112. Pairs are, but where as
// many 16-bit columns stream: 8192 x 16384 .92 with 132, .93 with 116.
//
// Where more columns stream than is best, rows brake (see backward_ring). Of an elementwise sum on
// an H200, without, and so with 131 and with 115 blocks: bfloat16 4608 columns in two rows .93, .96
// and .95, 5120 .93, .945 and .955, 1792 in five .93, .955 and .93; float32 768 in six .94, .97 and
// .96, 1280 in four .945, .96 and .975, 1536 in three .95, .98 and .965, 2560 in two .95, .965 and
// .98, 3072 in two .945, .95 and .93, 4608 in one .94, .975 and .965, 5120 .94, .965 and .975. None
// in clusters (bfloat16 20480 .89 and .835), or that are not aligned (2047 .90 and .87).
//
// On an H100 clusters, too, are rather an odd number (float32 8192 x 16384 .95 with 30, .96 with
// 29), and more brake. Without and so: in a block 3840 columns of bfloat16 .93 and .98, 7168 .93
// and .97, not aligned 4095 .875 and .92, 7777 .87 and .90, 8191 .85 and .90; float32 2048 and 4096
// .955 and .995, 4608 .95 and .955; in clusters as large as an H200's bfloat16 16384 .92
// and .935, 65536 .93 and .94, but float32 16384 .955 and .945, and not aligned 16385 .85 and .82,
// 65535 .92 and .88. Where no more stream it costs up to 5 percent (12288 .95 and .90).
int64_t shape_ring(BackwardPlan& plan, const RingShape& shape, const BackwardProblem& problem,
                   const DeviceProperties& device, const PlanRequest& request) {
  plan.kernel = Kernel::kRing;
  plan.chunks_per_thread = ring_chunks(shape, problem);
  plan.threads_per_row = shape.threads;
  plan.cluster_size = shape.cluster_size;
  plan.in_grid = shape.grid_rows > 0;
  plan.run_columns = shape.run_columns;
  const bool is_16_bit = size_in_bytes(problem.x_dtype) == 2;
  const bool in_cluster = shape.cluster_size > 1;
  const bool short_rows = shape.threads <= kWarpSize && !in_cluster;
  plan.packed = plan.vectorized && has_one_dtype(problem);
  const int stream_threads = ring_threads(problem.x_dtype);
  // Blocks of a cluster on a multiprocessor, or rows of a block.
  const int64_t blocks_together = std::max(1, stream_threads / shape.threads);
  plan.exchange_warp =
      in_cluster && (plan.in_grid || request.exchange_warp.value_or(true)) &&
      has_exchange_warp(shape.threads / kWarpSize, plan.in_grid ? 1 : blocks_together);
  const int64_t most_threads = !is_16_bit                                  ? kMostCachedThreads
                               : plan.vectorized && has_one_dtype(problem) ? kMaxRingThreads
                                                                           : kMaxThreadsPerRow;
  const int64_t room = std::max<int64_t>(1, most_threads / shape.threads);
  const int64_t most_rows = in_cluster ? 1
                            : short_rows
                                ? short_row_warps(plan, problem, device) * rows_per_warp(plan)
                                : std::clamp<int64_t>(block_rows(plan, problem, device), 1, room);
  // Few rows: smaller blocks on more multiprocessors.
  const int64_t least_rows = rows_per_warp(plan);
  const int64_t spread = ceil_div(ceil_div(problem.rows, device.sm_count), least_rows) * least_rows;
  plan.rows_per_block = static_cast<int>(std::min(most_rows, spread));

  const int sms = device.sm_count;
  if (shape.grid_rows > 0) return shape.grid_rows * shape.cluster_size;
  if (sms < kFewMultiprocessors) return std::max(sms, shape.cluster_size);
  if (shape.cluster_size == kLargeClusterSize) return device.large_clusters * kLargeClusterSize;
  const int some = sms - sms / 8;
  const bool slow = has_slow_memory(device);
  if (short_rows) return (sms - 1) | 1;
  // Columns that stream on a multiprocessor, in parts of the best.
  const int64_t best = stream_columns(problem.x_dtype, has_wide_dy(problem), device).of_blocks;
  const double columns = static_cast<double>(problem.cols) *
                         static_cast<double>(in_cluster ? blocks_together : most_rows) /
                         static_cast<double>(best * shape.cluster_size);
  plan.brakes = wants_brakes(plan, problem, columns, slow);
  constexpr double kLeastFewer = 1.2, kMostFewer = 1.4;
  const bool fewer_brake =
      plan.brakes && !in_cluster && (slow || (columns >= kLeastFewer && columns <= kMostFewer));
  constexpr double kLeast = 0.9, kMost = 1.1;
  const bool by_memory =
      plan.vectorized && (fewer_brake || (columns >= kLeast && columns <= kMost));
  if (in_cluster) {
    const bool fewer = by_memory && shape.cluster_size == (is_16_bit ? 2 : kMaxClusterSize);
    const int64_t all = streaming_clusters(shape.cluster_size, blocks_together, problem, device);
    const bool pairs = are_too_many(all, problem);
    const int64_t odd = (all - 1) | 1;
    const int64_t teams = fewer                               ? some / shape.cluster_size
                          : slow && plan.vectorized && !pairs ? odd
                                                              : all;
    return teams * shape.cluster_size;
  }
  const int blocks = !plan.vectorized ? sms : ((by_memory ? some : sms) - 1) | 1;
  const int merged = least_merged(blocks, problem);
  if (merged == 1) return blocks;
  if (by_memory) return some / 4 * 4;
  const bool all = slow && are_few(sms / 2, problem);
  return merged == 2 ? (all ? sms : blocks) / 2 * 2 : resident_clusters(4, 1, device) * 4;
}

}  // namespace fastnorm::cuda
