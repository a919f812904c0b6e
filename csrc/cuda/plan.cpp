// The choice of kernels and their shapes; see plan.h.
#include "plan.h"

#include <algorithm>

namespace fastnorm::cuda {
namespace {

constexpr int kWarp = 32;

// Threads of a block that holds several rows.
constexpr int kForwardBlock = 128;
constexpr int kBackwardBlock = 256;

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

// The smallest cluster that holds the row; a larger one on request.
int choose_cluster_size(int64_t chunks, int chunks_per_thread, const PlanRequest& request) {
  int64_t size = next_power_of_two(ceil_div(chunks, block_chunks(chunks_per_thread)));
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
  return static_cast<int>(threads <= kWarp ? next_power_of_two(threads)
                                           : ceil_div(threads, kWarp) * kWarp);
}

// Rows side by side in a block of about `block_threads`.
int choose_rows_per_block(int threads_per_row, int block_threads) {
  return std::max(1, block_threads / threads_per_row);
}

// The fields that both directions share, but for the grid.
template <class Plan>
void shape_block(Plan& plan, int64_t chunks, int block_threads, const PlanRequest& request) {
  switch (plan.kernel) {
    case Kernel::kRows:
      plan.threads_per_row = choose_threads(chunks, plan.chunks_per_thread);
      plan.rows_per_block = choose_rows_per_block(plan.threads_per_row, block_threads);
      break;
    case Kernel::kCluster:
      plan.cluster_size = choose_cluster_size(chunks, plan.chunks_per_thread, request);
      plan.threads_per_row =
          choose_threads(ceil_div(chunks, plan.cluster_size), plan.chunks_per_thread);
      // A row's partial results travel between whole warps.
      plan.threads_per_row = std::max(plan.threads_per_row, kWarp);
      break;
    case Kernel::kSplit:
      plan.threads_per_row = kSegmentThreads;
      plan.segments =
          ceil_div(chunks, static_cast<int64_t>(kSegmentThreads) * plan.chunks_per_thread);
      break;
  }
}

void plan_columns(BackwardPlan& plan, int64_t rows, int64_t chunks,
                  const DeviceProperties& device) {
  plan.weight_grads = WeightGrads::kColumns;
  plan.column_threads = static_cast<int>(std::min<int64_t>(kWarp, next_power_of_two(chunks)));
  plan.column_rows = kBackwardBlock / plan.column_threads;
  plan.column_tiles = ceil_div(chunks, plan.column_threads);
  // Enough blocks to fill the device several times over, but slices of a few rows per thread.
  const int64_t wanted = ceil_div(int64_t{8} * device.sm_count, plan.column_tiles);
  const int64_t sensible = ceil_div(rows, int64_t{4} * plan.column_rows);
  plan.partials = std::max<int64_t>(1, std::min(wanted, sensible));
}

}  // namespace

ForwardPlan plan_forward(const ForwardProblem& problem, const DeviceProperties& device,
                         const PlanRequest& request) {
  const int64_t columns = chunk_columns(problem.x_dtype);
  const int64_t chunks = std::max<int64_t>(1, ceil_div(problem.cols, columns));
  ForwardPlan plan;
  plan.kernel = choose_kernel(chunks, kForwardChunks, device, request);
  plan.vectorized = problem.aligned && problem.cols % columns == 0;
  plan.chunks_per_thread = kForwardChunks;
  if (plan.kernel == Kernel::kRows && chunks < int64_t{kWarp} * kForwardChunks) {
    // A warp suffices: as many lanes as there are chunks, then as few chunks as each must hold.
    plan.chunks_per_thread = static_cast<int>(next_power_of_two(ceil_div(chunks, kWarp)));
  }
  shape_block(plan, chunks, kForwardBlock, request);
  plan.blocks = ceil_div(problem.rows, plan.rows_per_block) * plan.segments * plan.cluster_size;
  if (plan.kernel == Kernel::kSplit) {
    // mean, sum of squares and count of each segment
    plan.workspace_bytes =
        3 * size_in_bytes(accumulation_dtype(problem.x_dtype)) * problem.rows * plan.segments;
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
  shape_block(plan, chunks, kBackwardBlock, request);

  // Groups of blocks that work on the same rows together: a block, a cluster, the segments of a
  // row.
  const int64_t groups = ceil_div(problem.rows, plan.rows_per_block);
  const int block_threads = plan.threads_per_row * plan.rows_per_block;
  const int64_t resident_groups =
      std::max<int64_t>(1, int64_t{device.sm_count} *
                               std::max(1, kMaxThreadsPerRow / block_threads) / plan.cluster_size);

  if (problem.weight_grads) {
    const bool can_fuse = problem.dx && plan.kernel != Kernel::kSplit;
    const bool pays = groups >= kMinRowsPerPartial * resident_groups;
    const bool fuse = request.weight_grads ? *request.weight_grads == WeightGrads::kFused : pays;
    if (can_fuse && fuse) {
      plan.weight_grads = WeightGrads::kFused;
      plan.partials = std::max<int64_t>(1, std::min(groups, resident_groups));
    } else {
      plan_columns(plan, problem.rows, chunks, device);
    }
  }
  if (problem.dx) {
    // Persistent blocks keep weight, dw and db in registers from row to row; a segment has no such
    // state.
    const int64_t working = plan.weight_grads == WeightGrads::kFused ? plan.partials
                            : plan.kernel == Kernel::kSplit ? groups
                                                            : std::min(groups, 2 * resident_groups);
    plan.blocks = working * plan.segments * plan.cluster_size;
  }
  if (plan.dx && plan.kernel == Kernel::kSplit) {
    plan.workspace_bytes += 2 * accumulator_bytes * problem.rows * plan.segments;
  }
  plan.workspace_bytes += 2 * accumulator_bytes * plan.partials * problem.cols;
  return plan;
}

}  // namespace fastnorm::cuda
