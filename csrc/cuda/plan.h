// How a LayerNorm runs on a GPU: pure functions from sizes, dtypes, alignment and device to a small
// struct. Needs no GPU and no CUDA toolkit. The launchers execute a plan and decide nothing.
//
// Words: a *chunk* is 16 bytes of x (8 columns of a 16-bit row) and always belongs to one thread,
// whatever the row's alignment. A row is held by `threads_per_row` threads of each of
// `cluster_size` blocks: of a cluster, or of a grid that runs as a whole. In the forward a warp
// holds neighbouring chunks and its lane l the chunks l, l + 32, and so on of them; in the backward
// thread t owns the chunks t, t + threads_per_row.
//
// What fixes the order of summation of y and dx (kernel, chunks_per_thread, columns_per_thread,
// threads_per_row, cluster_size, segments, run_columns) depends on the row's width, the dtypes and
// the device alone, never on the number of rows or on alignment: a row's result does not depend on
// the batch it came in.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "../layer_norm_args.h"

namespace fastnorm::cuda {

constexpr int kMaxClusterSize = 8;     // what every device with clusters offers
constexpr int kLargeClusterSize = 16;  // what some offer, if their GPCs are large enough
constexpr int kMostResident = 5;       // blocks of clusters on a multiprocessor that plans ask for

struct DeviceProperties {
  int sm_count = 0;
  int compute_capability = 0;  // 90 for 9.0
  int large_clusters = 0;      // of kLargeClusterSize blocks of kRing, that run side by side
  bool whole_grids = true;  // whether a block on nearly every multiprocessor is sure of its place
  // GB/s, by clock and width of the bus; zero where the driver hides them.
  int memory_bandwidth = 0;
  // Clusters of 1, 2, ... blocks that run side by side, with a block on each multiprocessor, two,
  // and so on; zero where nobody has asked.
  std::array<std::array<int, kMostResident>, kMaxClusterSize> clusters = {};
};

enum class Kernel : uint8_t {
  kShortRows,    // forward: a row in the registers of a warp or fewer lanes
  kElements,     // a row that ends within a chunk, in single columns instead of chunks
  kRows,         // a row in one block, or in the backward a part of it
  kCluster,      // a row in a cluster of blocks (compute capability 9.0 and newer)
  kFewRows,      // backward: dx by rows, dw and db by columns, by other blocks of the same launch
  kRing,         // rows streamed through shared memory (compute capability 9.0 and newer)
  kSplit,        // a row cut into segments, one block each: statistics first, then a second pass
  kFewElements,  // kFewRows of rows that kElements takes
};

// Chunks that a thread of the forward holds: in registers (five to seven where that saves a warp,
// see register_chunks), or in long rows, of which some are in shared memory (64 columns of a 16-bit
// row, 32 of float32).
constexpr int kRegisterChunks = 4;
constexpr int kForwardChunks = 8;

// The same in the forward's ring of 16-bit rows with float32 parameters, of which a thread keeps
// those of its columns in 112 of 168 registers; and threads of a block, three warps on each of a
// multiprocessor's four parts. Of a copy on an H200, with four chunks in each of 512 threads and
// so: 18432 columns of bfloat16 .78 and .93, 20480 .87 and .93, 40960 .83 and .915, 32768 .91 and
// .91, 65536 and 131072 .92 and .92, not aligned 20001 .73 and .85, 65537 .775 and .75.
constexpr int kWideRingChunks = 7;
constexpr int kMaxWideThreads = 384;

// Chunks that a thread of the backward holds: 16 columns (8 in float64), of which weight and the
// running dw and db stay in registers, and but for kRing x and dy too. (In kRing 32 columns reached
// .86 of an elementwise sum where 16 reach .93, 131072 x 1024 bfloat16 on an H200.)
constexpr int backward_chunks(DType x_dtype) {
  return x_dtype == DType::kFloat16 || x_dtype == DType::kBFloat16 ? 2 : 4;
}

// The same of lanes of a warp that holds 16-bit rows alone, where they have more (see warp_shape).
// But for aligned rows of one dtype that takes more than 128 registers, which leaves a block so
// many warps.
constexpr int kMostLaneChunks = 3;
constexpr int kWideLaneWarps = 12;

constexpr int kChunkBytes = 16;
constexpr int kSectorBytes = 32;  // of memory, that is read and written as a whole
constexpr int kWarpSize = 32;
constexpr int kMaxThreadsPerRow = 512;   // leaves each thread 128 registers
constexpr int kMaxRowThreads = 768;      // of a row in registers alone, with 40 of them
constexpr int kMaxGridThreads = 480;     // of a row in a block of such a grid, beside another warp
constexpr int kGridAhead = 3;            // rows that are summed there before one is finished,
constexpr int kAheadThreads = 320;       // in the forward by blocks of up to so many threads
constexpr int kTwoAheadThreads = 352;    // two of 16-bit rows not aligned by blocks of so many
constexpr int kMaxGridBlocks = 160;      // that hold a row together in a grid that runs as a whole
constexpr int kGridExchanges = 8;        // rows whose sums may be on their way between its blocks
constexpr int kShortRowThreads = 64;     // the block of kShortRows
constexpr int kMaxSharedBlock = 256;     // a block of the backward that several rows share
constexpr int kFinishThreads = 256;      // a block of the backward's second kernel
constexpr int kMostFinishThreads = 64;   // of those, side by side
constexpr int kMaxRingThreads = 640;     // the largest block of kRing
constexpr int kMostCachedThreads = 384;  // of float32, whose stages leave the L1 cache enough room
constexpr int kMinTileLanes = 4;         // chunks of a row in a tile of kTiles: at least
constexpr int kMaxTileLanes = 8;         // and at most, but for
constexpr int kWideTileLanes = 32;       // tiles of rows that a cluster holds
constexpr int kElementRowThreads = 128;  // the block of kElements
constexpr int kLeastElementLanes = 8;    // of a row of kElements
constexpr int kMostElementColumns = 32;  // of a lane of kElements in the forward, and
constexpr int kMostPairedColumns = 28;   // where it is better than chunks that fill warps: in up to
constexpr int kMaxPairedWarps = 4;       // so many of these
constexpr int kLeastElementPairs = 4;    // of columns: a lane of the backward's long ones has more
constexpr int kMostTinyColumns = 64;     // of very short rows of kElements, but for some; and
constexpr int kLeastTinyLane = 2;        // of a lane in those, at least
constexpr int kMostTinyLane = 16;        // and at most
constexpr int kTinyThreads = 128;        // the block of such rows in the backward
constexpr int kSegmentThreads = 256;     // the block of a kSplit segment
constexpr int kColumnWarps = 32;         // of kColumns, that a multiprocessor holds where it can,
constexpr int kUnevenColumnWarps = 24;   // and of rows that are not aligned

// The smallest power of two that is no less.
constexpr int64_t next_power_of_two(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

// Of a thread's chunks, those in shared memory. With two in registers an SM holds three blocks of
// 512 threads that have kForwardChunks each.
constexpr int forward_shared_chunks(int chunks, bool vectorized) {
  if (chunks < kForwardChunks) return 0;
  return chunks - (vectorized ? 2 : kRegisterChunks);
}

// Of its chunks, those that pass a stage together on their way to or from memory that is not
// aligned.
constexpr int forward_staged_chunks(int chunks, int shared_chunks) {
  return shared_chunks > 0 ? kRegisterChunks : chunks;
}

// Shared memory that a warp of the forward takes: for its chunks that are not in registers, and for
// a stage.
constexpr int forward_shared_bytes(int chunks, int shared_chunks, bool stages) {
  const int staged = forward_staged_chunks(chunks, shared_chunks);
  const int stage = stages ? staged * kWarpSize + 1 : 0;
  return (shared_chunks * kWarpSize + stage) * kChunkBytes;
}

// Whether rows are very short ones of kElements (tiny.cuh) in the backward: those that end within a
// chunk, and whole ones of few chunks. 134 MB on an H200, of an elementwise sum, in registers and
// so: bfloat16 8 columns .51 and .81, 16 .75 and .85, 24 .65 and .88, 32 .77 and .87, one element
// off 16 .55 and .93, 32 .55 and .97; float32 8 .77 and .86, 12 .85 and .88, 16 .77 and .89, 20 .86
// and .89, 28 .83 and .90.
constexpr bool is_tiny(int64_t cols, int element_bytes) {
  const int64_t bytes = cols * element_bytes;
  return cols <= kMostTinyColumns &&
         (bytes % kChunkBytes != 0 || bytes <= (element_bytes == 2 ? 4 : 7) * kChunkBytes);
}

// And in the forward: those that end within a chunk, but not two chunks of float32 (6 columns .98
// of a copy on an H200, .97 so, 7 .99 and .97); and longer ones of a 16-bit type, column by column
// and so, 134 MB of bfloat16: 65 columns .75 and .92, 78 .85 and .96, 87 .92 and .95, 97 .91 and
// .95, 113 .88 and .93, 125 .92 and .965; but even ones 110 .97 and .96, 126 .99 and .97, and those
// of which five or six lanes of a warp meet in a bank, 73 .81 and .77, 85 .91 and .82, 102 .93 and
// .78 (by 16 lanes a row .77, .85 and .82).
constexpr bool is_tiny_forward(int64_t cols, int element_bytes) {
  constexpr int64_t kMost = 127, kMostEven = 104;
  const bool meet = cols == 73 || cols == 85 || cols == 102 || cols == 103;
  const bool longer = element_bytes == 2 && cols <= (cols % 2 == 0 ? kMostEven : kMost) && !meet;
  const bool two_chunks = element_bytes == 4 && (cols == 6 || cols == 7);
  return cols * element_bytes % kChunkBytes != 0 && !two_chunks &&
         (cols <= kMostTinyColumns || longer);
}

// The lanes of a very short row, and the columns of one, rounded up to pairs.
struct TinyShape {
  int lanes, columns;
};

// What a lane does for a row beside its columns is as much as for ten of them, so it has as many as
// there are registers for. 134 MB of bfloat16 on an H200 by up to eight columns and by up to 16: 9
// columns 171 and 146 us, 13 142 and 119, 33 185 and 156, 63 123.5 and 109; forward 108 and 91, 88
// and 83, 122 and 96, 77 and 76; 111 columns 85.5 and 75. Of float32, which takes twice the shared
// memory, by up to eight, ten and 12: 17 columns 118, 111 and 111 us, 33 121, 109 and 109, but 22
// 109, 110 and 120. Of 51 columns seven lanes of a warp would meet in a bank: forward 94 us by up
// to eight and 108 by up to 16.
//
// Rows of one chunk, two or four have one in each lane.
constexpr TinyShape tiny_shape(int64_t cols, int element_bytes) {
  const int chunk = kChunkBytes / element_bytes;
  if (cols == chunk || cols == 2 * chunk || cols == 4 * chunk) {
    return {static_cast<int>(cols / chunk), chunk};
  }
  const int most = element_bytes != 2 ? 10 : cols == 51 ? 8 : kMostTinyLane;
  const auto lanes = static_cast<int>(next_power_of_two((cols + most - 1) / most));
  const auto each = static_cast<int>((cols + lanes - 1) / lanes);
  return {lanes, (each + 1) / 2 * 2};
}

// Whether any row has that shape.
constexpr bool is_tiny_shape(int lanes, int columns, int element_bytes, bool forward) {
  for (int64_t cols = 1; cols < 128; ++cols) {
    const TinyShape shape = tiny_shape(cols, element_bytes);
    const bool tiny = forward ? is_tiny_forward(cols, element_bytes) : is_tiny(cols, element_bytes);
    if (tiny && shape.lanes == lanes && shape.columns == columns) return true;
  }
  return false;
}

// Such rows that a lane takes in the forward, with so many columns of each. (Of 2 and 3 columns,
// bfloat16 by four rows 183 and 131 us on an H200, 163 and 119.5 by eight, float32 104 and 105. Of
// 1 and 2, by four columns and so, 134 MB: bfloat16 280 -> 211 us and 149 -> 140, backward of 2
// 204 -> 176; float32 142 -> 137, 102 -> 103, backward 138 -> 135.)
constexpr int tiny_forward_rows(int columns, int element_bytes) {
  if (columns > 8) return 2;
  const int rows = columns == 2 ? 8 : 4;
  return element_bytes == 2 && columns <= 4 ? 2 * rows : rows;
}

// And tiles of such rows that a warp takes there, at most, for what it does before the first is
// much beside that: of a copy on an H200, by one, two or three, and four to seven, 134 MB of
// bfloat16: 33 columns .80, .91, .905, 17 .77, .88, .86, 44 .87, .92, .94, 63 .89, -, .965; but 3
// .61, .595, .57, 13 .84, .87, .85; of float32 33 .98, -, .97. By blocks that stay 33 .81, 63 .90.
constexpr int tiny_forward_tiles(int lanes, int columns, int element_bytes) {
  if (element_bytes != 2) return 1;
  return lanes > 1 ? 4 : columns >= 12 ? 2 : 1;
}

// And in the backward, one after the other; and blocks of them that a multiprocessor holds, as
// registers let it. Of up to four columns in more rows, 134 MB on an H200: bfloat16 2 columns 311
// -> 259 us, 3 216 -> 181, float32 2 columns 217 -> 140, 3 148 -> 126; of six 5 and 6 columns of
// bfloat16 157 -> 163 and 134 -> 146, 5 and 21 of float32 120 -> 126 and 111 -> 124. With eight in
// six blocks, where float16 spills, and in five 51 columns of it .71 and .78, 32 .85 and .875.
constexpr int tiny_backward_rows(int columns, int element_bytes) {
  const int rows = columns == 2 ? 8 : columns == 4 ? 4 : columns <= 8 ? 2 : 1;
  return element_bytes == 2 ? rows : (rows + 1) / 2;
}
constexpr int tiny_backward_blocks(int columns) { return columns == 6 ? 6 : columns <= 12 ? 5 : 4; }

// Rows that a lane of kElements holds together, which share what it reads of weight and bias.
constexpr int kElementRows = 2;

// Of rows that kElements copies in bulk in the backward: those that a lane takes at a time; stages
// of a block, at most, and their shared memory; warps of a block that have rows, beside one that
// copies; and what a stage of so many rows takes: x, dy, mean and rstd. The shortest rows take 12
// warps (67 columns of bfloat16 .92 of an elementwise sum on an H200, .895 in eight); others of a
// warp have more registers.
constexpr int kBulkRows = 2;
constexpr int kMostBulkStages = 8;
constexpr int kMostBulkBytes = 136 << 10;
constexpr int bulk_warps(int lanes, int columns_per_thread) {
  return lanes == kLeastElementLanes && columns_per_thread == 10 ? 12 : 8;
}
// The same of rows of several warps, at most: with the one that copies as many as have 128
// registers each, or where that is too few 168.
constexpr int most_bulk_warps(int columns_per_thread) { return columns_per_thread == 16 ? 11 : 15; }
constexpr int whole_sectors(int bytes) {
  return (bytes + kSectorBytes - 1) / kSectorBytes * kSectorBytes;
}
// Of rows of a 16-bit tensor, which begin within a sector if they do not fill whole ones.
constexpr int bulk_tensor_bytes(int rows, int64_t cols) {
  const int bytes = rows * static_cast<int>(2 * cols);
  return whole_sectors(bytes) + (bytes % kSectorBytes == 0 ? 0 : kSectorBytes);
}
constexpr int bulk_stage_bytes(int rows, int64_t cols) {
  return 2 * bulk_tensor_bytes(rows, cols) +
         whole_sectors(2 * rows * static_cast<int>(sizeof(float)));
}

// Wide rows of kElements in the backward, one at a time: warps of a block, in which a thread has
// 168 registers, pairs of columns of a lane, at most, and shared memory of a block.
constexpr int kLeastWideRow = 6273;
constexpr int kWideRowWarps = 11;
constexpr int kMostWideRowPairs = 15;
constexpr int kMostWideRowBytes = (227 << 10) - 4096;

// Warps of a row that the forward copies in bulk, at most: eight are slower (see copies_in_bulk).
constexpr int kMaxBulkWarps = 6;

// Rows of kShortRows that the forward copies in bulk: the block, those that a multiprocessor holds
// at least, of 40 registers, and the rows that a lane has together. Two share what is read of
// weight and bias, but leave fewer warps with something to do at a time: of a copy on an H200, 134
// MB of bfloat16, one and two 200 columns .95 and .99, 328 .98 and 1.00, 648 .985 and 1.01, but in
// lanes of five chunks 136 1.00 and .975, 264 1.00 and .97; float32 100 .998 and .975, 132 .993 and
// .956.
constexpr int kBulkRowThreads = 128;
constexpr int kBulkRowBlocks = 12;
constexpr int bulk_rows_of_lane(int lanes, int chunks, int element_bytes) {
  return element_bytes == 4 || chunks == 5 || (lanes == 4 && chunks == 4) ? 1 : 2;
}

// Wide rows of kElements, one in a block (see wide_warps): they begin within a sector, and behind
// one, for where y does not lie in granules as x does it moves to the front by some elements.
constexpr int kMostWideSteps = 32;  // of pairs of columns in a lane
constexpr int least_wide_columns(int element_bytes) { return element_bytes == 2 ? 5633 : 1025; }
constexpr int most_wide_columns(int element_bytes) { return element_bytes == 2 ? 22016 : 10624; }
constexpr int wide_row_bytes(int64_t cols, int element_bytes) {
  return 2 * kSectorBytes + whole_sectors(static_cast<int>(cols) * element_bytes);
}

// Wider ones, by blocks that stay, or clusters of them, of kWideRowWarps warps that have columns:
// pairs of columns of a lane, and shared memory of a block, at most.
constexpr int least_stream_columns(int element_bytes) {
  return element_bytes == 2 ? 16385 : most_wide_columns(element_bytes) + 1;
}
constexpr int least_stream_pairs(int element_bytes) { return element_bytes == 2 ? 16 : 8; }
constexpr int most_stream_pairs(int element_bytes) { return element_bytes == 2 ? 30 : 18; }
constexpr int kMostStreamBytes = (227 << 10) - 9728;
constexpr int64_t most_stream_columns(int element_bytes) {
  return int64_t{kMaxClusterSize} * kWideRowWarps * most_stream_pairs(element_bytes) * 2 *
         kWarpSize;
}

// Shared memory in which a warp of kElements that has `rows` rows with others puts its part of y.
constexpr int element_stage_bytes(int columns_per_thread, int rows, int element_bytes) {
  return rows * (kWarpSize * columns_per_thread * element_bytes + kChunkBytes);
}

struct ForwardPlan {
  Kernel kernel = Kernel::kRows;
  int chunks_per_thread = 1;
  int columns_per_thread = 0;  // kElements, which has no chunks
  int threads_per_row = 1;
  int rows_per_block = 1;
  int shared_chunks = 0;    // of each thread's, the ones that are not in registers
  int rows_per_thread = 1;  // of which a thread holds its chunks together
  int cluster_size = 1;
  int64_t segments = 1;     // of a row
  bool vectorized = false;  // rows start at multiples of 16 bytes and have whole chunks
  bool gathers = false;     // kShortRows: a warp writes its rows together
  bool in_bulk = false;     // kElements, kShortRows: a block's x and y are copied as a whole
  int bulk_stages = 0;      // kElements: of rows so copied by blocks that stay, if they are
  bool more_warps = false;  // kRows: lanes are idle, so that registers are better spent on warps
  // As in BackwardPlan. A grid of up to kLargeClusterSize blocks adds up in a cluster's order.
  bool in_grid = false;
  bool exchange_warp = false;
  int rows_ahead = 1;  // kRing: whose moments are asked for before a row is written
  // kRing, kElements: so many rows of all blocks, or clusters, one may be ahead of their average
  // (see Pace).
  // Zero where each goes on as it can.
  int most_ahead = 0;
  int64_t blocks = 0;
  int shared_bytes = 0;  // of each block, for chunks and for rows that are not aligned
  int64_t workspace_bytes = 0;
  int sm_count = 1;               // of the device
  bool overlap_launches = false;  // whether a kernel can start before the one before it has ended
};

// Where dw and db come from.
enum class WeightGrads : uint8_t {
  kNone,     // not asked for
  kFused,    // from the same read of x and dy as dx
  kRow,      // of a single row, from blocks of their own in the launch of dx
  kTiles,    // the same of few rows, a cluster per tile of columns
  kColumns,  // from a kernel of their own, a block per tile of columns and slice of rows
};

struct BackwardPlan {
  Kernel kernel = Kernel::kRows;  // of dx
  int chunks_per_thread = 1;
  int columns_per_thread = 0;  // kElements, which has no chunks
  int bulk_stages = 0;         // kElements: of tiles of rows that are copied in bulk, if they are
  int threads_per_row = 1;
  int rows_per_block = 1;
  int cluster_size = 1;
  // kRing, kFewRows: of a row, those of a warp whose lanes have a column each behind their chunks.
  // Zero where they have chunks alone.
  int run_columns = 0;
  int64_t segments = 1;
  bool vectorized = false;
  bool packed = false;  // rows in a part of a warp follow each other without idle lanes
  bool brakes = false;  // kRing: each turn waits for the next row's statistics, to ask for less
  bool copies_ahead = false;   // kRows, kCluster: while a row is worked on, the next are copied
  int most_ahead = 0;          // kRing: as in ForwardPlan
  bool in_grid = false;        // kRing: of blocks of a grid that runs as a whole, not of a cluster
  bool exchange_warp = false;  // kRing: each block has a warp more, which only exchanges sums
  bool dx = true;              // false: dw and db alone are asked for, and no dx kernel runs
  int64_t blocks = 0;
  WeightGrads weight_grads = WeightGrads::kNone;
  int64_t partials = 0;  // rows of partial sums of dw and db, each `cols` wide
  // kRing, kElements: of the blocks or clusters of them that hold rows, those that leave one row of
  // partial sums together, for which they are a cluster of the device.
  int merged = 1;
  // kRing, kElements: rows of partial sums that each of the few clusters or grids that hold wide
  // rows leaves, each after some of them: a grid in one launch, clusters in as many.
  int shares = 1;
  // kTiles: blocks of a cluster that share the rows of a tile, and those of all tiles.
  int tile_lanes = 0;  // chunks of a row in a tile
  int slices = 1;
  int64_t column_blocks = 0;
  // kColumns: columns of a tile, threads across it, rows of threads, tiles; in `partials` slices
  // the blocks of a tile share the rows.
  int column_width = 0;
  int column_threads = 0;
  int column_rows = 0;
  int64_t column_tiles = 0;
  // The second kernel, which adds up partial sums. There is none where the one row of them is dw
  // and db. Else a block has so many threads side by side, and the others take partial sums in
  // turn; or each thread adds up all that there are of so many vectors of columns.
  bool sums_are_results = false;
  int finish_threads = 0;
  int finish_vectors = 0;
  bool finish_spreads = false;  // no more than two of its blocks on a multiprocessor
  int64_t workspace_bytes = 0;
  bool overlap_launches = false;  // whether a kernel can start before the one before it has ended
  bool is_wide = false;           // kElements: a block has one row at a time, copied in bulk
};

// Rows side by side in a warp: of lanes that are no power of two, as many as of the next one, but
// where they are packed. In bulk lanes have several each, and so have warps that share rows.
constexpr int rows_per_warp(const BackwardPlan& plan) {
  if (plan.is_wide) return 1;
  const int lanes = plan.threads_per_row;
  const int side_by_side = lanes < kWarpSize ? kWarpSize / lanes : 1;
  if (plan.bulk_stages > 0) return side_by_side * kBulkRows;
  if (plan.cluster_size > 1 || lanes >= kWarpSize) return 1;
  return kWarpSize / (plan.packed ? lanes : static_cast<int>(next_power_of_two(lanes)));
}

// Blocks of a cluster of kFewRows and kFewElements, which hold a row or share the rows of a tile.
constexpr int few_rows_cluster(const BackwardPlan& plan) {
  return plan.cluster_size > plan.slices ? plan.cluster_size : plan.slices;
}

constexpr int block_threads(const BackwardPlan& plan) {
  const int together = rows_per_warp(plan);
  const int lanes = plan.threads_per_row;
  return plan.rows_per_block / together * (together > 1 && lanes < kWarpSize ? kWarpSize : lanes);
}

// What a thread that copies rows ahead has in shared memory: x, dy, mean and rstd of so many rows,
// in granules, and where a block holds a row, the weight.
constexpr int kAheadGranules = 2 * backward_chunks(DType::kFloat64) + 1;
constexpr int ahead_stages(bool in_cluster) { return in_cluster ? 3 : 2; }
constexpr int ahead_bytes(int threads, bool in_cluster) {
  const int weight = in_cluster ? 0 : backward_chunks(DType::kFloat64);
  return (ahead_stages(in_cluster) * kAheadGranules + weight) * kChunkBytes * threads;
}

// Columns of partial sums that a thread of the backward's second kernel reads at once; and how many
// such vectors it may have. Of few columns vectors would leave few threads side by side, and long
// sums to those that add up what all have: 16384 x 512 bfloat16 took 23.6 us on an H200 so, 22.9 by
// single columns, 131072 x 64 24.1 and 23.5, 8192 x 1024 23.3 and 23.2, but 2048 x 4096 float32
// 34.3 and 34.6.
constexpr int finish_vector(DType accumulator, int64_t cols) {
  constexpr int64_t kFew = 512;
  return accumulator == DType::kFloat32 && cols % 4 == 0 && cols > kFew ? 4 : 1;
}
constexpr int most_finish_vectors(int64_t vector) { return vector == 1 ? 4 : 2; }

// The most columns of a row that a block has, whose warps have steps of 2 * kWarpSize columns each.
constexpr int64_t wide_block_columns(const BackwardPlan& plan, int64_t cols) {
  const int64_t warps = plan.threads_per_row / kWarpSize;
  const int64_t steps = (cols + 2 * kWarpSize - 1) / (2 * kWarpSize);
  const int64_t most_steps = (steps + plan.cluster_size * warps - 1) / (plan.cluster_size * warps);
  return warps * most_steps * 2 * kWarpSize;
}
// Where x or dy of such a part of a row lies: anywhere in a sector.
constexpr int wide_tensor_bytes(const BackwardPlan& plan, int64_t cols) {
  return whole_sectors(static_cast<int>(2 * wide_block_columns(plan, cols))) + kSectorBytes;
}

struct ForwardProblem {
  int64_t rows = 0;
  int64_t cols = 0;
  DType x_dtype = DType::kFloat32;
  bool aligned = true;    // every row of every tensor starts at a multiple of its chunk's size
  bool one_dtype = true;  // y, weight and bias have x's
  bool y_as_x = true;     // y has x's dtype
  // Rows of x and y lie one behind the other, from a multiple of 16 bytes on.
  bool contiguous = false;
};

struct BackwardProblem {
  int64_t rows = 0;
  int64_t cols = 0;
  DType x_dtype = DType::kFloat32;
  DType dy_dtype = DType::kFloat32;
  bool aligned = true;
  bool dx = true;
  bool weight_grads = true;  // dw or db or both
  // Rows of x, dy and dx, and mean and rstd, lie one behind the other, from a multiple of 16 bytes
  // on.
  bool contiguous = false;
  bool of_sums_dtype = false;  // dw and db are both asked for, in the dtype that they are summed in
};

// What a test may force; empty fields are chosen, and so is a kernel that cannot run rows of this
// width on this device.
struct PlanRequest {
  std::optional<Kernel> kernel;
  std::optional<WeightGrads> weight_grads;
  std::optional<int> cluster_size;
  std::optional<int> merged;
  std::optional<bool> exchange_warp;  // of clusters of kRing
  // No more of those that stay for many rows, of kRing and kElements, but in a grid.
  std::optional<int> blocks;
  std::optional<bool> in_bulk;           // forward: rows that may be, however many there are
  std::optional<bool> finish_by_thread;  // backward
};

ForwardPlan plan_forward(const ForwardProblem& problem, const DeviceProperties& device,
                         const PlanRequest& request = {});
BackwardPlan plan_backward(const BackwardProblem& problem, const DeviceProperties& device,
                           const PlanRequest& request = {});

}  // namespace fastnorm::cuda
