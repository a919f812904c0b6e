// How rows and columns are divided: the sizes were chosen by measurement.
#include "layer_norm_partition.h"

#include <algorithm>

namespace fastnorm::cpu {
namespace {

constexpr int64_t kElementsPerTask = 16384;            // below this a thread is not worth waking
constexpr int64_t kFewRows = 64;                       // long rows are shared below this many
constexpr int64_t kMaxBlocks = 1024;                   // so that threads' shares come out even
constexpr int64_t kMaxRowsPerBlock = 64;               // where there are few: partials cost little
constexpr int64_t kSmallWorkspace = int64_t{4} << 20;  // bytes, always allowed
constexpr int64_t kWorkspaceShare = 32;                // or this fraction of x
constexpr int64_t kCachedBytes = int64_t{32} << 20;    // of x and dy, between their two readings

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows that are summed one after another in float32: few, since the error grows with their number.
int64_t rows_per_block(int64_t rows, int64_t x_bytes, int64_t slot_bytes) {
  const int64_t workspace = std::max(kSmallWorkspace, x_bytes / kWorkspaceShare);
  const int64_t blocks = std::clamp<int64_t>(workspace / slot_bytes, 1, kMaxBlocks);
  return std::max(std::clamp<int64_t>(ceil_div(rows, 16), 4, kMaxRowsPerBlock),
                  ceil_div(rows, blocks));
}

}  // namespace

int64_t tile_count(int64_t cols) { return std::max<int64_t>(1, cols / kTile); }

Tile tile_at(int64_t tile, int64_t cols) {
  const bool last = tile == tile_count(cols) - 1;
  return {tile * kTile, last ? cols - tile * kTile : kTile};
}

ForwardPartition partition(const ForwardArgs& args) {
  ForwardPartition result;
  result.share_rows = args.cols >= kLongRow && args.rows < kFewRows;
  result.rows_per_task = ceil_div(kElementsPerTask, std::max<int64_t>(1, args.cols));
  return result;
}

BackwardPartition partition(const BackwardArgs& args) {
  BackwardPartition result;
  const int64_t rows = args.rows;
  const int64_t cols = std::max<int64_t>(1, args.cols);
  const int64_t element = size_in_bytes(accumulation_dtype(args.x_dtype));
  const bool sums = args.dw != nullptr || args.db != nullptr;
  result.margin = kMaxVectorBytes / element;
  // Two margins' worth beyond a multiple of the vector keep the slots from lying a multiple of a
  // page apart, where they would share sets of the caches.
  result.slot_stride = 2 * (ceil_div(cols, result.margin) + 1) * result.margin;
  const int64_t slot_bytes = result.slot_stride * element;
  result.share_rows = cols >= kLongRow;
  if (result.share_rows) {
    const int64_t row_bytes = cols * (size_in_bytes(args.x_dtype) + size_in_bytes(args.dy_dtype));
    result.rows_per_block = ceil_div(std::max<int64_t>(1, kCachedBytes / row_bytes), 4) * 4;
    result.slots = sums && rows > 0 ? 1 : 0;
    result.row_sums = 2 * std::min(rows, result.rows_per_block) * (tile_count(cols) + 1);
  } else {
    const int64_t x_bytes = rows * cols * size_in_bytes(args.x_dtype);
    result.rows_per_block = rows_per_block(rows, x_bytes, slot_bytes);
    result.slots = sums ? ceil_div(rows, result.rows_per_block) : 0;
  }
  result.blocks = ceil_div(rows, result.rows_per_block);
  result.blocks_per_task = ceil_div(kElementsPerTask, result.rows_per_block * cols);
  result.workspace_bytes =
      result.row_sums * static_cast<int64_t>(sizeof(double)) + result.slots * slot_bytes;
  return result;
}

}  // namespace fastnorm::cpu
