// Sizes that the plans of both directions take; see plan_shapes.h.
#include "plan_shapes.h"

#include <algorithm>

namespace fastnorm::cuda {

int64_t block_chunks(int chunks_per_thread) {
  return static_cast<int64_t>(kMaxThreadsPerRow) * chunks_per_thread;
}

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

int choose_cluster_size(int64_t chunks, int64_t block_chunks, const PlanRequest& request) {
  int64_t size = next_power_of_two(ceil_div(chunks, block_chunks));
  size = std::max<int64_t>(size, 2);
  if (request.cluster_size && *request.cluster_size >= size &&
      *request.cluster_size <= kMaxClusterSize) {
    size = next_power_of_two(*request.cluster_size);
  }
  return static_cast<int>(size);
}

bool can_stream(const DeviceProperties& device) {
  constexpr int kRingBytes = 227 * 1024;
  return device.compute_capability >= 90 && shared_bytes_of(device) >= kRingBytes;
}

bool can_stream(DType x_dtype, const DeviceProperties& device) {
  return can_stream(device) && x_dtype != DType::kFloat64;
}

double cluster_fit(int size, int64_t blocks) {
  // With a block on each and with several. (GPCs of an H200 have 14 to 18.)
  constexpr double kFit[2][kMaxClusterSize] = {{1, 1, 0.89, 0.91, 0.83, 0.77, 0.80, 0.91},
                                               {1, 1, 0.90, 0.94, 0.89, 0.89, 0.85, 0.91}};
  return kFit[blocks > 1][size - 1];
}

int resident_clusters(int size, int64_t blocks, const DeviceProperties& device) {
  const int known = blocks <= kMostResident ? device.clusters[size - 1][blocks - 1] : 0;
  if (known > 0) return known;
  const auto all = static_cast<double>(device.sm_count * blocks) * cluster_fit(size, blocks);
  return std::max(1, static_cast<int>(all / size));
}

bool asks_for_grid(const PlanRequest& request) {
  return request.cluster_size && *request.cluster_size > kLargeClusterSize;
}

// Rows of `threads` threads that no cluster holds, in a grid that runs as a whole: as many rows at
// once as there are multiprocessors for, with even shares, by blocks of up to `rather_threads`
// where those hold a row, else of up to `most_threads`. What blocks tell each other costs the same
// for a small share: 512 x 262144 float32 backward took 500 us on an H200 by three times 40 blocks,
// 444 us by four times 32.
//
// `on_all`: on all multiprocessors where rows are shared by more blocks than hold them; else on all
// but some, as in shape_ring. Of a copy on an H200, on 120 and on 132, 192 x 1000000 bfloat16 .865
// and .885, of an elementwise sum 1024 x 262144 .79 and .835, 447 x 300001 .64 and .66; but 64 x
// 1000000 float32 .73 on 123, .65 on 131.
std::optional<RingShape> grid_shape(int64_t threads, int64_t rather_threads, int64_t most_threads,
                                    bool on_all, const DeviceProperties& device,
                                    const PlanRequest& request) {
  const int64_t all = device.whole_grids ? std::min(kMaxGridBlocks, device.sm_count) : 0;
  const int64_t block_threads = threads > all * rather_threads ? most_threads : rather_threads;
  int64_t least = ceil_div(threads, block_threads);
  if (asks_for_grid(request)) least = std::max<int64_t>(least, *request.cluster_size);
  if (least > all) return std::nullopt;
  const int64_t rows = all / least;
  const int64_t used = on_all && !has_slow_memory(device) ? all : all - all / 11;
  const int64_t size = std::max(least, used / rows);
  const int64_t each = ceil_div(ceil_div(threads, size), kWarpSize) * kWarpSize;
  return RingShape{static_cast<int>(each), static_cast<int>(size), static_cast<int>(rows)};
}

}  // namespace fastnorm::cuda
