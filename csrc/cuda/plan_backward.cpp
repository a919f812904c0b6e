// How a backward runs: its kernels and the shape of them; see plan.h.
#include "plan_backward.h"

#include <algorithm>

namespace fastnorm::cuda {
namespace {

// Whether a kernel that holds rows in registers runs such ones.
bool runs(Kernel kernel, int64_t chunks, int chunks_per_thread, const DeviceProperties& device) {
  switch (kernel) {
    case Kernel::kShortRows:
    case Kernel::kElements:
    case Kernel::kFewRows:
    case Kernel::kFewElements:
    case Kernel::kRing:
      return false;
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

// Threads for `chunks` chunks: a power of two within a warp, so that rows share it evenly; whole
// warps beyond.
int choose_threads(int64_t chunks, int chunks_per_thread) {
  const int64_t threads = ceil_div(chunks, chunks_per_thread);
  return static_cast<int>(threads <= kWarpSize ? next_power_of_two(threads)
                                               : ceil_div(threads, kWarpSize) * kWarpSize);
}

// Whether such rows' successors are copied to shared memory meanwhile.
bool copies_ahead(const BackwardPlan& plan, const BackwardProblem& problem,
                  const DeviceProperties& device) {
  return problem.x_dtype == DType::kFloat64 && plan.kernel != Kernel::kSplit && can_stream(device);
}

// Rows in the registers of a block, a cluster or, cut into segments, of blocks that do not meet.
// Returns how many blocks run side by side.
int64_t shape_rows(BackwardPlan& plan, const BackwardProblem& problem, int64_t chunks,
                   const DeviceProperties& device, const PlanRequest& request) {
  plan.kernel = choose_kernel(chunks, plan.chunks_per_thread, device, request);
  if (plan.kernel == Kernel::kSplit) {
    shape_segments(plan, chunks);
  } else if (plan.kernel == Kernel::kCluster) {
    plan.cluster_size = choose_cluster_size(chunks, block_chunks(plan.chunks_per_thread), request);
    // A row's partial results travel between whole warps.
    plan.threads_per_row = std::max(
        kWarpSize, choose_threads(ceil_div(chunks, plan.cluster_size), plan.chunks_per_thread));
  } else {
    plan.threads_per_row = choose_threads(chunks, plan.chunks_per_thread);
    plan.rows_per_block = std::max(1, kMaxSharedBlock / plan.threads_per_row);
  }
  plan.copies_ahead = copies_ahead(plan, problem, device);
  if (plan.copies_ahead && plan.cluster_size > 1) {
    return int64_t{plan.cluster_size} * resident_clusters(plan.cluster_size, 1, device);
  }
  const int block_threads = plan.threads_per_row * plan.rows_per_block;
  return int64_t{device.sm_count} * std::max(1, kMaxThreadsPerRow / block_threads);
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

void plan_columns(BackwardPlan& plan, const BackwardProblem& problem,
                  const DeviceProperties& device) {
  plan.weight_grads = WeightGrads::kColumns;
  // Tiles of one width, of a chunk in each thread. Where rows end within a chunk a tile lies in one
  // chunk of memory more than it has, and rows that a thread adds up are as many apart as a chunk
  // has columns, or a multiple (see uneven_column_sums). The shape, and with it the order of
  // summation, does not depend on where rows begin.
  const int64_t columns = chunk_columns(problem.x_dtype);
  const int64_t chunks = ceil_div(problem.cols, columns);
  const bool whole = !ends_within_a_chunk(problem);
  if (whole) {
    plan.column_tiles = ceil_div(chunks, kWarpSize);
    plan.column_threads = static_cast<int>(std::min<int64_t>(kWarpSize, next_power_of_two(chunks)));
    plan.column_rows = kMaxSharedBlock / plan.column_threads;
    plan.column_width = static_cast<int>(plan.column_threads * columns);
  } else {
    plan.column_tiles = ceil_div(problem.cols, kWarpSize * columns - (columns - 1));
    const int64_t width = ceil_div(problem.cols, plan.column_tiles);
    const int64_t threads = ceil_div(width + columns - 1, columns);
    plan.column_threads = static_cast<int>(threads);
    plan.column_rows = static_cast<int>(kMaxSharedBlock / (threads * columns) * columns);
    plan.column_width = static_cast<int>(width);
  }
  // As many blocks as run side by side, or two to four times as many, of which few are missing in
  // the last wave. But slices of a few rows per thread, and enough of them.
  const int64_t warps = ceil_div(plan.column_threads * plan.column_rows, kWarpSize);
  const int64_t most_warps = whole ? kColumnWarps : kUnevenColumnWarps;
  const int64_t resident = most_warps / warps * device.sm_count;
  int64_t wanted = ceil_div(2 * resident, plan.column_tiles);
  if (has_one_dtype(problem) && problem.x_dtype != DType::kFloat64) {
    constexpr double kEnough = 0.9;
    constexpr int64_t kMostWaves = 4;
    double best = 0;
    for (int64_t waves = 1; waves <= kMostWaves && best < kEnough; ++waves) {
      const int64_t slices = waves * resident / plan.column_tiles;
      const double busy =
          static_cast<double>(slices * plan.column_tiles) / static_cast<double>(waves * resident);
      if (busy > best) {
        best = busy;
        wanted = slices;
      }
    }
  }
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
//
// Of rows that a cluster holds, which are wide and few, a tile has one block, and 512 bytes of each
// row where those of 128 would be more than there are places for.
Tiles shape_tiles(const BackwardProblem& problem, int cluster_size, const DeviceProperties& device,
                  int most_lanes) {
  constexpr int kLeastSliceRows = 128;
  constexpr int kLeastBlocks = 32;
  const auto tiles_of = [&](int lanes) {
    return ceil_div(problem.cols, lanes * chunk_columns(problem.x_dtype));
  };
  Tiles tiles;
  if (cluster_size > 1) {
    tiles.lanes = tiles_of(kWideTileLanes) >= device.sm_count ? kWideTileLanes : kMaxTileLanes;
    tiles.blocks = ceil_div(tiles_of(tiles.lanes), cluster_size) * cluster_size;
    return tiles;
  }
  for (int lanes = most_lanes; lanes >= kMinTileLanes; lanes /= 2) {
    tiles.lanes = lanes;
    tiles.slices = 1;
    const int64_t wide = tiles_of(lanes);
    while (tiles.slices < kMaxClusterSize && wide * tiles.slices < device.sm_count &&
           problem.rows >= 2 * tiles.slices * kLeastSliceRows) {
      tiles.slices *= 2;
    }
    tiles.blocks = wide * tiles.slices;
    if (tiles.blocks >= kLeastBlocks) break;
  }
  return tiles;
}

// Whether rows are better off one by one than in the ring: where x and dy are small enough to be
// read twice, and there are columns enough to sum side by side (8.4 MB, 4096 x 1024 bfloat16, took
// 15.4 us on an H200, in the ring 17.3 us; 12.6 MB, 8192 x 768, 22.4 and 22.1 us; 16.8 MB, 4096 x
// 2048, 25.5 and 23.7 us); or for dx alone. Rows of more than 256 threads have but one block on a
// multiprocessor, and are slower then where there are many: dx of 16384 x 8192 bfloat16 took 201
// us, in the ring 194 us; 65536 x 1024 100 us for 107 us. And so are many rows of a 16-bit type
// that leave lanes idle, where instructions count for more (see fill_lanes).
constexpr int64_t kFewRowsBytes = 12 << 20;
// 16-bit rows of clusters, in one launch and in the ring: of 8 MB 32768 columns 20 and 19 us, 65536
// 20 and 19, of 12 MB 12288 25 and 21, 32768 27 and 22, 65536 27 and 22; but float32 12288 20 both.
constexpr int64_t kFewClusterRowsBytes = 8 << 20;
// Rows of a block that sums a tile. Where granules are read word by word, and rows are short enough
// to share a tile's rows out, it takes longer than the ring: bfloat16 6001 columns of 8 MB 29 us
// for 24. But float32 6001 16 us for 20, 4095 of 10 MB 16 us for 21.
constexpr int64_t kMostTileRows = 1024, kMostUnevenTileRows = 256;
constexpr int64_t kFewLongRowsBytes = 32 << 20;  // of dx alone

// Likewise of dx alone where rows end within a chunk. Of 16-bit elements, which are then stored one
// by one, 16384 x 1023 bfloat16 took 47 us on an H200, in the ring 38 us; 1024 x 1023 7.6 us
// for 8.1 us. Of float32 65536 x 1023 took 187 us, as long as an elementwise sum, for 215 us.
constexpr int64_t kFewElementsBytes = 4 << 20;

// Whether rows leave no more lanes of their warps idle than does no harm where instructions count.
// Of an elementwise sum, dx alone on an H200, one by one and in the ring, 200 MB of bfloat16: of
// three chunks in a lane 200, 312, 576 and 616 columns, which have work for .75 to .81 of all
// lanes, .91, .945, .915, .945 and .95, .955, .95, .96; 224, 320, 704 and 768, for .83 to 1, .97,
// .97, .98, 1.00 and .96, .96, .955, .97. Of two, in a power of two of lanes or up to four warps,
// 776, 1200 and 1600 (.76 to .78) .925, .935, .945 and .94, .96, .955; 448, 896, 1344 and 1792
// (.875) .97, .985, .97, .985 and .96, .97, .96, .975. In other lanes, or five and seven warps, 72,
// 152, 2304 and 3328 (.84 to .93) .92, .945, .975, .95 and .935, .95, .985, .97; 80, 160 and 3584
// (.94 to 1) .95, .96, .985 and .95, .95, .98. Of float32 520 columns 1.00 and .92.
bool fill_lanes(const BackwardProblem& problem, const RingShape& shape) {
  const int64_t lane_chunks = ring_chunks(shape, problem);
  const int64_t lanes = shape.threads, full_lanes = next_power_of_two(lanes);
  const bool packed = problem.aligned && !ends_within_a_chunk(problem);  // see shape_few_rows
  const int64_t rows = std::max<int64_t>(1, kWarpSize / (packed ? lanes : full_lanes));
  const int64_t taken = rows * ceil_div(problem.cols, chunk_columns(problem.x_dtype));
  const int64_t all = std::max<int64_t>(kWarpSize, lanes) * lane_chunks;
  if (packed && lane_chunks == kMostLaneChunks) return 6 * taken >= 5 * all;
  const bool whole = lanes < kWarpSize ? lanes == full_lanes : lanes <= 4 * kWarpSize;
  return packed && whole ? 8 * taken >= 7 * all : 16 * taken >= 15 * all;
}

bool has_few_rows(const BackwardProblem& problem, const RingShape& shape,
                  const DeviceProperties& device) {
  const int64_t bytes = bytes_of(problem);
  if (!problem.weight_grads) {
    const bool slow_stores = ends_within_a_chunk(problem) && problem.x_dtype != DType::kFloat32;
    const bool slow_lanes = size_in_bytes(problem.x_dtype) == 2 && !has_slow_memory(device) &&
                            !fill_lanes(problem, shape);
    const bool too_many = (slow_stores && bytes > kFewElementsBytes) ||
                          (slow_lanes && bytes > kFewRowsBytes) ||
                          (shape.threads > kMaxSharedBlock && bytes > kFewLongRowsBytes);
    return !too_many && shape.cluster_size == 1;
  }
  const bool whole = problem.aligned && !ends_within_a_chunk(problem);
  const bool by_cluster = shape.cluster_size > 1;
  const Tiles tiles = shape_tiles(problem, shape.cluster_size, device, kMaxTileLanes);
  const bool fast = whole || (problem.x_dtype == DType::kFloat32 && tiles.slices == 1);
  const int sharing = std::max(tiles.slices, shape.cluster_size);
  const int64_t most_bytes =
      by_cluster && size_in_bytes(problem.x_dtype) == 2 ? kFewClusterRowsBytes : kFewRowsBytes;
  return bytes <= most_bytes &&
         ceil_div(problem.rows, sharing) <= (fast ? kMostTileRows : kMostUnevenTileRows);
}

// Rows as in the ring, one per group of threads, and before them the tiles of columns, or, of a
// single row in chunks (`by_chunks`), a chunk for each thread.
void shape_few_rows(BackwardPlan& plan, const RingShape& shape, const BackwardProblem& problem,
                    const DeviceProperties& device, int most_tile_lanes, bool by_chunks) {
  plan.kernel = Kernel::kFewRows;
  plan.chunks_per_thread = ring_chunks(shape, problem);
  plan.threads_per_row = shape.threads;
  plan.cluster_size = shape.cluster_size;
  plan.run_columns = shape.run_columns;
  // dx alone, of many rows perhaps: rows in lanes that are no power of two follow each other
  // without idle ones, and blocks are small. Of two rows 65536 x 1024 bfloat16 took 98.7 us on an
  // H200, of four 99.1 us, 32768 x 2048 of one 98.4 us, of two 99.3 us; but 65536 x 1024 of one
  // 111.8 us.
  plan.packed = !problem.weight_grads && plan.vectorized;
  const int most_threads = problem.weight_grads ? kMaxSharedBlock : kMaxSharedBlock / 2;
  // Two warps at the least, where a row takes one: they are the tiles' too, and 128 x 768 bfloat16
  // took 3.25 us in a CUDA graph on an H200 by one, 2.28 us by two.
  const int64_t least_rows = shape.threads == kWarpSize ? 2 : rows_per_warp(plan);
  const int64_t most_rows = shape.cluster_size > 1 ? 1
                            : shape.threads <= kWarpSize
                                ? most_threads / kWarpSize * rows_per_warp(plan)
                                : std::max(1, most_threads / shape.threads);
  const int64_t spread = ceil_div(ceil_div(problem.rows, device.sm_count), least_rows) * least_rows;
  plan.rows_per_block = static_cast<int>(std::min(most_rows, spread));
  if (problem.weight_grads && by_chunks && problem.rows == 1) {
    plan.weight_grads = WeightGrads::kRow;
    const int64_t chunks = ceil_div(problem.cols, chunk_columns(problem.x_dtype));
    const int64_t blocks = ceil_div(chunks, block_threads(plan));
    plan.column_blocks = ceil_div(blocks, plan.cluster_size) * plan.cluster_size;
  } else if (problem.weight_grads) {
    plan.weight_grads = WeightGrads::kTiles;
    const Tiles tiles = shape_tiles(problem, shape.cluster_size, device, most_tile_lanes);
    plan.tile_lanes = tiles.lanes;
    plan.slices = tiles.slices;
    plan.column_blocks = tiles.blocks;
  }
  plan.blocks = plan.column_blocks;
  if (problem.dx) {
    const int64_t blocks = ceil_div(problem.rows, plan.rows_per_block) * plan.cluster_size;
    const int cluster = few_rows_cluster(plan);
    plan.blocks += ceil_div(blocks, cluster) * cluster;
  }
}

// How rows stream through shared memory, in chunks or by column, or are taken one by one where
// there are few of them; neither shape where they do not.
struct StreamShape {
  std::optional<RingShape> ring;
  std::optional<ElementShape> elements;
  bool few = false;
};

StreamShape choose_stream(const BackwardProblem& problem, int64_t chunks,
                          const DeviceProperties& device, const PlanRequest& request) {
  const auto asks_for = [&](Kernel kernel) { return request.kernel == kernel; };
  const bool forced_other =
      request.kernel && runs(*request.kernel, chunks, backward_chunks(problem.x_dtype), device);
  if (forced_other) return {};
  const bool forced_many = asks_for(Kernel::kRing) || request.weight_grads;
  StreamShape stream;
  stream.ring = ring_shape(problem, device, request);
  stream.elements = problem.dx ? element_shape(problem, device, request) : std::nullopt;
  const bool asks_for_elements = asks_for(Kernel::kElements) || asks_for(Kernel::kFewElements);
  if (!asks_for(Kernel::kRing) && !asks_for(Kernel::kFewRows) && !request.cluster_size) {
    if (const auto wide = wide_shape(problem, device)) {
      stream.elements = wide;
      return stream;
    }
  }
  const bool by_ring_anyway = asks_for(Kernel::kRing) || asks_for(Kernel::kFewRows) ||
                              (!asks_for_elements && ring_holds_uneven_rows(problem, device));
  if (stream.ring && by_ring_anyway) stream.elements.reset();
  const auto are_few = [&](const RingShape& shape, Kernel kernel) {
    return shape.cluster_size <= kMaxClusterSize &&
           (asks_for(kernel) || (!forced_many && has_few_rows(problem, shape, device)));
  };
  if (stream.elements) {
    // Very short rows have one kernel for few and many.
    stream.few = !is_tiny(problem.cols, size_in_bytes(problem.x_dtype)) &&
                 !asks_for(Kernel::kElements) &&
                 are_few(stream.elements->ring, Kernel::kFewElements);
  } else if (stream.ring) {
    stream.few = has_one_dtype(problem) && are_few(*stream.ring, Kernel::kFewRows);
  }
  return stream;
}

// Groups of blocks that work on the same rows together: a block, a cluster, the segments of a row.
struct Groups {
  int64_t all = 0;       // that the rows make
  int64_t resident = 0;  // that run side by side
};

// dw and db, from the same read of x and dy as dx or from a kernel of their own.
//
// The fused backward leaves one row of partial sums per group, written and read once. For few rows
// that is as much as x and dy, which sit in the L2 cache then, but one launch less pays for it.
// Microseconds on an H200, by a kernel of its own and so: bfloat16 793 x 8192 29 and 22, 99 x 65536
// 31 and 23, 1 x 262144 16 and 12, float32 793 x 4096 28 and 18, 1037 x 4095 36 and 26, 84 x 50257
// 42 and 28, bfloat16 beside a float32 dy 244 x 1023 14 and 11, 1037 x 8192 47 and 30; in registers
// float32 beside a bfloat16 dy 488 x 4096 19 and 16, 1955 x 1023 25 and 20. Only rows of more than
// four warps that are held in registers and not aligned need kMinRows for each group: float16
// beside a bfloat16 dy 244 x 4095 17 and 34, 976 x 4095 34 and 44. (So where few long rows of mixed
// dtypes begin may change the last bits of dw and db, though never those of dx.)
void plan_weight_grads(BackwardPlan& plan, const BackwardProblem& problem, const Groups& groups,
                       bool streams, const DeviceProperties& device, const PlanRequest& request) {
  constexpr int64_t kMinRows = 8;
  constexpr int kFewThreads = 128;
  const bool tiny =
      plan.kernel == Kernel::kElements && is_tiny(problem.cols, size_in_bytes(problem.x_dtype));
  // The blocks of a row may leave several shares: 192 x 1000000 bfloat16 reached .56 of an
  // elementwise sum on an H200 so, .40 with dw and db from a kernel of their own, 6712 x 80001 on
  // an H100 .76 and .49.
  const int64_t working_groups = std::max<int64_t>(1, std::min(groups.all, groups.resident));
  const int64_t shares = ceil_div(least_shares(problem.rows), working_groups);
  const bool can_share = shares == 1 || are_small(shares * working_groups, problem);
  const bool can_fuse = problem.dx && plan.kernel != Kernel::kSplit &&
                        (!streams || plan.cluster_size == 1 || can_share);
  const bool pays = streams || plan.copies_ahead || plan.vectorized ||
                    plan.threads_per_row <= kFewThreads || groups.all >= kMinRows * groups.resident;
  const bool fuse = request.weight_grads ? *request.weight_grads == WeightGrads::kFused : pays;
  if (!can_fuse || !fuse) {
    plan_columns(plan, problem, device);
    return;
  }
  plan.weight_grads = WeightGrads::kFused;
  plan.partials = working_groups;
  if (streams && plan.cluster_size > 1) {
    plan.shares = static_cast<int>(shares);
    plan.partials *= shares;
  }
  if (streams && !tiny) {
    plan.merged = choose_merged(plan.partials, plan.cluster_size, problem, device, request);
    plan.partials /= plan.merged;
  }
}

// How the second kernel adds up the partial sums of dw and db.
void plan_finish(BackwardPlan& plan, const BackwardProblem& problem, const DeviceProperties& device,
                 const PlanRequest& request) {
  plan.sums_are_results = problem.of_sums_dtype && plan.partials == 1;
  if (plan.sums_are_results) return;
  const DType accumulator = accumulation_dtype(problem.x_dtype);
  const int64_t vector = finish_vector(accumulator, problem.cols);
  const int64_t vectors = ceil_div(problem.cols, vector);
  const auto blocks = [&](int64_t threads) { return 2 * ceil_div(vectors, threads); };
  // As many threads side by side as leave a block for every multiprocessor at the most, so that all
  // can wait beside the blocks of the kernel before; no fewer than read 32 bytes in a row.
  plan.finish_threads = static_cast<int>(32 / (size_in_bytes(accumulator) * vector));
  while (plan.finish_threads < kMostFinishThreads &&
         2 * vectors > int64_t{plan.finish_threads} * device.sm_count) {
    plan.finish_threads *= 2;
  }
  // Where that leaves more blocks than run at once, with little to do for each, and partial sums
  // are few, a thread does what four do else, to the bit, and if those are still too many, what 16
  // or eight do. H200, backward of bfloat16, by four, one and for several vectors: 447 x 300001
  // 279, 265 and 262 us, 192 x 1000000 310, 301 and 294, float16 13 x 1000001 111, 73 and 57, 64 x
  // 262144 45.2 and 43.5; but 2048 x 65536, all of whose blocks run at once, 202.1 and 203.5, and
  // of one vector and several 1024 x 81921 139 and 142, 2048 x 65537 214 and 216.
  constexpr int64_t kFew = 16, kAtOnce = 6;
  const auto are_many = [&](int64_t number) { return number > kAtOnce * device.sm_count; };
  const bool few = plan.partials <= kFew;
  if (request.finish_by_thread.value_or(few && are_many(blocks(kMostFinishThreads)))) {
    plan.finish_vectors = are_many(blocks(kFinishThreads)) ? most_finish_vectors(vector) : 1;
  }
  // No more than two on a multiprocessor, or eight would wait on each of the few that the kernel
  // before leaves free, and read all partial sums: 262144 x 512 bfloat16 .7 us less on an H200,
  // 16384 x 4096 .4, 8192 x 16384 .7. Of more blocks some would wait for others to end: 2048 x
  // 65536 .6 us more.
  plan.finish_spreads = plan.overlap_launches && plan.finish_vectors == 0 &&
                        blocks(plan.finish_threads) <= 2 * device.sm_count;
}

// Whether clusters of the ring are kept together (see Pace): aligned rows of float32, if there are
// many for each. Of an elementwise sum on an H200, without and so (and 100 cycles more): 8192
// columns .94 and .96, 10240 .95 and .97, 12288 .94 and .975, 16384 .95 and .96, 20480 .96 and .97,
// 24576 .94 and .965, 32768 .965 and .975, 14336 and 49152 .945 and .95. A cluster may be four rows
// ahead, and looks every four of them: if it looks every row or every other one, it is slower than
// without (12288 .93, .955). Larger blocks, whose copies pass the L1 cache by, gain less (65536
// .947 and .953, 131072 the same), and in one form of it lost much (.85, .80). Aligned rows of 16
// bits have drifted apart less, 3 to 6 us for 10, when they end, and lose (18432 .845 and .83,
// 65536 .935 and .91), but in pairs (12288 .94 and .945, 16384 .93 and .94, by 64 of them), for
// which it is not done; so do rows of a block, but for float32 (4096 .953 and .96, on 131
// multiprocessors, 1024 .985 and .98, 64 .953 and .945).
bool ring_keeps_together(const BackwardPlan& plan, const BackwardProblem& problem, int64_t turns,
                         const DeviceProperties& device) {
  return plan.kernel == Kernel::kRing && plan.cluster_size > 1 && !plan.in_grid &&
         plan.vectorized && problem.x_dtype == DType::kFloat32 && has_one_dtype(problem) &&
         plan.threads_per_row <= kMostCachedThreads && turns > kFewTurns &&
         !has_slow_memory(device);
}

// The same of wide rows that are copied in bulk: 16385 columns of bfloat16 .90 and .92, 20001 .875
// and .91, 28001 .845 and .87, 50257 .865 and .895, 12289 and 65537 the same (in pauses of one to
// three turns' time, from a turn and a quarter or a half on). Rows of one block are as well off
// without: 7001 .91 and .905, 8191 .91 both.
bool wide_rows_keep_together(const BackwardPlan& plan, int64_t turns) {
  return plan.is_wide && plan.cluster_size > 1 && turns > kFewTurns;
}

}  // namespace

BackwardPlan plan_backward(const BackwardProblem& problem, const DeviceProperties& device,
                           const PlanRequest& request) {
  const int64_t columns = chunk_columns(problem.x_dtype);
  const int64_t chunks = std::max<int64_t>(1, ceil_div(problem.cols, columns));
  BackwardPlan plan;
  plan.chunks_per_thread = backward_chunks(problem.x_dtype);
  plan.vectorized = problem.aligned && problem.cols % columns == 0;
  plan.dx = problem.dx;
  plan.overlap_launches = device.compute_capability >= 90;

  const StreamShape stream = choose_stream(problem, chunks, device, request);
  if (stream.few && stream.elements) {
    shape_few_rows(plan, stream.elements->ring, problem, device, kMinTileLanes, false);
    plan.kernel = Kernel::kFewElements;
    plan.columns_per_thread = stream.elements->columns;
    return plan;
  }
  if (stream.few) {
    shape_few_rows(plan, *stream.ring, problem, device, kMaxTileLanes, true);
    return plan;
  }
  const bool streams = stream.elements || stream.ring;
  const int64_t resident_blocks =
      stream.elements ? shape_elements(plan, *stream.elements, problem, device, request)
      : stream.ring   ? shape_ring(plan, *stream.ring, problem, device, request)
                      : shape_rows(plan, problem, chunks, device, request);
  Groups groups;
  groups.all = ceil_div(problem.rows, plan.rows_per_block);
  groups.resident = std::max<int64_t>(1, resident_blocks / plan.cluster_size);
  if (streams && !plan.in_grid && request.blocks) {
    groups.resident = std::clamp<int64_t>(*request.blocks / plan.cluster_size, 1, groups.resident);
  }
  if (problem.weight_grads) {
    plan_weight_grads(plan, problem, groups, streams, device, request);
    plan_finish(plan, problem, device, request);
  }

  const int64_t accumulator_bytes = size_in_bytes(accumulation_dtype(problem.x_dtype));
  if (problem.dx) {
    // Persistent blocks keep weight, dw and db in registers from row to row; a segment has no such
    // state.
    const int64_t working = plan.kernel == Kernel::kSplit ? groups.all
                            : plan.weight_grads == WeightGrads::kFused
                                ? plan.partials * plan.merged / plan.shares
                            : streams && !plan.in_grid && groups.all < 2 * groups.resident
                                ? groups.all
                                : std::min(groups.all, (streams ? 1 : 2) * groups.resident);
    plan.blocks = working * plan.segments * plan.cluster_size;
    const int64_t turns = ceil_div(groups.all, working);
    if (ring_keeps_together(plan, problem, turns, device)) {
      constexpr int64_t kTurnsAhead = 4;
      plan.most_ahead = static_cast<int>(kTurnsAhead * working);
    } else if (wide_rows_keep_together(plan, turns)) {
      plan.most_ahead = static_cast<int>(working + working / 2);
    }
  }
  if (plan.dx && plan.kernel == Kernel::kSplit) {
    plan.workspace_bytes += 2 * accumulator_bytes * problem.rows * plan.segments;
  }
  if (!plan.sums_are_results) {
    plan.workspace_bytes += 2 * accumulator_bytes * plan.partials * problem.cols;
  }
  if (plan.in_grid) plan.workspace_bytes += grid_exchange_bytes(plan.blocks);
  return plan;
}

}  // namespace fastnorm::cuda
