// What the plans of forward and backward share: sizes in chunks, clusters and grids that hold long
// rows, and the lanes of very short ones.
#pragma once

#include "plan.h"

namespace fastnorm::cuda {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Of blocks that stay, or clusters of them: so many rows of each, or fewer.
constexpr int64_t kFewTurns = 8;

inline int64_t chunk_columns(DType x_dtype) { return kChunkBytes / size_in_bytes(x_dtype); }

// The most chunks of a row that one block holds.
int64_t block_chunks(int chunks_per_thread);

// Shared memory that a block can have on a device. Of those that are not known, the least of the
// newer ones.
int shared_bytes_of(const DeviceProperties& device);

// The smallest cluster that holds the row, where a block holds `block_chunks`; a larger one on
// request.
int choose_cluster_size(int64_t chunks, int64_t block_chunks, const PlanRequest& request);

// A block for each segment of a row.
template <class Plan>
void shape_segments(Plan& plan, int64_t chunks) {
  plan.threads_per_row = kSegmentThreads;
  plan.segments = ceil_div(chunks, static_cast<int64_t>(kSegmentThreads) * plan.chunks_per_thread);
}

// How the ring holds a row: by `threads` of each block of a cluster, or of a group of blocks of a
// grid that runs as a whole, which then holds `grid_rows` at once.
struct RingShape {
  int threads = 0;
  int cluster_size = 1;
  int grid_rows = 0;
  int lane_chunks = 0;  // of each lane, in the backward
  int run_columns = 0;  // of a warp, in the backward; see BackwardPlan
};

// Whether rows can be streamed through shared memory; those of x's dtype in the ring, or by column.
bool can_stream(const DeviceProperties& device);
bool can_stream(DType x_dtype, const DeviceProperties& device);

// Whether memory gives a multiprocessor little: 25 GB/s on an H100, 36 on an H200. Then streams are
// to ask for less at once.
inline bool has_slow_memory(const DeviceProperties& device) {
  constexpr int kSlow = 31;
  return device.memory_bandwidth > 0 && device.memory_bandwidth < kSlow * device.sm_count;
}

// Of all multiprocessors, those on which clusters of `size` blocks find a place, `blocks` of them
// on a multiprocessor; and how many of them run side by side. More would wait for the end of
// others, and take twice the time.
double cluster_fit(int size, int64_t blocks);
int resident_clusters(int size, int64_t blocks, const DeviceProperties& device);

bool asks_for_grid(const PlanRequest& request);

// Rows of `threads` threads that no cluster holds, in a grid that runs as a whole; none where that
// does not run.
std::optional<RingShape> grid_shape(int64_t threads, int64_t rather_threads, int64_t most_threads,
                                    bool on_all, const DeviceProperties& device,
                                    const PlanRequest& request);

// Memory by way of which the blocks of such a grid exchange their sums.
inline int64_t grid_exchange_bytes(int64_t blocks) {
  constexpr int64_t kWordBytes = 16;
  return blocks * kGridExchanges * kWordBytes;
}

}  // namespace fastnorm::cuda
