// The choice of kernels and their shapes; see plan.h.
#include "plan.h"

#include <algorithm>
#include <array>

namespace fastnorm::cuda {
namespace {

// The fused backward leaves one row of partial sums per block, written and read once in float32. It
// pays while a block has at least this many rows to spread that over; below, x and dy mostly sit in
// the L2 cache and reading them twice is cheaper.
constexpr int64_t kMinRowsPerPartial = 8;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t next_power_of_two(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

int64_t chunk_columns(DType x_dtype) { return kChunkBytes / size_in_bytes(x_dtype); }

// The most chunks of a row that one block holds.
int64_t block_chunks(int chunks_per_thread) {
  return static_cast<int64_t>(kMaxThreadsPerRow) * chunks_per_thread;
}

bool runs(Kernel kernel, int64_t chunks, int chunks_per_thread, const DeviceProperties& device) {
  switch (kernel) {
    case Kernel::kShortRows:
    case Kernel::kElements:
    case Kernel::kFewRows:
    case Kernel::kFewElements:
    case Kernel::kRing:
      return false;  // of one direction, and chosen there
    case Kernel::kRows:
      return chunks <= block_chunks(chunks_per_thread);
    case Kernel::kCluster:
      return device.compute_capability >= 90 &&
             chunks <= block_chunks(chunks_per_thread) * kMaxClusterSize;
    case Kernel::kSplit:
      return true;
  }
  return false;
}

Kernel choose_kernel(int64_t chunks, int chunks_per_thread, const DeviceProperties& device,
                     const PlanRequest& request) {
  if (request.kernel && runs(*request.kernel, chunks, chunks_per_thread, device)) {
    return *request.kernel;
  }
  for (Kernel kernel : {Kernel::kRows, Kernel::kCluster}) {
    if (runs(kernel, chunks, chunks_per_thread, device)) return kernel;
  }
  return Kernel::kSplit;
}

// The smallest cluster that holds the row, where a block holds `block_chunks`; a larger one on
// request.
int choose_cluster_size(int64_t chunks, int64_t block_chunks, const PlanRequest& request) {
  int64_t size = next_power_of_two(ceil_div(chunks, block_chunks));
  size = std::max<int64_t>(size, 2);
  if (request.cluster_size && *request.cluster_size >= size &&
      *request.cluster_size <= kMaxClusterSize) {
    size = next_power_of_two(*request.cluster_size);
  }
  return static_cast<int>(size);
}

// Threads for `chunks` chunks: a power of two within a warp, so that rows share it evenly; whole
// warps beyond.
int choose_threads(int64_t chunks, int chunks_per_thread) {
  const int64_t threads = ceil_div(chunks, chunks_per_thread);
  return static_cast<int>(threads <= kWarpSize ? next_power_of_two(threads)
                                               : ceil_div(threads, kWarpSize) * kWarpSize);
}

template <class Plan>
void shape_cluster(Plan& plan, int64_t chunks, int block_threads, const PlanRequest& request) {
  plan.cluster_size = choose_cluster_size(chunks, plan.chunks_per_thread * block_threads, request);
  plan.threads_per_row =
      choose_threads(ceil_div(chunks, plan.cluster_size), plan.chunks_per_thread);
  // A row's partial results travel between whole warps.
  plan.threads_per_row = std::max(plan.threads_per_row, kWarpSize);
}

template <class Plan>
void shape_segments(Plan& plan, int64_t chunks) {
  plan.threads_per_row = kSegmentThreads;
  plan.segments = ceil_div(chunks, static_cast<int64_t>(kSegmentThreads) * plan.chunks_per_thread);
}

// Shared memory that a block can have on a device. Of those that are not known, the least of the
// newer ones.
int shared_bytes_of(const DeviceProperties& device) {
  constexpr int kKilobyte = 1024;
  switch (device.compute_capability) {
    case 75:
      return 64 * kKilobyte;
    case 80:
    case 87:
      return 163 * kKilobyte;
    case 90:
    case 100:
    case 103:
      return 227 * kKilobyte;
    default:
      return 99 * kKilobyte;
  }
}

// How the ring holds a row: by `threads` of each block of a cluster, or of a group of blocks of a
// grid that runs as a whole, which then holds `grid_rows` at once.
struct RingShape {
  int threads = 0;
  int cluster_size = 1;
  int grid_rows = 0;
};

// Threads that stream rows of x's dtype on one multiprocessor: 512 of a 16-bit type. With twice the
// bytes in flight float32 is slower: 16384 x 4096 took 216 us on an H200 with 512 threads, 200 us
// with 256.
int ring_threads(DType x_dtype) { return size_in_bytes(x_dtype) == 2 ? 512 : 256; }

// Of all multiprocessors, those on which clusters of 1, 2, ... 8 blocks find a place, with a block
// on each and with several. (GPCs of an H200 have 14 to 18.)
constexpr double kClusterFit[2][kMaxClusterSize] = {{1, 1, 0.89, 0.91, 0.83, 0.77, 0.80, 0.91},
                                                    {1, 1, 0.90, 0.94, 0.89, 0.89, 0.85, 0.91}};

double cluster_fit(int size, int64_t blocks) { return kClusterFit[blocks > 1][size - 1]; }

// The threads that have columns when rows that take `threads` are held by `size` blocks of
// `block_threads`, as a share of the `most` that stream on every multiprocessor.
double busy_share(int64_t threads, int size, int64_t block_threads, int most) {
  const int64_t blocks = std::max<int64_t>(1, most / block_threads);
  return static_cast<double>(threads * blocks) / static_cast<double>(size * int64_t{most}) *
         cluster_fit(size, blocks);
}

// How many clusters of `size` blocks run side by side, `blocks` of them on a multiprocessor. More
// would wait for the end of others, and take twice the time.
int resident_clusters(int size, int64_t blocks, const DeviceProperties& device) {
  const int known = blocks <= kMostResident ? device.clusters[size - 1][blocks - 1] : 0;
  if (known > 0) return known;
  const auto all = static_cast<double>(device.sm_count * blocks) * cluster_fit(size, blocks);
  return std::max(1, static_cast<int>(all / size));
}

int64_t bytes_of(const BackwardProblem& problem) {
  return problem.rows * problem.cols * size_in_bytes(problem.x_dtype);
}

// Whether rows of partial sums take little memory: 2 % of x, or 8 MB if x has less than 128 MB.
// (With 4 MB 4096 x 8192 bfloat16 took 62.7 us on an H200, by two blocks each, 60.6 us with each
// for itself; 1024 x 8192 26.8 and 25.8 us.)
bool are_few(int64_t partials, const BackwardProblem& problem) {
  constexpr int64_t kLargeBytes = 128'000'000;
  constexpr int64_t kSmallBytes = 8'000'000;
  const int64_t x_bytes = bytes_of(problem);
  const int64_t most = x_bytes >= kLargeBytes ? x_bytes / 50 : kSmallBytes;
  return 2 * int64_t{sizeof(float)} * partials * problem.cols <= most;
}

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

constexpr int kFewMultiprocessors = 16;  // nothing was measured on a device with fewer

// Clusters of four do not fit everywhere (see shape_ring).
int choose_merged(int64_t blocks, const BackwardProblem& problem, const DeviceProperties& device) {
  const int least = least_merged(blocks, problem);
  if (least == 4 && blocks % 4 == 0 && blocks < device.sm_count) return 4;
  return least >= 2 && blocks % 2 == 0 ? 2 : 1;
}

// The shares of the rows, at least, of which dw and db are added up row by row. PyTorch adds up 32;
// the error of fewer and longer ones grows faster with the number of rows. With twice as many rows
// as here, that of equal signs exceeds twice PyTorch's and the rounding that tests allow
// (simulated).
int64_t least_shares(int64_t rows) {
  constexpr int64_t kEnough = 32;
  constexpr int64_t kShare = 64;
  int64_t shares = 1;
  while (shares < kEnough && rows > kShare * shares * shares) ++shares;
  return shares;
}

bool has_one_dtype(const BackwardProblem& problem) { return problem.dy_dtype == problem.x_dtype; }

void plan_columns(BackwardPlan& plan, const BackwardProblem& problem, int64_t chunks,
                  const DeviceProperties& device) {
  plan.weight_grads = WeightGrads::kColumns;
  plan.column_threads = static_cast<int>(std::min<int64_t>(kWarpSize, next_power_of_two(chunks)));
  plan.column_rows = kMaxSharedBlock / plan.column_threads;
  plan.column_tiles = ceil_div(chunks, plan.column_threads);
  // As many blocks as run side by side, if slices of all tiles come near that; else enough to fill
  // the device several times over. But slices of a few rows per thread, and enough of them.
  const int64_t resident = int64_t{kColumnBlocks} * device.sm_count;
  const int64_t even = resident / plan.column_tiles;
  const bool side_by_side =
      plan.vectorized && has_one_dtype(problem) && problem.x_dtype != DType::kFloat64;
  const bool fills = side_by_side && 10 * even * plan.column_tiles >= 9 * resident;
  const int64_t wanted = fills ? even : ceil_div(2 * resident, plan.column_tiles);
  const int64_t sensible = ceil_div(problem.rows, int64_t{4} * plan.column_rows);
  const int64_t least = ceil_div(least_shares(problem.rows), plan.column_rows);
  plan.partials = std::max<int64_t>(1, std::min(std::max(wanted, least), sensible));
}

// Whether rows of partial sums take no more than 8 % of what x does.
bool are_small(int64_t partials, const BackwardProblem& problem) {
  const int64_t bytes = 2 * size_in_bytes(accumulation_dtype(problem.x_dtype)) * partials;
  return 100 * bytes <= 8 * problem.rows * size_in_bytes(problem.x_dtype);
}

// The tiles of columns in which kFewRows sums dw and db.
struct Tiles {
  int lanes = kMaxTileLanes;
  int slices = 1;  // blocks that share the rows of a tile
  int64_t blocks = 0;
};

// 128 bytes wide and cut into slices until there is a block for each multiprocessor, if each has
// rows enough; 64 bytes wide where that gives very few. More blocks leave no room for those of dx:
// 512 x 8192 bfloat16 took 11 us in a graph on an H200 with 128 of them, 15 us with 256.
Tiles shape_tiles(const BackwardProblem& problem, int cluster_size, const DeviceProperties& device,
                  int most_lanes) {
  constexpr int kLeastSliceRows = 128;
  constexpr int kLeastBlocks = 32;
  Tiles tiles;
  for (int lanes = most_lanes; lanes >= kMinTileLanes; lanes /= 2) {
    tiles.lanes = lanes;
    tiles.slices = cluster_size;
    const int64_t wide = ceil_div(problem.cols, lanes * chunk_columns(problem.x_dtype));
    while (cluster_size == 1 && tiles.slices < kMaxClusterSize &&
           wide * tiles.slices < device.sm_count &&
           problem.rows >= 2 * tiles.slices * kLeastSliceRows) {
      tiles.slices *= 2;
    }
    tiles.blocks = wide * tiles.slices;
    if (tiles.blocks >= kLeastBlocks) break;
  }
  return tiles;
}

bool asks_for_grid(const PlanRequest& request) {
  return request.cluster_size && *request.cluster_size > kLargeClusterSize;
}

// Rows of `threads` threads that no cluster holds, in a grid that runs as a whole: as many rows at
// once as there are multiprocessors for, with even shares; a block on each but some, as in
// shape_ring, or as many more as that takes. What blocks tell each other costs the same for a small
// share: 512 x 262144 float32 backward took 500 us on an H200 by three times 40 blocks, 444 us by
// four times 32.
std::optional<RingShape> grid_shape(int64_t threads, const DeviceProperties& device,
                                    const PlanRequest& request) {
  int64_t least = std::max<int64_t>(kLargeClusterSize + 1, ceil_div(threads, kMaxThreadsPerRow));
  if (asks_for_grid(request)) least = std::max<int64_t>(least, *request.cluster_size);
  const int64_t all = device.whole_grids ? std::min(kMaxGridBlocks, device.sm_count) : 0;
  if (least > all) return std::nullopt;
  const int64_t rows = all / least;
  const int64_t size = std::max(least, (all - all / 11) / rows);
  const int64_t each = ceil_div(ceil_div(threads, size), kWarpSize) * kWarpSize;
  return RingShape{static_cast<int>(each), static_cast<int>(size), static_cast<int>(rows)};
}

// Whether rows can be streamed through shared memory.
bool streams(const BackwardProblem& problem, const DeviceProperties& device) {
  constexpr int kRingBytes = 227 * 1024;
  return device.compute_capability >= 90 && shared_bytes_of(device) >= kRingBytes &&
         problem.x_dtype != DType::kFloat64;
}

// As of a 16-bit x whose y was float32.
bool has_wide_dy(const BackwardProblem& problem) {
  return problem.dy_dtype == DType::kFloat32 && size_in_bytes(problem.x_dtype) == 2;
}

bool ends_within_a_chunk(const BackwardProblem& problem) {
  return problem.cols % chunk_columns(problem.x_dtype) != 0;
}

// A block that holds the row, or the smallest cluster of blocks, of any number of them, that leaves
// few threads without columns; or else the one that leaves the fewest. Of an elementwise sum, 134
// MB on an H200:
//
// bfloat16, 8704 columns: pairs with 288 threads .76, threes with 192 .81, fours with 160 .83.
//   11264: pairs with 352 .85, threes with 256, two on a multiprocessor, .86, eights with 96 .84.
//   17408: fours with 288 .70, threes with 384 .80, fives with 224 .84, eights with 160 .81.
//   24576: fours with 384 .84, threes with 512 .87. 34816: eights with 288 .71, fives with 448 .82.
// float32, in twice the threads and columns that stream otherwise rather than with idle ones: 4352
//   columns, pairs with 160, one on a multiprocessor, .73, one block with 288 .92; 6144, one block
//   .90; 8192, one block .89, pairs .91; 9216, pairs with 160 .76, pairs with 288 .90; 18432,
//   eights with 160 .75, fours with 288 .89.
//
// Rows that end within a chunk wait less for each other in several blocks on a multiprocessor, and
// in clusters of a power of two: 12289 columns of bfloat16, pairs with 416 threads .59, fives with
// 160 .65; 32767, fours with 512 .64, eights with 256 .68; 20001, fives with 256 .65, eights with
// 160 .67.
std::optional<RingShape> ring_shape(const BackwardProblem& problem, const DeviceProperties& device,
                                    const PlanRequest& request) {
  // Very short rows have too few columns per lane for the ring's bookkeeping: 8388608 x 16 bfloat16
  // took 369 us on an H200, 246 us in the other kernel; 4194304 x 32, with four chunks, 257 us and
  // 237 us. (And dx of a single column, exactly zero, takes the other kernel's order of
  // operations.)
  constexpr int64_t kFewChunks = 4;
  if (!streams(problem, device) || problem.cols <= kFewChunks * chunk_columns(problem.x_dtype)) {
    return std::nullopt;
  }
  const bool wide_dy = has_wide_dy(problem);
  if (!has_one_dtype(problem) && !wide_dy) return std::nullopt;
  const bool asked = request.cluster_size && *request.cluster_size <= kMaxClusterSize;
  const int least_size = asked ? std::max(1, *request.cluster_size) : 1;
  const int64_t threads = ceil_div(ceil_div(problem.cols, chunk_columns(problem.x_dtype)),
                                   backward_chunks(problem.x_dtype));
  // Grids are compiled for one dtype only.
  const auto grid = [&] { return wide_dy ? std::nullopt : grid_shape(threads, device, request); };
  if (asks_for_grid(request)) return grid();
  if (least_size == 1 && threads <= kWarpSize) {
    return RingShape{static_cast<int>(next_power_of_two(threads)), 1};
  }
  constexpr double kBusy = 0.74;
  constexpr double kLeastOfBlock = 0.62;  // of rows that end within a chunk
  constexpr double kAlone = 0.85;         // of their pairs, with one block on a multiprocessor
  constexpr double kTooBusy = 1.5;        // of what float32 has otherwise
  constexpr std::array<int, 8> kInTurn = {1, 2, 3, 4, 5, 6, 7, 8};
  constexpr std::array<int, 8> kPowersFirst = {1, 2, 4, 8, 3, 5, 6, 7};
  const int most = ring_threads(problem.x_dtype);
  const bool is_16_bit = size_in_bytes(problem.x_dtype) == 2;
  const bool waits = is_16_bit && ends_within_a_chunk(problem);
  const bool in_turn = asked || (is_16_bit && !waits);
  RingShape best;
  double best_share = 0;
  for (int size : in_turn ? kInTurn : kPowersFirst) {
    const int64_t each = ceil_div(ceil_div(threads, size), kWarpSize) * kWarpSize;
    if (size < least_size || each > kMaxThreadsPerRow) continue;
    const RingShape shape{static_cast<int>(each), size};
    if (asked) return shape;
    const double share = busy_share(threads, size, each, most);
    const bool alone = most / each <= 1;
    bool fits = share <= kTooBusy;
    if (size == 1) {
      fits &= !waits || 2 * threads <= kMaxThreadsPerRow || share >= kLeastOfBlock;
    } else {
      fits &= share >= kBusy && !(waits && alone && (size > 2 || share < kAlone));
    }
    if (fits) return shape;
    if (share > best_share) {
      best = shape;
      best_share = share;
    }
  }
  if (best_share > 0) return best;
  const int64_t each = ceil_div(ceil_div(threads, kLargeClusterSize), kWarpSize) * kWarpSize;
  if (device.large_clusters > 0 && each <= kMaxThreadsPerRow) {
    return RingShape{static_cast<int>(each), kLargeClusterSize};
  }
  return grid();
}

// Very short rows that end within a chunk: as many lanes as have up to kTinyColumns columns each.
bool is_tiny(int64_t cols) { return cols <= kMostTinyColumns; }

int tiny_lanes(int64_t cols) {
  return static_cast<int>(next_power_of_two(ceil_div(cols, kTinyColumns)));
}

int tiny_columns(int64_t cols) {
  const auto most = static_cast<int>(ceil_div(cols, tiny_lanes(cols)));
  return std::max(kTinyColumns / 2, (most + 1) / 2 * 2);
}

// How kElements holds a row that ends within a chunk: as the ring, but with single columns. Warps
// are as many as share those of a multiprocessor well, and have 5 to 8 pairs of columns per lane.
struct ElementShape {
  RingShape ring;
  int columns = 0;   // of a lane, at most
  int together = 1;  // rows of a block, or blocks of clusters on a multiprocessor
};

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

// Whether rows that end within a chunk are better off in the ring than by column: of a 16-bit type,
// long ones, and others in warps with few idle lanes. Of an elementwise sum, 134 MB on an H200, in
// the ring and by column: bfloat16 551 columns .51 and .66, 1023 .84 and .83, 1317 .74 and .79,
// 2047 .84 and .81, 2105 .72 and .75, 3193 .72 and .69, 4095 .83 and .80, 4097 .63 and .59, 5501
// .65 and .59, 8357 .64 and .55, 12289 .66 and .66, 24577 .60 and .61, 32769 .57 and .46, 50257 .56
// and .53; float32 1023 .91 and .90, 2105 .87 and .90, 4095 .88 and .87, 7799 .83 and .88.
bool ring_holds_uneven_rows(const BackwardProblem& problem) {
  constexpr int64_t kWarps = kMaxThreadsPerRow / kWarpSize;
  constexpr int64_t kMostColumns = 65536;
  if (size_in_bytes(problem.x_dtype) != 2 || problem.cols > kMostColumns) return false;
  const int64_t warp_columns =
      kWarpSize * backward_chunks(problem.x_dtype) * chunk_columns(problem.x_dtype);
  const int64_t warps = ceil_div(problem.cols, warp_columns);
  if (2 * warps > kWarps) return true;
  const int64_t rows = kWarps / warps;  // of a block
  const auto cols = static_cast<double>(problem.cols);
  return warps > 1 && cols >= 0.87 * static_cast<double>(warps * warp_columns) &&
         cols * static_cast<double>(rows) >= 0.65 * static_cast<double>(kWarps * warp_columns);
}

std::optional<ElementShape> element_shape(const BackwardProblem& problem,
                                          const DeviceProperties& device,
                                          const PlanRequest& request) {
  constexpr int64_t kMostPairs = 8;
  // A single column's dx is exactly zero, but not in this order of operations.
  if (!ends_within_a_chunk(problem) || problem.cols == 1 || !has_one_dtype(problem) ||
      !streams(problem, device)) {
    return std::nullopt;
  }
  const bool asked = request.cluster_size && *request.cluster_size <= kMaxClusterSize;
  const int least_size = asked ? static_cast<int>(next_power_of_two(*request.cluster_size)) : 1;
  if (is_tiny(problem.cols)) {
    if (least_size > 1) return std::nullopt;
    return ElementShape{{tiny_lanes(problem.cols), 1}, tiny_columns(problem.cols)};
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
  const int most_size = device.large_clusters > 0 ? kLargeClusterSize : kMaxClusterSize;
  std::optional<ElementShape> found;
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
    if (found && (!busy || size > kMaxClusterSize)) continue;
    const int64_t least_busy = stream_warps(problem.x_dtype)[0].busy;
    while (!busy && most / warps * warps < least_busy) ++warps;
    const int64_t columns = columns_of(warps * size * kWarpSize);
    if (columns <= 2 * kLeastElementPairs) break;  // more blocks than have enough to do
    found = ElementShape{{static_cast<int>(warps * kWarpSize), size},
                         static_cast<int>(columns),
                         static_cast<int>(most / warps)};
    if (busy || asked || !is_16_bit || size < 4 || size == kMaxClusterSize) break;
  }
  return found;
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
// stream_threads hold (29079 x 1152 float32, three rows: .95 with 131 blocks, .91 with 115; 13085 x
// 2560, two: .91 and .88). Rows of a block are as many as come near that,
// or a little less or more: by 8192 and 4096 it would be five rows of 1792 columns of bfloat16, .92
// for .93 of four, and one of 2816 of float32, .89 for .92 of two.
//
// Clusters of more than two are as many as find a place: 4096 x 65536 bfloat16 .955 with 120
// blocks, .942 with 112; 2180 x 15360 float32 .91 with 120, .90 with 112. Pairs are, but where as
// many 16-bit columns stream: 8192 x 16384 .92 with 132, .93 with 116.
int64_t shape_ring(BackwardPlan& plan, const RingShape& shape, const BackwardProblem& problem,
                   const DeviceProperties& device) {
  plan.kernel = Kernel::kRing;
  plan.chunks_per_thread = backward_chunks(problem.x_dtype);
  plan.threads_per_row = shape.threads;
  plan.cluster_size = shape.cluster_size;
  const bool is_16_bit = size_in_bytes(problem.x_dtype) == 2;
  const bool in_cluster = shape.cluster_size > 1;
  const bool short_rows = shape.threads <= kWarpSize && !in_cluster;
  const int stream_threads = ring_threads(problem.x_dtype);
  // Blocks of a cluster on a multiprocessor, or rows of a block.
  const int64_t blocks_together = std::max(1, stream_threads / shape.threads);
  const int64_t near = ((is_16_bit ? 8000 : 4300) + problem.cols / 2) / problem.cols;
  const int64_t most_threads = !is_16_bit                                  ? kMostCachedThreads
                               : plan.vectorized && has_one_dtype(problem) ? kMaxRingThreads
                                                                           : kMaxThreadsPerRow;
  const int64_t room = std::max<int64_t>(1, most_threads / shape.threads);
  const int64_t most_rows = in_cluster   ? 1
                            : short_rows ? kMaxThreadsPerRow / shape.threads
                                         : std::clamp<int64_t>(near, 1, room);
  // Few rows: smaller blocks on more multiprocessors.
  const int64_t least_rows = std::max(1, kWarpSize / shape.threads);
  const int64_t spread = ceil_div(ceil_div(problem.rows, device.sm_count), least_rows) * least_rows;
  plan.rows_per_block = static_cast<int>(std::min(most_rows, spread));

  const int sms = device.sm_count;
  if (shape.grid_rows > 0) return shape.grid_rows * shape.cluster_size;
  if (sms < kFewMultiprocessors) return std::max(sms, shape.cluster_size);
  if (shape.cluster_size == kLargeClusterSize) return device.large_clusters * kLargeClusterSize;
  const int some = sms - sms / 8;
  if (short_rows) return plan.vectorized && is_16_bit ? sms - sms / 11 : sms;
  // Columns that stream on a multiprocessor, as a share of those of stream_threads.
  const double columns = static_cast<double>(problem.cols) *
                         static_cast<double>(in_cluster ? blocks_together : most_rows) /
                         static_cast<double>(stream_threads * plan.chunks_per_thread *
                                             chunk_columns(problem.x_dtype) * shape.cluster_size);
  if (in_cluster) {
    const bool fewer = plan.vectorized && columns >= 0.9 &&
                       shape.cluster_size == (is_16_bit ? 2 : kMaxClusterSize);
    const int all = resident_clusters(shape.cluster_size, blocks_together, device);
    return (fewer ? some / shape.cluster_size : all) * shape.cluster_size;
  }
  const bool by_memory = plan.vectorized && columns >= 0.9 && columns <= 1.1;
  const int blocks = !plan.vectorized ? sms : ((by_memory ? some : sms) - 1) | 1;
  const int merged = least_merged(blocks, problem);
  if (merged == 1) return blocks;
  if (by_memory) return some / 4 * 4;
  return merged == 2 ? blocks / 2 * 2 : resident_clusters(4, 1, device) * 4;
}

// Whether rows are better off one by one than in the ring: where x and dy are small enough to be
// read twice, and there are columns enough to sum side by side (8.4 MB, 4096 x 1024 bfloat16, took
// 15.4 us on an H200, in the ring 17.3 us; 12.6 MB, 8192 x 768, 22.4 and 22.1 us; 16.8 MB, 4096 x
// 2048, 25.5 and 23.7 us); or for dx alone. Rows of more than 256 threads have but one block on a
// multiprocessor, and are slower then where there are many: dx of 16384 x 8192 bfloat16 took 201
// us, in the ring 194 us; 65536 x 1024 100 us for 107 us.
constexpr int64_t kFewRowsBytes = 12 << 20;
constexpr int64_t kFewLongRowsBytes = 32 << 20;  // of dx alone

// Likewise of dx alone where rows end within a chunk. Of 16-bit elements, which are then stored one
// by one, 16384 x 1023 bfloat16 took 47 us on an H200, in the ring 38 us; 1024 x 1023 7.6 us
// for 8.1 us. Of float32 65536 x 1023 took 187 us, as long as an elementwise sum, for 215 us.
constexpr int64_t kFewElementsBytes = 4 << 20;

bool has_few_rows(const BackwardProblem& problem, const RingShape& shape,
                  const DeviceProperties& device) {
  const int64_t bytes = bytes_of(problem);
  if (!problem.weight_grads) {
    const bool too_many = ends_within_a_chunk(problem) && problem.x_dtype != DType::kFloat32 &&
                          bytes > kFewElementsBytes;
    return !too_many && shape.cluster_size == 1 &&
           (shape.threads <= kMaxSharedBlock || bytes <= kFewLongRowsBytes);
  }
  const bool whole = problem.aligned && !ends_within_a_chunk(problem);
  const Tiles tiles = shape_tiles(problem, shape.cluster_size, device, kMaxTileLanes);
  return bytes <= kFewRowsBytes && ceil_div(problem.rows, tiles.slices) <= (whole ? 1024 : 256);
}

// Rows by column: how many a block works on at a time, and how many blocks there are.
int64_t shape_elements(BackwardPlan& plan, const ElementShape& shape,
                       const BackwardProblem& problem, const DeviceProperties& device) {
  plan.kernel = Kernel::kElements;
  plan.chunks_per_thread = backward_chunks(problem.x_dtype);
  plan.columns_per_thread = shape.columns;
  plan.threads_per_row = shape.ring.threads;
  plan.cluster_size = shape.ring.cluster_size;
  if (is_tiny(problem.cols)) {
    plan.rows_per_block = kTinyThreads / kWarpSize * (kWarpSize / plan.threads_per_row) *
                          tiny_rows_per_lane(size_in_bytes(problem.x_dtype));
    return int64_t{kTinyBlocks} * device.sm_count;
  }
  const bool in_cluster = plan.cluster_size > 1;
  const int64_t together = shape.together;
  const int64_t least_rows = std::max(1, kWarpSize / plan.threads_per_row);
  const int64_t spread = ceil_div(ceil_div(problem.rows, device.sm_count), least_rows) * least_rows;
  plan.rows_per_block =
      in_cluster ? 1 : static_cast<int>(std::min(std::max(together, least_rows), spread));
  const int sms = device.sm_count;
  if (plan.cluster_size == kLargeClusterSize) return device.large_clusters * kLargeClusterSize;
  // All multiprocessors: 16384 x 12289 bfloat16 .67 of an elementwise sum on an H200 with 132, .60
  // with 116; but no more clusters than find a place: in fours 4096 x 32767 .66 with 116 blocks,
  // .36 with 124. Blocks that merge their sums in fours are such clusters as well.
  if (!in_cluster) {
    const int merged = sms < kFewMultiprocessors ? 1 : least_merged(sms, problem);
    return merged == 4 ? resident_clusters(4, 1, device) * 4 : sms / merged * merged;
  }
  return resident_clusters(plan.cluster_size, together, device) * plan.cluster_size;
}

// Rows as in the ring, one per group of threads, and before them the tiles of columns.
void shape_few_rows(BackwardPlan& plan, const RingShape& shape, const BackwardProblem& problem,
                    const DeviceProperties& device, int most_tile_lanes) {
  plan.kernel = Kernel::kFewRows;
  plan.chunks_per_thread = backward_chunks(problem.x_dtype);
  plan.threads_per_row = shape.threads;
  plan.cluster_size = plan.slices = shape.cluster_size;
  const int64_t most_rows =
      shape.cluster_size > 1 ? 1 : std::max(1, kMaxSharedBlock / shape.threads);
  const int64_t least_rows = std::max(1, kWarpSize / shape.threads);
  const int64_t spread = ceil_div(ceil_div(problem.rows, device.sm_count), least_rows) * least_rows;
  plan.rows_per_block = static_cast<int>(std::min(most_rows, spread));
  if (problem.weight_grads) {
    plan.weight_grads = WeightGrads::kTiles;
    const Tiles tiles = shape_tiles(problem, shape.cluster_size, device, most_tile_lanes);
    plan.tile_lanes = tiles.lanes;
    plan.slices = tiles.slices;
    plan.column_blocks = tiles.blocks;
  }
  plan.blocks = plan.column_blocks;
  if (problem.dx) {
    const int64_t blocks = ceil_div(problem.rows, plan.rows_per_block) * plan.cluster_size;
    plan.blocks += ceil_div(blocks, plan.slices) * plan.slices;
  }
}

// The most warps of an uneven row whose parameters have another dtype, with kRegisterChunks.
constexpr int64_t kMaxUnevenWarps = 12;

// Shared memory of a block of the forward beside what its plan says.
constexpr int kReductionBytes = 2048;

// Threads of kForwardChunks chunks that a block of the forward can have, whether or not the row is
// aligned.
int64_t most_forward_threads(const DeviceProperties& device) {
  constexpr int kWarpBytes =
      forward_shared_bytes(kForwardChunks, kForwardChunks - kRegisterChunks, true);
  const int64_t room = shared_bytes_of(device) - kReductionBytes;
  int64_t threads = kMaxThreadsPerRow;
  while (threads / kWarpSize * kWarpBytes > room) threads /= 2;
  return threads;
}

bool forward_runs(Kernel kernel, int64_t chunks, bool uneven, const DeviceProperties& device) {
  switch (kernel) {
    case Kernel::kShortRows:
      // Uneven rows of a warp are better off in blocks of their own: one shift serves all lanes.
      return chunks <= (uneven ? kWarpSize / 2 : kWarpSize) * kRegisterChunks;
    case Kernel::kRows:
      return chunks <= most_forward_threads(device) * kForwardChunks;
    case Kernel::kCluster:
      return device.compute_capability >= 90 &&
             chunks <= block_chunks(kForwardChunks) * kMaxClusterSize;
    case Kernel::kElements:
    case Kernel::kFewRows:
    case Kernel::kFewElements:
    case Kernel::kRing:
      return false;
    case Kernel::kSplit:
      return true;
  }
  return false;
}

// No more lanes than hold the row, of eight on, or whole warps; and no more columns in each than
// there are, but for four.
void shape_elements(ForwardPlan& plan, const ForwardProblem& problem) {
  constexpr int64_t kGrain = 4;
  if (is_tiny(problem.cols)) {
    plan.threads_per_row = tiny_lanes(problem.cols);
    plan.columns_per_thread = tiny_columns(problem.cols);
    plan.rows_per_thread = kTinyForwardRows;
    plan.rows_per_block = kTinyForwardRows * kElementRowThreads / plan.threads_per_row;
    return;
  }
  plan.rows_per_thread = plan.rows_per_block = kElementRows;
  const int64_t lanes = ceil_div(problem.cols, kMostElementColumns);
  plan.threads_per_row = static_cast<int>(
      lanes > kWarpSize ? ceil_div(lanes, kWarpSize) * kWarpSize
                        : std::max<int64_t>(kLeastElementLanes, next_power_of_two(lanes)));
  plan.columns_per_thread =
      static_cast<int>(ceil_div(problem.cols, kGrain * plan.threads_per_row) * kGrain);
  if (plan.threads_per_row > kWarpSize) {
    plan.shared_bytes =
        plan.threads_per_row / kWarpSize *
        element_stage_bytes(plan.columns_per_thread, kElementRows, size_in_bytes(problem.x_dtype));
  } else {
    plan.rows_per_block *= kElementRowThreads / plan.threads_per_row;
  }
}

// The chunks that each lane of a row has in registers: four, or more where that takes a warp less
// of two, three or four. What a warp has to do beside its chunks, alone and with others, is worth
// two or three of them. Of a copy, on an H200, with four chunks and so: bfloat16 1032, 1152, 1280
// columns .79, .85, .91 and .99 each, 1288, 1344 .89, .94 and .98, 1.00, 2056, 2112 .94, .97
// and 1.00, 1.02; float32 516 .85 and .98. Uneven ones of bfloat16, by columns (elements_run) and
// so: 1033, 1151, 1279 .67, .72, .73 and .85, .90, .93, 1317, 1535 .73, .81 and .89, .93, 1653,
// 1791 .80, .86 and .87, .91, 2057, 2305, 2559 .72, .75, .82 and .80, .86, .91; in four warps and
// so 3081, 3329, 3583 .76, .80, .84 and .81, .84, .88. With eight, in one warp or two, they are as
// fast as with four in two or four.
int register_chunks(int64_t chunks, const ForwardProblem& problem) {
  const auto takes = [chunks](int64_t warps, int64_t chunks_per_lane) {
    return chunks > warps * kWarpSize * (chunks_per_lane - 1) &&
           chunks <= warps * kWarpSize * chunks_per_lane;
  };
  if (takes(1, 5) || takes(2, 5)) return 5;
  if (takes(1, 6)) return 6;
  const bool uneven = problem.cols % chunk_columns(problem.x_dtype) != 0;
  const bool has_seven =
      uneven && problem.one_dtype && problem.y_as_x && size_in_bytes(problem.x_dtype) == 2;
  return has_seven && (takes(1, 7) || takes(2, 7)) ? 7 : kRegisterChunks;
}

// Whether whole chunks leave few lanes of their warps idle: rows that are not aligned, but
// realigned in registers, are faster then than by columns. Of a copy, on an H200, in chunks and by
// columns: bfloat16 901 columns .85 and .86, 937 .87 and .87, 1023 .92 and .88, 1025 .93 and .68,
// 2601 .84 and .82; float32 385 .92 and .96, 449 .97 and .93, 521 .94 and .91, 767 .99 and .91, 865
// .95 and .97, 897 .97 and .94, 1351 .95 and .97, 1501 .99 and .98, 1701 .95 and .99, 1801 .98 and
// .96; bfloat16 with float32 parameters 1023 .72 and .82, 1801 .76 and .78, 2049 .84 and .75, 4095
// .78 and .75, 12289 .66 and .51.
bool chunks_fill_warps(const ForwardProblem& problem) {
  const int64_t chunks = problem.cols / chunk_columns(problem.x_dtype);
  const int64_t warps = ceil_div(chunks, int64_t{kWarpSize} * kRegisterChunks);
  const double busy =
      static_cast<double>(chunks) / static_cast<double>(warps * kWarpSize * kRegisterChunks);
  if (!problem.one_dtype) return warps > 1 && warps <= kMaxUnevenWarps && busy >= 0.92;
  if (size_in_bytes(problem.x_dtype) == 2) return warps > 1 || busy >= 0.91;
  if (warps == 2 && register_chunks(chunks, problem) > kRegisterChunks) return true;
  return busy >= (warps == 1 || warps == 2 || warps == 4 ? 0.86 : 0.97);
}

// Where few warps share a row, that is; with parameters of another dtype, of which chunks would
// take many registers, all of a block.
bool elements_run(const ForwardProblem& problem, const DeviceProperties& device) {
  const bool uneven = problem.cols % chunk_columns(problem.x_dtype) != 0;
  const int most_threads = problem.one_dtype ? 3 * kWarpSize : kMaxThreadsPerRow;
  // Of float32 a chunk has no more columns than a lane of these.
  const bool too_short = problem.x_dtype == DType::kFloat32 && problem.cols <= kWarpSize &&
                         problem.cols > chunk_columns(problem.x_dtype);
  if (!uneven || problem.x_dtype == DType::kFloat64 || !problem.y_as_x || too_short ||
      problem.cols > most_threads * kMostElementColumns || chunks_fill_warps(problem)) {
    return false;
  }
  ForwardPlan plan;
  shape_elements(plan, problem);
  return plan.shared_bytes + kReductionBytes <= shared_bytes_of(device);
}

// Whole warps for `chunks` chunks.
int forward_threads(int64_t chunks, int chunks_per_thread) {
  return static_cast<int>(ceil_div(chunks, int64_t{kWarpSize} * chunks_per_thread) * kWarpSize);
}

// The ring holds rows as kRows and kCluster do, and those that they cannot hold by more blocks;
// none where rows cannot be streamed so.
std::optional<RingShape> forward_ring_shape(const ForwardProblem& problem, int64_t chunks,
                                            const DeviceProperties& device,
                                            const PlanRequest& request) {
  constexpr int kRingBytes = 227 * 1024;
  if (device.compute_capability < 90 || shared_bytes_of(device) < kRingBytes ||
      !problem.one_dtype || problem.x_dtype == DType::kFloat64) {
    return std::nullopt;
  }
  const int64_t most = block_chunks(kForwardChunks);
  const bool large = device.large_clusters > 0;
  if (asks_for_grid(request) || chunks > most * (large ? kLargeClusterSize : kMaxClusterSize)) {
    return grid_shape(ceil_div(chunks, kForwardChunks), device, request);
  }
  const bool alone = chunks <= most && request.cluster_size.value_or(1) <= 1;
  const int size = alone                             ? 1
                   : chunks > most * kMaxClusterSize ? kLargeClusterSize
                                                     : choose_cluster_size(chunks, most, request);
  return RingShape{forward_threads(ceil_div(chunks, size), kForwardChunks), size};
}

// A row in a block: in registers alone while that takes no more than 512 threads, of which an SM
// holds two blocks or three (of uneven rows of a 16-bit type 384 or just 512, and with parameters
// of another dtype 384); or in a warp of one, where that is enough. The columns behind the last
// whole chunk take no thread of their own.
void shape_rows(ForwardPlan& plan, const ForwardProblem& problem, int64_t columns) {
  const int64_t chunks = std::max<int64_t>(1, problem.cols / columns);
  const bool uneven = problem.cols % columns != 0;
  const int in_lane = register_chunks(chunks, problem);
  const int threads = forward_threads(chunks, in_lane);
  const bool few = threads <= kMaxUnevenWarps * kWarpSize;
  const bool full = threads == kMaxThreadsPerRow && (!uneven || problem.one_dtype);
  const bool has_room = !uneven || problem.x_dtype == DType::kFloat32;
  const bool in_registers = few || full || (has_room && threads <= kMaxThreadsPerRow);
  plan.chunks_per_thread = in_registers ? in_lane : kForwardChunks;
  plan.threads_per_row = forward_threads(chunks, plan.chunks_per_thread);
  plan.shared_chunks = forward_shared_chunks(plan.chunks_per_thread, plan.vectorized);
  const bool by_warp = !plan.vectorized || in_lane > kRegisterChunks;
  if (by_warp && plan.threads_per_row == kWarpSize) {
    plan.rows_per_block = kShortRowThreads / kWarpSize;
  }
}

// Whether the ring is better for rows that a block can hold too, if not in registers alone: for
// many of them. Of a copy, on an H200, in blocks of their own and in the ring: bfloat16 8192 x
// 16392 .87 and .93, 8192 x 24576 .89 and .93, 4096 x 32768 .88 and .93, 512 x 32768 .81 and .90,
// 300 x 16392 .97 and .87; float32 8192 x 8200 .90 and .91, 4096 x 12288 .91 and .94, 16384 x 12288
// .95 and .93, 512 x 16384 .77 and .93; not aligned 4084 x 8201 .82 and .89, 999 x 10001 .85 and
// .94, 244 x 16383 .91 and .82. Of a 16-bit type such rows are not: 813 x 24577 bfloat16 .74 and
// .68.
//
// Columns behind a row's last whole chunk are in the warp of that chunk, in the ring only if it is
// not full: rows that would be added up in another order are not for it.
bool ring_holds_block_rows(const ForwardProblem& problem, const DeviceProperties& device) {
  constexpr int64_t kRounds = 3;
  const int64_t columns = chunk_columns(problem.x_dtype);
  ForwardPlan rows;
  shape_rows(rows, problem, columns);
  const bool uneven = problem.cols % columns != 0;
  const bool same_order =
      !uneven || problem.cols / columns % (int64_t{kWarpSize} * kForwardChunks) != 0;
  const bool as_fast = problem.x_dtype == DType::kFloat32 || (problem.aligned && !uneven);
  return rows.chunks_per_thread == kForwardChunks && same_order && as_fast &&
         problem.rows >= kRounds * device.sm_count;
}

// `uneven`: rows end within a chunk, and so are never aligned.
Kernel choose_forward_kernel(const ForwardProblem& problem, int64_t chunks, bool uneven,
                             const DeviceProperties& device, const PlanRequest& request) {
  if (request.kernel && forward_runs(*request.kernel, chunks, uneven, device)) {
    return *request.kernel;
  }
  const std::optional<RingShape> ring = forward_ring_shape(problem, chunks, device, request);
  if (request.kernel == Kernel::kRing && ring) return Kernel::kRing;
  if (elements_run(problem, device)) return Kernel::kElements;
  const auto runs = [&](Kernel kernel) { return forward_runs(kernel, chunks, uneven, device); };
  if (runs(Kernel::kShortRows)) return Kernel::kShortRows;
  if (runs(Kernel::kRows)) {
    const bool rings = ring && ring->cluster_size == 1 && ring_holds_block_rows(problem, device);
    return rings ? Kernel::kRing : Kernel::kRows;
  }
  if (ring) return Kernel::kRing;
  return runs(Kernel::kCluster) ? Kernel::kCluster : Kernel::kSplit;
}

// Whether lanes of short rows may have other numbers of chunks than two and four: kernels for that
// are compiled where all tensors have one dtype.
bool has_any_chunks(const ForwardProblem& problem) {
  return problem.one_dtype && problem.y_as_x && problem.x_dtype != DType::kFloat64 &&
         problem.cols % chunk_columns(problem.x_dtype) == 0;
}

// A row in one warp or less. Blocks have about 4 KB of x, in one row or many: the smallest and most
// evenly spread reads that still fill the memory's pipeline. On an H200, 131072 x 1024 bfloat16
// took 133.7 us in blocks of 4 KB, 136.1 us in blocks of 8 KB. With two chunks per lane instead of
// four, accesses to very short rows are less scattered (2097152 x 64: 135 us for 142 us) and rows
// that end within a chunk have more threads at work (526344 x 255: 200 us for 218 us).
//
// Three chunks in each lane where they do: 465277 x 144 bfloat16 reached .85 of a copy on an H200
// with four for each of eight lanes, .91 with three. Five where that takes half of the lanes, for
// fewer of them are idle. Of a copy, 134 MB: bfloat16 136 columns .87 -> .89, 144 .92 -> .99, 160
// .94 -> 1.00, 264 .85 -> .95, 320 .96
// -> .99, 520 .84 -> .97, 640 .96 -> .99; float32 132 .88 -> .93, 260 .86 -> .98, but 68 .90 -> .80
// (and in two lanes 72 bfloat16 .89 -> .67). In ten lanes 392 and 400 bfloat16 .94 -> .97 and .98,
// but in five 200 .94 -> .91. Two chunks are in a lane each: 8388608 x 16 .84 -> .99.
void shape_short_rows(ForwardPlan& plan, const ForwardProblem& problem, int64_t chunks,
                      bool uneven) {
  const int64_t chunks_per_lane = chunks <= 8 || (uneven && chunks <= 64) ? 2 : 4;
  const int64_t lanes = next_power_of_two(ceil_div(chunks, chunks_per_lane));
  plan.threads_per_row = static_cast<int>(lanes);
  plan.chunks_per_thread = static_cast<int>(std::min(chunks_per_lane, next_power_of_two(chunks)));
  const bool any_chunks = has_any_chunks(problem);
  const bool three = chunks > 2 * lanes && chunks <= 3 * lanes;
  // (Rows of a warp have a kernel for three whatever the dtypes.)
  if (three && (any_chunks || lanes == kWarpSize)) plan.chunks_per_thread = 3;
  if (any_chunks) {
    const auto take = [&](int64_t lanes_of_row, int chunks_of_lane) {
      plan.threads_per_row = static_cast<int>(lanes_of_row);
      plan.chunks_per_thread = chunks_of_lane;
    };
    const bool too_few = problem.x_dtype == DType::kFloat32 && chunks < 18;
    if (chunks == 2) take(2, 1);
    if (lanes >= 8 && chunks <= lanes / 2 * 5 && !too_few) take(lanes / 2, 5);
    if (chunks == 49 || chunks == 50) take(10, 5);
  }
  plan.rows_per_thread = std::max(1, kRegisterChunks / plan.chunks_per_thread);
  plan.rows_per_block =
      kShortRowThreads / kWarpSize * (kWarpSize / plan.threads_per_row) * plan.rows_per_thread;
}

void shape_forward_cluster(ForwardPlan& plan, int64_t chunks, const PlanRequest& request) {
  plan.chunks_per_thread = kForwardChunks;
  plan.cluster_size = choose_cluster_size(chunks, block_chunks(kForwardChunks), request);
  plan.threads_per_row = forward_threads(ceil_div(chunks, plan.cluster_size), kForwardChunks);
  plan.shared_chunks = forward_shared_chunks(kForwardChunks, plan.vectorized);
}

// Blocks of the ring: one on nearly every multiprocessor. Alone an odd number, rather (2044 x
// 16383 float32 .88 of a copy on an H200 with 131, .86 with 132). In pairs all find a place: 4096 x
// 65536 bfloat16 reached .94 of a copy on an H200 with 65 clusters, .915 with 66, .86 with 58.
// Larger clusters do not fit into what is left of some GPCs; one that has to wait for another's end
// doubles the time (2048 x 131072: .91 with 28 clusters of four, .64 with 33).
int64_t forward_ring_teams(const RingShape& shape, const DeviceProperties& device) {
  const int sms = device.sm_count;
  if (shape.grid_rows > 0) return shape.grid_rows;
  if (shape.cluster_size == 1) return (sms - 1) | 1;
  if (shape.cluster_size == kLargeClusterSize) return device.large_clusters;
  return std::max(1, (shape.cluster_size == 2 ? sms - 2 : sms - sms / 7) / shape.cluster_size);
}

void shape_forward_ring(ForwardPlan& plan, const RingShape& shape, int64_t rows,
                        const DeviceProperties& device) {
  plan.kernel = Kernel::kRing;
  plan.chunks_per_thread = kForwardChunks;
  plan.cluster_size = shape.cluster_size;
  plan.threads_per_row = shape.threads;
  // Few rows are shared evenly. Of many, clusters would rather be an odd number: with 64 instead of
  // 65 they read rows a power of two apart, and 4096 x 65536 reached .915.
  constexpr int64_t kFewTurns = 8;
  const int64_t teams = forward_ring_teams(shape, device);
  const int64_t turns = ceil_div(rows, teams);
  plan.blocks = (turns <= kFewTurns ? ceil_div(rows, turns) : teams) * plan.cluster_size;
  if (shape.grid_rows > 0) {
    plan.workspace_bytes = plan.blocks * kGridExchanges * 2 * int64_t{sizeof(uint64_t)};
  }
}

}  // namespace

ForwardPlan plan_forward(const ForwardProblem& problem, const DeviceProperties& device,
                         const PlanRequest& request) {
  const int64_t columns = chunk_columns(problem.x_dtype);
  const int64_t chunks = std::max<int64_t>(1, ceil_div(problem.cols, columns));
  const bool uneven = problem.cols % columns != 0;
  ForwardPlan plan;
  plan.sm_count = device.sm_count;
  plan.overlap_launches = device.compute_capability >= 90;
  plan.kernel = choose_forward_kernel(problem, chunks, uneven, device, request);
  plan.vectorized = problem.aligned && !uneven;
  switch (plan.kernel) {
    case Kernel::kShortRows:
      shape_short_rows(plan, problem, chunks, uneven);
      break;
    case Kernel::kRows:
      shape_rows(plan, problem, columns);
      break;
    case Kernel::kCluster:
      shape_forward_cluster(plan, chunks, request);
      break;
    case Kernel::kElements:
      shape_elements(plan, problem);
      break;
    case Kernel::kFewRows:
    case Kernel::kFewElements:
      break;
    case Kernel::kRing:
      shape_forward_ring(plan, *forward_ring_shape(problem, chunks, device, request), problem.rows,
                         device);
      return plan;
    case Kernel::kSplit:
      plan.chunks_per_thread = kForwardChunks;
      plan.shared_chunks = kForwardChunks - kRegisterChunks;
      shape_segments(plan, chunks);
      break;
  }
  if (plan.kernel == Kernel::kRows || plan.kernel == Kernel::kCluster ||
      plan.kernel == Kernel::kSplit) {
    const bool stages = !plan.vectorized && (plan.shared_chunks > 0 || !problem.y_as_x);
    plan.shared_bytes = plan.rows_per_block * plan.threads_per_row / kWarpSize *
                        forward_shared_bytes(plan.chunks_per_thread, plan.shared_chunks, stages);
  }
  plan.blocks = ceil_div(problem.rows, plan.rows_per_block) * plan.segments * plan.cluster_size;
  if (plan.kernel == Kernel::kSplit) {
    // mean and sum of squares of each segment
    plan.workspace_bytes =
        2 * size_in_bytes(accumulation_dtype(problem.x_dtype)) * problem.rows * plan.segments;
  }
  return plan;
}

BackwardPlan plan_backward(const BackwardProblem& problem, const DeviceProperties& device,
                           const PlanRequest& request) {
  const int64_t columns = chunk_columns(problem.x_dtype);
  const int64_t chunks = std::max<int64_t>(1, ceil_div(problem.cols, columns));
  const int64_t accumulator_bytes = size_in_bytes(accumulation_dtype(problem.x_dtype));
  BackwardPlan plan;
  plan.chunks_per_thread = backward_chunks(problem.x_dtype);
  plan.kernel = choose_kernel(chunks, plan.chunks_per_thread, device, request);
  plan.vectorized = problem.aligned && problem.cols % columns == 0;
  plan.dx = problem.dx;
  plan.sm_count = device.sm_count;
  plan.overlap_launches = device.compute_capability >= 90;
  const std::optional<RingShape> ring = ring_shape(problem, device, request);
  const bool forced_other = request.kernel && *request.kernel != Kernel::kRing &&
                            runs(*request.kernel, chunks, plan.chunks_per_thread, device);
  const bool forced = forced_other || request.kernel == Kernel::kRing || request.weight_grads;
  const std::optional<ElementShape> elements = element_shape(problem, device, request);
  const auto asks_for = [&](Kernel kernel) { return request.kernel == kernel; };
  const bool asks_for_elements = asks_for(Kernel::kElements) || asks_for(Kernel::kFewElements);
  const bool by_ring_anyway = asks_for(Kernel::kRing) || asks_for(Kernel::kFewRows) ||
                              (!asks_for_elements && ring_holds_uneven_rows(problem));
  const bool by_elements = problem.dx && elements && !forced_other && !(ring && by_ring_anyway);
  const bool tiny = by_elements && is_tiny(problem.cols);
  if (by_elements) {
    const bool few =
        !forced && !asks_for(Kernel::kElements) && has_few_rows(problem, elements->ring, device);
    // Very short rows have one kernel for few and many.
    const bool can = !tiny && elements->ring.cluster_size <= kMaxClusterSize;
    if (can && (few || asks_for(Kernel::kFewElements))) {
      shape_few_rows(plan, elements->ring, problem, device, kMinTileLanes);
      plan.kernel = Kernel::kFewElements;
      plan.columns_per_thread = elements->columns;
      return plan;
    }
  } else if (ring && has_one_dtype(problem) && ring->cluster_size <= kMaxClusterSize &&
             (asks_for(Kernel::kFewRows) || (!forced && has_few_rows(problem, *ring, device)))) {
    shape_few_rows(plan, *ring, problem, device, kMaxTileLanes);
    return plan;
  }
  int64_t ring_blocks = 0;
  if (by_elements) {
    ring_blocks = shape_elements(plan, *elements, problem, device);
  } else if (ring && !forced_other) {
    ring_blocks = shape_ring(plan, *ring, problem, device);
  }
  switch (plan.kernel) {
    case Kernel::kElements:
    case Kernel::kFewRows:
    case Kernel::kFewElements:
    case Kernel::kRing:
      break;
    case Kernel::kShortRows:
    case Kernel::kRows:
      plan.threads_per_row = choose_threads(chunks, plan.chunks_per_thread);
      plan.rows_per_block = std::max(1, kMaxSharedBlock / plan.threads_per_row);
      break;
    case Kernel::kCluster:
      shape_cluster(plan, chunks, kMaxThreadsPerRow, request);
      break;
    case Kernel::kSplit:
      shape_segments(plan, chunks);
      break;
  }

  // Groups of blocks that work on the same rows together: a block, a cluster, the segments of a
  // row.
  const int64_t groups = ceil_div(problem.rows, plan.rows_per_block);
  const int block_threads = plan.threads_per_row * plan.rows_per_block;
  const bool by_ring = plan.kernel == Kernel::kRing || plan.kernel == Kernel::kElements;
  const bool in_grid = plan.cluster_size > kLargeClusterSize;
  const int64_t resident_blocks =
      by_ring ? ring_blocks
              : int64_t{device.sm_count} * std::max(1, kMaxThreadsPerRow / block_threads);
  const int64_t resident_groups = std::max<int64_t>(1, resident_blocks / plan.cluster_size);

  if (problem.weight_grads) {
    // The blocks of a grid may leave several shares: 192 x 1000000 bfloat16 reached .56 of an
    // elementwise sum on an H200 so, .40 with dw and db from a kernel of their own.
    const int64_t working_groups = std::max<int64_t>(1, std::min(groups, resident_groups));
    const int64_t shares = ceil_div(least_shares(problem.rows), working_groups);
    const bool can_share = shares == 1 || (in_grid && are_small(shares * working_groups, problem));
    const bool can_fuse = problem.dx && plan.kernel != Kernel::kSplit &&
                          (!by_ring || plan.cluster_size == 1 || can_share);
    const bool pays =
        tiny || (by_ring ? problem.rows : groups) >= kMinRowsPerPartial * resident_groups;
    const bool fuse = request.weight_grads ? *request.weight_grads == WeightGrads::kFused : pays;
    if (can_fuse && fuse) {
      plan.weight_grads = WeightGrads::kFused;
      plan.partials = working_groups;
      if (in_grid) {
        plan.shares = static_cast<int>(shares);
        plan.partials *= shares;
      }
      if (by_ring && plan.cluster_size == 1) {
        plan.merged = choose_merged(plan.partials, problem, device);
        plan.partials /= plan.merged;
      }
    } else {
      plan_columns(plan, problem, chunks, device);
    }
  }
  if (problem.dx) {
    // Persistent blocks keep weight, dw and db in registers from row to row; a segment has no such
    // state.
    const int64_t working = plan.kernel == Kernel::kSplit ? groups
                            : plan.weight_grads == WeightGrads::kFused
                                ? plan.partials * plan.merged / plan.shares
                            : by_ring && !in_grid && groups < 2 * resident_groups
                                ? groups
                                : std::min(groups, (by_ring ? 1 : 2) * resident_groups);
    plan.blocks = working * plan.segments * plan.cluster_size;
  }
  if (plan.dx && plan.kernel == Kernel::kSplit) {
    plan.workspace_bytes += 2 * accumulator_bytes * problem.rows * plan.segments;
  }
  plan.workspace_bytes += 2 * accumulator_bytes * plan.partials * problem.cols;
  if (in_grid) {
    plan.workspace_bytes += plan.blocks * kGridExchanges * 2 * int64_t{sizeof(uint64_t)};
  }
  return plan;
}

}  // namespace fastnorm::cuda
