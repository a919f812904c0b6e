// How a forward runs: its kernel and the shape of that; see plan.h.
#include "plan_forward.h"

#include <algorithm>

namespace fastnorm::cuda {

// The chunks that each lane of a row has in registers: four, or more where that takes a warp less
// of two, three or four. What a warp has to do beside its chunks, alone and with others, is worth
// two or three of them. Of a copy, on an H200, with four chunks and so: bfloat16 1032, 1152, 1280
// columns .79, .85, .91 and .99 each, 1288, 1344 .89, .94 and .98, 1.00, 2056, 2112 .94, .97
// and 1.00, 1.02; float32 516 .85 and .98. Uneven ones of bfloat16, by columns (elements_run) and
// so: 1033, 1151, 1279 .67, .72, .73 and .85, .90, .93, 1317, 1535 .73, .81 and .89, .93, 1653,
// 1791 .80, .86 and .87, .91, 2057, 2305, 2559 .72, .75, .82 and .80, .86, .91; in four warps and
// so 3081, 3329, 3583 .76, .80, .84 and .81, .84, .88. Whole ones of bfloat16 in seven: 1544, 1600
// .92, .94 and .97, .97, 1664, 1792 .98, .99 and 1.00, 1.00, 3088, 3200 .96, .98 and .97, .99, but
// 3584 1.00 and .98. With eight, in one warp or two, they are as fast as with four in two or four.
int register_chunks(int64_t chunks, const ForwardProblem& problem) {
  const auto takes = [chunks](int64_t warps, int64_t chunks_per_lane) {
    return chunks > warps * kWarpSize * (chunks_per_lane - 1) &&
           chunks <= warps * kWarpSize * chunks_per_lane;
  };
  if (takes(1, 5) || takes(2, 5)) return 5;
  if (takes(1, 6)) return 6;
  const bool uneven = is_uneven(problem);
  const bool has_seven = problem.one_dtype && problem.y_as_x && size_in_bytes(problem.x_dtype) == 2;
  const bool leaves_idle = uneven || chunks <= kWarpSize * 13;  // lanes of four warps
  return has_seven && (takes(1, 7) || (takes(2, 7) && leaves_idle)) ? 7 : kRegisterChunks;
}

namespace {

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

// Whether rows may pass a stage in shared memory: those that are not aligned, but of float64, which
// move element by element.
bool may_stage(const ForwardPlan& plan, const ForwardProblem& problem) {
  return !plan.vectorized && problem.x_dtype != DType::kFloat64;
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

// Whether lanes of short rows may have other numbers of chunks than two and four: kernels for that
// are compiled where y has x's dtype.
bool has_any_chunks(const ForwardProblem& problem) {
  return problem.y_as_x && problem.x_dtype != DType::kFloat64 && !is_uneven(problem);
}

// Rows that one warp holds: there are kernels for whole chunks of 16-bit elements that ask for
// weight and bias only when a row's sums are there, with registers for more warps therefore.
bool has_warp_rows(const ForwardProblem& problem, int64_t chunks) {
  return problem.one_dtype && is_vectorized(problem) && size_in_bytes(problem.x_dtype) == 2 &&
         chunks <= kWarpSize * kRegisterChunks;
}

// Whether warps that have `room` for so many chunks want registers for more of them: where lanes
// are left idle, so that a warp has less under way, and rows are many.
bool wants_more_warps(const ForwardProblem& problem, int64_t chunks, int64_t room,
                      const DeviceProperties& device) {
  constexpr int64_t kRows = 16;  // for each multiprocessor
  return 8 * chunks <= 7 * room && problem.rows >= kRows * device.sm_count;
}

// Whether kRows is faster for rows of a warp (1 x 1024 bfloat16 took 1.94 us in a CUDA graph on an
// H200, 1.26 us where all is asked for at once). Of 268 MB, by kShortRows and so: 656 columns 140.8
// and 135.4 us, 712 135.2 and 135.2, 744 134.4 and 135.4, 776 144.7 and 136.2, 840 137.4 and 135.1,
// 904 134.1 and 135.2.
bool warp_rows_are_better(const ForwardProblem& problem, int64_t chunks,
                          const DeviceProperties& device) {
  const int64_t room = ceil_div(chunks, kWarpSize) * kWarpSize;
  const bool takes_a_warp = 2 * chunks > 5 * kWarpSize;  // and not half of one, by kShortRows
  return has_warp_rows(problem, chunks) && takes_a_warp &&
         wants_more_warps(problem, chunks, room, device);
}

// Threads that a row in registers alone may have: what an SM holds two or three blocks of (of
// uneven rows with parameters of another dtype 384). Beyond 512 where 40 registers are enough. Of a
// copy on an H100, in half as many threads or in the ring, and so: bfloat16 16392 columns .93 and
// .98, 24576 .95 and .985, 18001 .88 and .95, 24577 .845 and .94; float32 12288 .955 and .99, 12289
// .885 and .99. Few rows lose up to .05: 512 x 12288 float32 .99 and .94, 300 x 20001 .995 and .96.
int most_row_threads(const ForwardProblem& problem) {
  if (problem.one_dtype) {
    return problem.x_dtype == DType::kFloat64 ? kMaxThreadsPerRow : kMaxRowThreads;
  }
  return is_uneven(problem) ? kMaxUnevenThreads : kMaxThreadsPerRow;
}

// A row in a block: in registers alone where it may be, or in a warp of one, where that is enough.
// The columns behind the last whole chunk take no thread of their own.
void shape_rows(ForwardPlan& plan, const ForwardProblem& problem, int64_t columns) {
  const int64_t chunks = std::max<int64_t>(1, problem.cols / columns);
  const bool in_warp = plan.vectorized && has_warp_rows(problem, chunks);
  const bool three = in_warp && chunks <= 3 * kWarpSize;
  const int in_lane = three ? 3 : register_chunks(chunks, problem);
  const int threads = forward_threads(chunks, in_lane);
  const bool in_registers = threads <= most_row_threads(problem);
  plan.chunks_per_thread = in_registers ? in_lane : kForwardChunks;
  plan.threads_per_row = forward_threads(chunks, plan.chunks_per_thread);
  plan.shared_chunks = forward_shared_chunks(plan.chunks_per_thread, !may_stage(plan, problem));
  const bool by_warp = !plan.vectorized || in_warp || in_lane > kRegisterChunks;
  if (by_warp && plan.threads_per_row == kWarpSize) {
    plan.rows_per_block = kShortRowThreads / kWarpSize;
  }
}

// Whether the ring is better for rows that a block can hold too, if not in registers alone: for
// many of them. Of a copy, on an H200, in blocks of their own and in the ring: bfloat16 4096 x
// 32768 .88 and .93, 512 x 32768 .81 and .90, few rows, of 16392 columns, 300 .97 and .87; float32
// 512 x 16384 .77 and .93; not aligned 244 x 16383 .91 and .82, bfloat16, of 268 MB, 26001 .74 and
// .81, 30001 .725 and .85, 32767 .73 and .80, but few, 813 x 24577, .74 and .68.
//
// Columns behind a row's last whole chunk are in the warp of that chunk, in the ring only if it is
// not full: rows that would be added up in another order are not for it.
bool ring_holds_block_rows(const ForwardProblem& problem, const DeviceProperties& device) {
  constexpr int64_t kRounds = 3, kUnevenRounds = 10;
  const int64_t columns = chunk_columns(problem.x_dtype);
  ForwardPlan rows;
  shape_rows(rows, problem, columns);
  const bool uneven = is_uneven(problem);
  const bool same_order =
      !uneven || problem.cols / columns % (int64_t{kWarpSize} * kForwardChunks) != 0;
  const bool is_fast = problem.x_dtype == DType::kFloat32 || (problem.aligned && !uneven);
  return rows.chunks_per_thread == kForwardChunks && same_order &&
         problem.rows >= (is_fast ? kRounds : kUnevenRounds) * device.sm_count;
}

Kernel choose_forward_kernel(const ForwardProblem& problem, int64_t chunks, bool uneven,
                             const DeviceProperties& device, const PlanRequest& request) {
  if (request.kernel && forward_runs(*request.kernel, chunks, uneven, device)) {
    return *request.kernel;
  }
  const std::optional<RingShape> ring = forward_ring_shape(problem, chunks, device, request);
  if (request.kernel == Kernel::kRing && ring) return Kernel::kRing;
  if (elements_run(problem, device)) return Kernel::kElements;
  if (ring && has_wide_parameters(problem)) return Kernel::kRing;
  const auto runs = [&](Kernel kernel) { return forward_runs(kernel, chunks, uneven, device); };
  if (runs(Kernel::kShortRows)) {
    const bool by_warps = !uneven && warp_rows_are_better(problem, chunks, device);
    return by_warps ? Kernel::kRows : Kernel::kShortRows;
  }
  if (runs(Kernel::kRows)) {
    const bool rings = ring && ring->cluster_size == 1 && ring_holds_block_rows(problem, device);
    return rings ? Kernel::kRing : Kernel::kRows;
  }
  if (ring) return Kernel::kRing;
  return runs(Kernel::kCluster) ? Kernel::kCluster : Kernel::kSplit;
}

// A row in one warp or less. Blocks have about 4 KB of x, in one row or many: the smallest and most
// evenly spread reads that still fill the memory's pipeline. On an H200, 131072 x 1024 bfloat16
// took 133.7 us in blocks of 4 KB, 136.1 us in blocks of 8 KB. With two chunks per lane instead of
// four, accesses to very short rows are less scattered (2097152 x 64: 135 us for 142 us) and rows
// that end within a chunk have more threads at work (526344 x 255: 200 us for 218 us).
//
// Three chunks in each lane where they do: 465277 x 144 bfloat16 reached .85 of a copy on an H200
// with four for each of eight lanes, .91 with three. Five where that takes half of the lanes, for
// fewer of them are idle. Of a copy, 134 MB: bfloat16 144 columns .92 -> .99, 160 .94 -> 1.00, 264
// .85 -> .95, 320 .96 -> .99, 520 .84 -> .97, 640 .96 -> .99; float32 132 .88 -> .93, 260 .86 ->
// .98. In ten lanes 392 and 400 bfloat16 .94 -> .97 and .98. Two chunks are in a lane each: 8388608
// x 16 .84 -> .99.
//
// An odd number of chunks, up to 19, in as few lanes as hold them by fives, but such rows have to
// be gathered (see ShortRowWriter). Of a copy, 268 MB of bfloat16, in more lanes or written by each
// lane for itself, and so: 24 columns .81 and .87, 40 .76 and .95, 56 .92 and .96, 72 .87 and .94,
// 104 .91 and .94, 120 .93 and .99, 136 .82 and .93, 152 .82 and .96; but 88 .92 and .87. (Float32
// has less to do for a chunk; of its rows those of fewer than 13 were left as they are, .87 - .95.)
//
// So it is beside float32 parameters: 264 .82 and .915, 320 .93 and .98, 520 .84 and .955, 136 .84
// and .85; but 392, in ten lanes, .945 and .925. (On an H100 264 .98 and .94, 104 .83 and .98.)
void shape_short_rows(ForwardPlan& plan, const ForwardProblem& problem, int64_t chunks,
                      bool uneven) {
  constexpr int64_t kMostInLane = 5, kMostGathered = 19, kNotGathered = 11;
  const int64_t least_gathered = problem.x_dtype == DType::kFloat32 ? 13 : 3;
  const int64_t chunks_per_lane = chunks <= 8 || (uneven && chunks <= 64) ? 2 : 4;
  const int64_t lanes = next_power_of_two(ceil_div(chunks, chunks_per_lane));
  plan.threads_per_row = static_cast<int>(lanes);
  plan.chunks_per_thread = static_cast<int>(std::min(chunks_per_lane, next_power_of_two(chunks)));
  const bool any_chunks = has_any_chunks(problem);
  const bool three = chunks > 2 * lanes && chunks <= 3 * lanes;
  // (Rows of a warp have a kernel for three whatever the dtypes.)
  if (three && (any_chunks || lanes == kWarpSize)) plan.chunks_per_thread = 3;
  if (any_chunks) {
    const auto take = [&](int64_t lanes_of_row, int64_t chunks_of_lane) {
      plan.threads_per_row = static_cast<int>(lanes_of_row);
      plan.chunks_per_thread = static_cast<int>(chunks_of_lane);
    };
    if (chunks == 2) take(2, 1);
    if (lanes >= 8 && chunks <= lanes / 2 * kMostInLane) take(lanes / 2, kMostInLane);
    if (problem.one_dtype && (chunks == 49 || chunks == 50)) take(10, kMostInLane);
    if (chunks % 2 != 0 && chunks >= least_gathered && chunks <= kMostGathered &&
        chunks != kNotGathered) {
      const int64_t few = next_power_of_two(ceil_div(chunks, kMostInLane));
      take(few, ceil_div(chunks, few));
      plan.gathers = plan.vectorized;
    }
  }
  plan.rows_per_thread = std::max(1, kRegisterChunks / plan.chunks_per_thread);
  plan.rows_per_block =
      kShortRowThreads / kWarpSize * (kWarpSize / plan.threads_per_row) * plan.rows_per_thread;
}

// Whether rows of kShortRows are better copied in bulk: those whose lanes are not all busy, of an
// odd number of chunks. (Of an even one, by forward_short_rows and so, 134 MB: bfloat16 80 columns
// .95 and .97, 144 .98 and .99, 272 .99 and 1.00, but 112 1.005 and .98, 208 .995 and .99, 304
// 1.005 and 1.00.) Fewer of them are not, where much stays in the L2 cache: of 33.5 MB 88 1.02 and
// .995, 200 1.04 and .98, 248 1.065 and 1.015, 328 1.04 and 1.01, 408 1.07 and .965, but in lanes
// of five chunks 264 .94 and .99, of 8 MB 1.02 and 1.11, of 2 MB 1.065 and 1.075. Beside float32
// parameters also 13 and 15 chunks: 104 .845 and .97, 120 .905 and 1.00, so .97 and .99. Ten lanes
// of float32 (196 columns .943 and .94) have no such kernel. On an H100 this is not measured, nor
// done.
bool copies_rows_in_bulk(const ForwardPlan& plan, const ForwardProblem& problem, int64_t chunks,
                         const DeviceProperties& device, const PlanRequest& request) {
  constexpr int kMostInLane = 5, kLeast = 9, kMost = 95;
  constexpr int64_t kMany = 384 << 10, kManyByFives = 48 << 10;  // bytes for each multiprocessor
  if (!can_stream(problem.x_dtype, device) || has_slow_memory(device) || !problem.contiguous ||
      !problem.aligned || !has_any_chunks(problem) || (chunks % 2 == 0 && chunks != 10)) {
    return false;
  }
  const int in_lane = plan.chunks_per_thread;
  if (chunks < kLeast || chunks > kMost || chunks == plan.threads_per_row * in_lane) return false;
  if (in_lane == kRegisterChunks && !has_wide_parameters(problem) && (chunks < 16 || chunks > 53)) {
    return false;
  }
  if (plan.threads_per_row % 4 != 0 && problem.x_dtype == DType::kFloat32) return false;
  const int64_t bytes = problem.rows * problem.cols * size_in_bytes(problem.x_dtype);
  const int64_t many = (in_lane == kMostInLane ? kManyByFives : kMany) * device.sm_count;
  return request.in_bulk.value_or(bytes >= many);
}

void shape_bulk_rows(ForwardPlan& plan, const ForwardProblem& problem) {
  const int lanes = plan.threads_per_row;
  const int size = size_in_bytes(problem.x_dtype);
  plan.in_bulk = true;
  plan.gathers = false;
  plan.rows_per_thread = bulk_rows_of_lane(lanes, plan.chunks_per_thread, size);
  plan.rows_per_block = kBulkRowThreads / kWarpSize * (kWarpSize / lanes) * plan.rows_per_thread;
  plan.shared_bytes = plan.rows_per_block * static_cast<int>(problem.cols) * size;
}

void shape_forward_cluster(ForwardPlan& plan, const ForwardProblem& problem, int64_t chunks,
                           const PlanRequest& request) {
  plan.chunks_per_thread = kForwardChunks;
  plan.cluster_size = choose_cluster_size(chunks, block_chunks(kForwardChunks), request);
  plan.threads_per_row = forward_threads(ceil_div(chunks, plan.cluster_size), kForwardChunks);
  plan.shared_chunks = forward_shared_chunks(kForwardChunks, !may_stage(plan, problem));
}

}  // namespace

ForwardPlan plan_forward(const ForwardProblem& problem, const DeviceProperties& device,
                         const PlanRequest& request) {
  const int64_t columns = chunk_columns(problem.x_dtype);
  const int64_t chunks = std::max<int64_t>(1, ceil_div(problem.cols, columns));
  const bool uneven = is_uneven(problem);
  ForwardPlan plan;
  plan.sm_count = device.sm_count;
  plan.overlap_launches = device.compute_capability >= 90;
  plan.kernel = choose_forward_kernel(problem, chunks, uneven, device, request);
  plan.vectorized = is_vectorized(problem);
  switch (plan.kernel) {
    case Kernel::kShortRows:
      shape_short_rows(plan, problem, chunks, uneven);
      if (copies_rows_in_bulk(plan, problem, chunks, device, request)) {
        shape_bulk_rows(plan, problem);
      }
      break;
    case Kernel::kRows:
      shape_rows(plan, problem, columns);
      plan.more_warps = wants_more_warps(
          problem, chunks, int64_t{plan.threads_per_row} * plan.chunks_per_thread, device);
      break;
    case Kernel::kCluster:
      shape_forward_cluster(plan, problem, chunks, request);
      break;
    case Kernel::kElements:
      shape_forward_elements(plan, problem, device, request);
      return plan;
    case Kernel::kFewRows:
    case Kernel::kFewElements:
      break;
    case Kernel::kRing:
      shape_forward_ring(plan, *forward_ring_shape(problem, chunks, device, request), problem,
                         device, request);
      return plan;
    case Kernel::kSplit:
      plan.chunks_per_thread = kForwardChunks;
      plan.shared_chunks = kForwardChunks - kRegisterChunks;
      shape_segments(plan, chunks);
      break;
  }
  if (plan.kernel == Kernel::kRows || plan.kernel == Kernel::kCluster ||
      plan.kernel == Kernel::kSplit) {
    const bool stages = may_stage(plan, problem) && (plan.shared_chunks > 0 || !problem.y_as_x);
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

}  // namespace fastnorm::cuda
