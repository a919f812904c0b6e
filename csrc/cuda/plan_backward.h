// The backward's plans of many rows, which stream through shared memory: in chunks (kRing) or by
// column (kElements).
#pragma once

#include <optional>

#include "plan_shapes.h"

namespace fastnorm::cuda {

inline bool has_one_dtype(const BackwardProblem& problem) {
  return problem.dy_dtype == problem.x_dtype;
}

inline bool ends_within_a_chunk(const BackwardProblem& problem) {
  return problem.cols % chunk_columns(problem.x_dtype) != 0;
}

// Of 16-bit rows that end within a chunk: the most warps of a block, columns of a chunk, and those
// that a warp holds in chunks.
constexpr int64_t kRowWarps = kMaxThreadsPerRow / kWarpSize;
constexpr int64_t kUnevenChunk = kChunkBytes / 2;
constexpr int64_t kUnevenColumns = kWarpSize * backward_chunks(DType::kBFloat16) * kUnevenChunk;

constexpr int kFewMultiprocessors = 16;  // nothing was measured on a device with fewer

inline int64_t bytes_of(const BackwardProblem& problem) {
  return problem.rows * problem.cols * size_in_bytes(problem.x_dtype);
}

// How kElements holds a row that ends within a chunk: as the ring, but with single columns. Warps
// are as many as share those of a multiprocessor well, and have 5 to 8 pairs of columns per lane.
struct ElementShape {
  RingShape ring;
  int columns = 0;   // of a lane, at most
  int together = 1;  // rows of a block, or blocks of clusters on a multiprocessor
  bool is_wide = false;
};

// The block or the cluster or grid of blocks that holds a row in chunks; none where rows cannot be
// streamed so.
std::optional<RingShape> ring_shape(const BackwardProblem& problem, const DeviceProperties& device,
                                    const PlanRequest& request);

// The same by column.
std::optional<ElementShape> element_shape(const BackwardProblem& problem,
                                          const DeviceProperties& device,
                                          const PlanRequest& request);

// The same of wide 16-bit rows, which come in bulk one by one.
std::optional<ElementShape> wide_shape(const BackwardProblem& problem,
                                       const DeviceProperties& device);

// Chunks of a thread of a row so held.
inline int ring_chunks(const RingShape& shape, const BackwardProblem& problem) {
  return shape.lane_chunks > 0 ? shape.lane_chunks : backward_chunks(problem.x_dtype);
}

// Whether rows that end within a chunk are better off in the ring than by column.
bool ring_holds_uneven_rows(const BackwardProblem& problem, const DeviceProperties& device);

// Make a plan of such a shape; they return how many blocks there are to be.
int64_t shape_ring(BackwardPlan& plan, const RingShape& shape, const BackwardProblem& problem,
                   const DeviceProperties& device, const PlanRequest& request);
int64_t shape_elements(BackwardPlan& plan, const ElementShape& shape,
                       const BackwardProblem& problem, const DeviceProperties& device,
                       const PlanRequest& request);

// Of `blocks` that leave rows of partial sums, so many have to merge theirs, in a cluster.
int least_merged(int64_t blocks, const BackwardProblem& problem);

// Clusters that run side by side and hold rows.
int64_t streaming_clusters(int size, int64_t together, const BackwardProblem& problem,
                           const DeviceProperties& device);

// Of `groups`, blocks or clusters of them that hold rows, so many merge their partial sums.
int choose_merged(int64_t groups, int cluster_size, const BackwardProblem& problem,
                  const DeviceProperties& device, const PlanRequest& request);

}  // namespace fastnorm::cuda
