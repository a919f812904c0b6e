// How rows and columns are divided for summation and among threads: functions of sizes and dtypes
// alone, so that no result depends on the number of threads.
#pragma once

#include <cstdint>

#include "../layer_norm_args.h"

namespace fastnorm::cpu {

// A row is summed tile by tile: within a tile in the accumulation dtype, over tiles in double.
constexpr int64_t kTile = 2048;

// From this many columns on a row may be shared among threads, tile by tile.
constexpr int64_t kLongRow = 32768;

// Of the widest vector of all instruction sets.
constexpr int64_t kMaxVectorBytes = 64;

struct Tile {
  int64_t begin;
  int64_t size;  // kTile to 2 * kTile - 1, unless the row is shorter
};

int64_t tile_count(int64_t cols);
Tile tile_at(int64_t tile, int64_t cols);

struct ForwardPartition {
  bool share_rows = false;    // tiles of a row go to different threads
  int64_t rows_per_task = 1;  // at least, where they are not shared
};

struct BackwardPartition {
  bool share_rows = false;
  // Rows that are added up one after the other into one slot: partial sums of dw, then of db.
  // Where rows are shared there is one slot, and blocks follow one another so that the second
  // reading of x and dy finds them in a cache.
  int64_t rows_per_block = 1;
  int64_t blocks = 0;
  int64_t blocks_per_task = 1;  // at least, where rows are not shared
  int64_t slots = 0;
  int64_t slot_stride = 0;  // elements of the accumulation dtype, as margin
  int64_t margin = 0;       // room before the sums of the first column
  int64_t row_sums = 0;     // doubles, where rows are shared: two per tile and two per row
  int64_t workspace_bytes = 0;
};

ForwardPartition partition(const ForwardArgs& args);
BackwardPartition partition(const BackwardArgs& args);

}  // namespace fastnorm::cpu
