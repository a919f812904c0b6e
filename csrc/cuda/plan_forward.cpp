// How a forward runs: its kernel and the shape of that; see plan.h.
#include <algorithm>

#include "plan_shapes.h"

namespace fastnorm::cuda {
namespace {

// The most threads of an uneven row whose parameters have another dtype, with kRegisterChunks.
constexpr int kMaxUnevenThreads = 384;

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

// Whether rows end within a chunk, and so are never aligned.
bool is_uneven(const ForwardProblem& problem) {
  return problem.cols % chunk_columns(problem.x_dtype) != 0;
}

// Whether pairs of 16-bit columns may lie in whole words in every row.
bool has_even_columns(const ForwardProblem& problem) {
  return size_in_bytes(problem.x_dtype) == 2 && problem.cols % 2 == 0;
}

// 16-bit rows with float32 parameters.
bool has_wide_parameters(const ForwardProblem& problem) {
  return size_in_bytes(problem.x_dtype) == 2 && problem.y_as_x && !problem.one_dtype;
}

// Uneven rows of a 16-bit type are slowed by what they have to execute where memory is fast.
bool is_slowed(const ForwardProblem& problem, const DeviceProperties& device) {
  return size_in_bytes(problem.x_dtype) == 2 && is_uneven(problem) &&
         !has_wide_parameters(problem) && !has_slow_memory(device);
}

bool is_vectorized(const ForwardProblem& problem) { return problem.aligned && !is_uneven(problem); }

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

// Wide uneven rows whose pairs of columns the forward takes from shared memory: 16-bit ones with
// parameters of either dtype, float32 ones. On an H100 this is not measured, nor done.
bool are_wide_rows(const ForwardProblem& problem, const DeviceProperties& device) {
  return can_stream(problem.x_dtype, device) && !has_slow_memory(device) && is_uneven(problem) &&
         problem.y_as_x && (size_in_bytes(problem.x_dtype) == 2 || problem.one_dtype);
}

// Steps of kWarpSize pairs of columns.
int64_t pair_steps(const ForwardProblem& problem) {
  return ceil_div(problem.cols, int64_t{2} * kWarpSize);
}

// The warps of such a row that a block holds; none of wider rows.
//
// Of a 16-bit type the fewest with which the blocks that find a place leave the L1 cache room for
// weight and bias (forward_wide.cuh has the figures), and one more if those are seven or less: of a
// copy on an H200, 268 MB of bfloat16, by the fewest and so 6501 columns .985 and .997, 8801 .97
// and .977, 10001 .974 and .984, 11501 .96 and .98, 12289 .977 and .985, beside float32 parameters
// 8191 .967 and .988, 9001 .957 and .984; but 13501 (nine) .98 and .96, 14001 (nine) .984 and .966.
//
// Of float32 as many as have ten steps each, of two rows at a time in registers and so, 134 MB:
// 1286 columns .92 and 1.00, 1471 .93 and 1.00, 2063 .94 and 1.00, 2887 .92 and 1.00; of chunks
// realigned in registers and so: 7063 .96 and .99, 9187 .885 and .99, 10249 .88 and .98. Nine or
// ten steps are the best, with seven 1286 columns reach .995, 2063 1.00, 6501 .95, with 14 2063
// .985, 6501 .975.
int wide_warps(const ForwardProblem& problem, const DeviceProperties& device) {
  constexpr int kLeast = 4, kMost = 13, kMore = 7;
  constexpr int kResident = 51;                    // warps of 40 registers
  constexpr int kOfBlock = 1312, kGrain = 128;     // bytes of a block beside the row, and of all
  constexpr int kUnified = 256;                    // KB of L1 cache and shared memory
  constexpr int kShares[] = {100, 132, 164, 196};  // of them, for shared memory (or 228)
  constexpr int kOthers = 8;                       // of the cache, for all but weight and bias
  constexpr int kFloatSteps = 10;
  const int element_bytes = size_in_bytes(problem.x_dtype);
  if (!are_wide_rows(problem, device) || problem.cols < least_wide_columns(element_bytes) ||
      problem.cols > most_wide_columns(element_bytes)) {
    return 0;
  }
  const int64_t steps = pair_steps(problem);
  if (problem.x_dtype == DType::kFloat32) {
    return static_cast<int>(
        std::min<int64_t>(ceil_div(steps, kFloatSteps), kMaxThreadsPerRow / kWarpSize));
  }
  const int64_t parameters = problem.cols * (problem.one_dtype ? 4 : 8);
  const int64_t row =
      ceil_div(wide_row_bytes(problem.cols, element_bytes) + kOfBlock, kGrain) * kGrain;
  for (int warps = kLeast; warps <= kMost; ++warps) {
    if (steps > int64_t{warps} * kMostWideSteps) continue;
    const int64_t bytes = kResident / warps * row;
    for (const int share : kShares) {
      if (bytes <= share << 10 && parameters <= (kUnified - share - kOthers) << 10) {
        return warps <= kMore ? warps + 1 : warps;
      }
    }
  }
  return 0;
}

// Whether rows are wider than those, and held by blocks that stay, or clusters of them.
bool streams_wide_rows(const ForwardProblem& problem, const DeviceProperties& device) {
  const int element_bytes = size_in_bytes(problem.x_dtype);
  return are_wide_rows(problem, device) && problem.cols >= least_stream_columns(element_bytes) &&
         problem.cols <= most_stream_columns(element_bytes) && wide_warps(problem, device) == 0;
}

// By one block, two, four or eight, the fewest that hold the row. Of a copy on an H200, bfloat16:
// 32767 columns by two .925, by three .91, by four .825, 50257 by three .92, four .93, five .86,
// 65537 by four .93, five .92, seven .745, 98001 by five .905, six .91, eight .935. Stages: by two
// 24577 (25 KB) in six .96, in eight .95, 40001 (41 KB) in four .94, in five .935; by more 65537
// (34 KB) in four .915, in six .945, 131071 (38 KB) in four .865, in five .95.
//
// Of float32, 134 and 268 MB: 12289 by one .955, by two .945, 22531 by two .947, by four .937, but
// 45101 by four .93, by eight .955, 50257 .93 and .95. Stages: by two 13001 (28 KB) in five .935,
// in seven .93, 20001 (42 KB) in four .927, in five .94; by four 28001 (28 KB) in six .93, in seven
// .925; by eight 45101 (25 KB) in six .955, in eight .94, 80001 (42 KB) in four .83, in five .94.
//
// They are kept together (see Pace), where each has many rows: without and so 20001 columns, by one
// block, .915 and .96, 24577 .91 and .945, 40001 .915 and .94, 65537 .905 and .945, 131071 .925 and
// .955. With a turn ahead, or a half more, or pauses of two or three turns' time it is the same to
// a percent; with two turns ahead half of it is lost.
void shape_wide_stream(ForwardPlan& plan, const ForwardProblem& problem,
                       const DeviceProperties& device, const PlanRequest& request) {
  constexpr int kFewBytes = 170 << 10, kBytes = 210 << 10;
  constexpr int kFloatPairs = 15;  // of four blocks
  constexpr int kFewFloatPairs = 13;
  const bool is_float = problem.x_dtype == DType::kFloat32;
  const int element_bytes = size_in_bytes(problem.x_dtype);
  const auto pairs = [&] {
    return ceil_div(pair_steps(problem), plan.cluster_size * kWideRowWarps);
  };
  const auto most = [&] {
    return is_float && plan.cluster_size == 4 ? kFloatPairs : most_stream_pairs(element_bytes);
  };
  for (plan.cluster_size = 1; pairs() > most();) plan.cluster_size *= 2;
  plan.threads_per_row = kWideRowWarps * kWarpSize;
  plan.columns_per_thread = static_cast<int>(2 * pairs());
  const int stage =
      kWideRowWarps * kWarpSize * plan.columns_per_thread * element_bytes + kSectorBytes;
  const bool few = is_float ? pairs() <= kFewFloatPairs : plan.cluster_size <= 2;
  plan.bulk_stages = std::min((few ? kFewBytes : kBytes) / stage, kMostBulkStages);
  plan.in_bulk = true;
  plan.shared_bytes = plan.bulk_stages * stage;
  // An odd number of them, too, though a block's rows of an odd number of columns then begin at
  // whole words in turns: 1500 x 98001 bfloat16 162.9 us on an H200 by 14 of eight blocks, 155.3
  // by 15.
  int64_t clusters = std::max(1, resident_clusters(plan.cluster_size, 1, device));
  if (request.blocks) {
    clusters = std::clamp<int64_t>(*request.blocks / plan.cluster_size, 1, clusters);
  }
  clusters = std::min(clusters, problem.rows);
  plan.blocks = clusters * plan.cluster_size;
  if (problem.rows > kFewTurns * clusters) {
    plan.most_ahead = static_cast<int>(clusters + clusters / 4);
  }
}

void shape_wide_elements(ForwardPlan& plan, const ForwardProblem& problem, int warps) {
  plan.threads_per_row = warps * kWarpSize;
  plan.columns_per_thread = static_cast<int>(ceil_div(pair_steps(problem), warps) * 2);
  plan.in_bulk = true;
  plan.shared_bytes = wide_row_bytes(problem.cols, size_in_bytes(problem.x_dtype));
}

// No more lanes than hold the row, of eight on, or whole warps; and no more columns in each than
// there are, but for four. In eight lanes of float32 not 32 columns each: of a copy on an H200, by
// those and by 16 lanes, 134 MB: 241 columns .89 and .99, 255 .90
// and .99.
void shape_elements(ForwardPlan& plan, const ForwardProblem& problem,
                    const DeviceProperties& device) {
  constexpr int64_t kGrain = 4, kMostShortFloats = 28;
  const int element_bytes = size_in_bytes(problem.x_dtype);
  if (is_tiny_forward(problem.cols, element_bytes)) {
    const TinyShape shape = tiny_shape(problem.cols, element_bytes);
    plan.threads_per_row = shape.lanes;
    plan.columns_per_thread = shape.columns;
    plan.rows_per_thread = tiny_forward_rows(shape.columns, element_bytes);
    plan.rows_per_block = plan.rows_per_thread * kElementRowThreads / shape.lanes;
    // One after the other if there are many.
    constexpr int kBlocks = 32;  // for each multiprocessor
    const int64_t tiles = problem.rows / plan.rows_per_block / (kBlocks * device.sm_count);
    const int most = tiny_forward_tiles(shape.lanes, shape.columns, element_bytes);
    plan.rows_per_block *= static_cast<int>(std::clamp<int64_t>(tiles, 1, most));
    return;
  }
  plan.rows_per_thread = plan.rows_per_block = kElementRows;
  int64_t lanes = ceil_div(problem.cols, kMostElementColumns);
  if (element_bytes == 4 && problem.cols <= kLeastElementLanes * kMostElementColumns) {
    lanes = ceil_div(problem.cols, kMostShortFloats);
  }
  plan.threads_per_row = static_cast<int>(
      lanes > kWarpSize ? ceil_div(lanes, kWarpSize) * kWarpSize
                        : std::max<int64_t>(kLeastElementLanes, next_power_of_two(lanes)));
  plan.columns_per_thread =
      static_cast<int>(ceil_div(problem.cols, kGrain * plan.threads_per_row) * kGrain);
  if (plan.threads_per_row > kWarpSize) {
    plan.shared_bytes = plan.threads_per_row / kWarpSize *
                        element_stage_bytes(plan.columns_per_thread, kElementRows, element_bytes);
  } else {
    plan.rows_per_block *= kElementRowThreads / plan.threads_per_row;
  }
}

// Whether x and y of a block are copied as a whole: 16-bit rows of up to six warps that lie one
// behind the other, and are many. 200 x 250 bfloat16 took 5.8 us on an H200, 6.2 us in bulk. In
// eight warps, rows in chunks and so: 8190 columns of bfloat16 .96 of a copy and .905, 8191 .96 and
// .905.
bool copies_in_bulk(const ForwardPlan& plan, const ForwardProblem& problem,
                    const DeviceProperties& device, const PlanRequest& request) {
  constexpr int64_t kRows = 16;                                        // for each multiprocessor
  const int most_warps = has_slow_memory(device) ? 1 : kMaxBulkWarps;  // of those not measured
  return can_stream(problem.x_dtype, device) && problem.contiguous &&
         size_in_bytes(problem.x_dtype) == 2 && !is_tiny_forward(problem.cols, 2) &&
         plan.threads_per_row <= most_warps * kWarpSize &&
         request.in_bulk.value_or(problem.rows >= kRows * device.sm_count);
}

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

// Whether whole chunks leave few lanes of their warps idle: rows that are not aligned, but
// realigned in registers, are faster then than by columns. Of a copy, on an H200, in chunks and by
// columns: bfloat16 901 columns .85 and .86, 937 .87 and .87, 1023 .92 and .88, 1025 .93 and .68,
// 2601 .84 and .82; float32 385 .92 and .96, 449 .97 and .93, 521 .94 and .91, 767 .99 and .91, 865
// .95 and .97, 897 .97 and .94, 1351 .95 and .97, 1501 .99 and .98, 1701 .95 and .99, 1801 .98 and
// .96; bfloat16 with float32 parameters 1023 .72 and .82, 1801 .76 and .78, 2049 .84 and .75, 4095
// .78 and .75, 12289 .66 and .51.
bool chunks_fill_warps(const ForwardProblem& problem) {
  const bool even = has_even_columns(problem);
  const int64_t chunks = problem.cols / chunk_columns(problem.x_dtype);
  const int64_t warps = ceil_div(chunks, int64_t{kWarpSize} * kRegisterChunks);
  const double busy =
      static_cast<double>(chunks) / static_cast<double>(warps * kWarpSize * kRegisterChunks);
  if (!problem.one_dtype) {  // even ones: 1026 .70 and .84, 2050 .86 and .91, 4094 .81 and .85
    return warps > (even ? 4 : 1) && warps * kWarpSize <= kMaxUnevenThreads && busy >= 0.92;
  }
  if (size_in_bytes(problem.x_dtype) == 2) {
    const bool in_pairs = even && problem.cols <= kWarpSize * kMostElementColumns;
    return warps > 1 || (busy >= 0.91 && !in_pairs);
  }
  if (warps == 2 && register_chunks(chunks, problem) > kRegisterChunks) return true;
  return busy >= (warps == 1 || warps == 2 || warps == 4 ? 0.86 : 0.97);
}

// Whether pairs of columns are faster all the same, which move as such where rows have an even
// number of them: where few lanes of a few warps are left idle, and registers leave room for many.
// Of a copy, on an H200, in chunks and so: bfloat16 1250 .93 and .94, 1500 .93 and .95, 1750 .87
// and .93, 2100 .78 and .935, 2300 .83 and .96, 2500 .87 and .95, 3500 .88 and .94; but, with more
// idle, 1026 .95 and .83, 1100 .88 and .87, 2050 .94 and .93, and with 32 columns in a lane 2700
// .90 and .86, 3002 .95 and .89, 4094 .95 and .90.
bool pairs_fill_warps(const ForwardProblem& problem, const ForwardPlan& plan) {
  return problem.one_dtype && has_even_columns(problem) &&
         plan.columns_per_thread <= kMostPairedColumns &&
         10 * problem.cols >= int64_t{9} * plan.threads_per_row * plan.columns_per_thread;
}

// Whole warps for `chunks` chunks.
int forward_threads(int64_t chunks, int chunks_per_thread) {
  return static_cast<int>(ceil_div(chunks, int64_t{kWarpSize} * chunks_per_thread) * kWarpSize);
}

// Whether 16-bit rows of a few warps are faster by column because many of them are copied in bulk:
// with parameters of the same type, but for those whose chunks leave hardly a lane idle, or few of
// one warp. Of a copy on an H200, in chunks or pairs of columns and so: bfloat16 1101 .905 and .95,
// 1317 .89 and .99, 1502 .875 and .99, 1601 .85 and .98, 1802 .925 and .99, 2201 .835 and 1.00,
// 2302 .85 and 1.00, 2601 .93 and 1.00, 2801 .95 and .985, 3301 .895 and 1.00, 3601 .935 and .985,
// 5001 .965 and .99, 5501 .94 and .985; but 1025 .96 and .91, 4095 .99 and .985, 6002 .975 and .93.
// With float32 parameters 1102 .86 and .98, 1317 .80 and .99, 2301 .815 and .99, 2601 .775
// and 1.00, 3302 .895 and .985. On an H100 this is not measured, nor done.
bool bulk_fills_warps(const ForwardProblem& problem, const DeviceProperties& device) {
  constexpr int64_t kLeast = 1031, kMost = 5632;
  const bool wide = has_wide_parameters(problem);
  if (!can_stream(problem.x_dtype, device) || has_slow_memory(device) || problem.cols <= kLeast ||
      problem.cols > kMost || !(wide || is_slowed(problem, device))) {
    return false;
  }
  const int64_t chunks = ceil_div(problem.cols, chunk_columns(problem.x_dtype));
  const int64_t room = forward_threads(chunks, kRegisterChunks) * int64_t{kRegisterChunks};
  return wide || 1000 * chunks < 985 * room;
}

// Where few warps share a row, that is; with parameters of another dtype, of which chunks would
// take many registers, all of a block.
bool elements_run(const ForwardProblem& problem, const DeviceProperties& device) {
  if (wide_warps(problem, device) > 0 || streams_wide_rows(problem, device)) return true;
  const bool uneven = is_uneven(problem);
  const bool by_bulk = bulk_fills_warps(problem, device);
  const int most_threads = by_bulk                     ? kMaxBulkWarps * kWarpSize
                           : !problem.one_dtype        ? kMaxThreadsPerRow
                           : has_even_columns(problem) ? kMaxPairedWarps * kWarpSize
                                                       : 3 * kWarpSize;
  // Of a copy, on an H200, in chunks and by column: float32 5 columns .93 and .96, 9 .78 and .97,
  // 10 .83 and .96, 13 .93 and .95, 17 .71 and .96, 25 .89 and .99, 31 .97 and .98.
  const bool two_chunks = problem.cols <= kMostTinyColumns &&
                          !is_tiny_forward(problem.cols, size_in_bytes(problem.x_dtype));
  if (!uneven || problem.x_dtype == DType::kFloat64 || !problem.y_as_x || two_chunks ||
      problem.cols > most_threads * kMostElementColumns) {
    return false;
  }
  ForwardPlan plan;
  shape_elements(plan, problem, device);
  if (!by_bulk && chunks_fill_warps(problem) && !pairs_fill_warps(problem, plan)) return false;
  return plan.shared_bytes + kReductionBytes <= shared_bytes_of(device);
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

// The blocks that hold a row of `chunks` of which a block holds `most`, in the ring.
//
// Uneven rows are held by three or five blocks where those are not too large. Of a copy, by four or
// eight and so: bfloat16 65537 columns .61 and .71 on an H200, .84 and .87 on an H100, 80001 .69
// and .77, .89 and .89, 90001 .73 and .75, .88 and .90, 140001 .66 and .73, .91 and .91; but 98001,
// by 512 threads, .76 and .73 on an H200; float32 32769 .80 and .92, .91 and .91, but 44001, by
// 480, .86 and .86, .96 and .92, 80001 .87 and .78. Aligned ones are not (80000 of bfloat16 on an
// H100 .94 and .92). Those with float32 parameters are in as few as hold them: 49152 by three .92,
// by four .85, 65536 by four .91, by five .81, 98304 by five .91, by six .825; beyond eight in a
// grid: 190000 by 13 times ten .90, by seven clusters of 16 .81.
int forward_ring_size(const ForwardProblem& problem, int64_t chunks, int64_t most,
                      const PlanRequest& request) {
  if (chunks <= most && request.cluster_size.value_or(1) <= 1) return 1;
  if (chunks > most * kMaxClusterSize) return kLargeClusterSize;
  const bool is_16_bit = size_in_bytes(problem.x_dtype) == 2;
  const int64_t least = ceil_div(chunks, most);
  const bool may_be_odd = least == 3 || (least == 5 && is_16_bit);
  const int most_threads = is_16_bit ? 480 : 416;
  const bool uneven_odd = is_uneven(problem) && may_be_odd &&
                          forward_threads(ceil_div(chunks, least), kForwardChunks) <= most_threads;
  if (!request.cluster_size && (has_wide_parameters(problem) || uneven_odd)) {
    return static_cast<int>(least);
  }
  return choose_cluster_size(chunks, most, request);
}

// How many rows ahead moments are posted in a grid. Not only instructions slow rows that are not
// aligned: of 2048 x 65537 bfloat16 they take 46 percent of the issue slots, and warps wait for a
// row's moments for 14 percent of the time. Two rows ahead, by blocks of up to 11 warps, whose four
// stages leave the L1 cache 60 KB for what is under way, 65537 .766 and .781 of a copy on an H200,
// 447 x 300001 .78 and .83. (13 warps, which leave it 28 KB, .69, ten .78, nine .74; three rows
// ahead in ten warps, 28 KB as well, 200 x 600001 .65. In clusters, two rows ahead, 50257 .80 and
// .66, in a block 26001 .76 and .61.)
int rows_ahead(const RingShape& shape, const ForwardProblem& problem) {
  if (shape.grid_rows == 0) return 1;
  if (has_wide_parameters(problem)) return kGridAhead;
  if (size_in_bytes(problem.x_dtype) == 2 && !is_vectorized(problem)) {
    return shape.threads <= kTwoAheadThreads ? 2 : 1;
  }
  return shape.threads <= kAheadThreads ? kGridAhead : 1;
}

// The ring holds rows as kRows and kCluster do, and those that they cannot hold by more blocks;
// none where rows cannot be streamed so.
//
// In a grid aligned rows and those of float32 have blocks whose ring has room for three more. Of a
// copy on an H200, by blocks of up to 512 threads, of which the first warp exchanged moments, and
// so: 192 x 1000000 bfloat16 .76 and .885 (480 threads, one row more .83, 384, two rows .81),
// float32 64 x 1000000 .78 and .885, 64 x 1000001 .63 and .81; but 200 x 600001 bfloat16 .73 and
// .65.
//
// Uneven rows of a 16-bit type are slowed by instructions where memory is fast, and rather in many
// warps on all multiprocessors: in a grid instead of a cluster of 16 blocks, of which seven run,
// 447 x 300001 .64 and, by 13 times ten blocks, .78, but on an H100 .91 and .86. (200001 columns by
// eight .77, in a grid by seven .74.)
std::optional<RingShape> forward_ring_shape(const ForwardProblem& problem, int64_t chunks,
                                            const DeviceProperties& device,
                                            const PlanRequest& request) {
  const bool wide = has_wide_parameters(problem);
  if (!problem.one_dtype && !wide) return std::nullopt;
  if (!can_stream(problem.x_dtype, device)) return std::nullopt;
  if (wide && chunks <= block_chunks(kRegisterChunks)) return std::nullopt;
  const int in_thread = wide ? kWideRingChunks : kForwardChunks;
  const int64_t most = wide ? int64_t{kMaxWideThreads} * in_thread : block_chunks(in_thread);
  const bool large = device.large_clusters > 0;
  const bool held = chunks <= most * (large ? kLargeClusterSize : kMaxClusterSize);
  const bool by_memory = size_in_bytes(problem.x_dtype) == 4 || !is_uneven(problem);
  const bool slowed = is_slowed(problem, device);
  const bool rather_grid = (slowed || wide) && !request.cluster_size;
  if (asks_for_grid(request) || !held || (rather_grid && chunks > most * kMaxClusterSize)) {
    constexpr int kWideThreads = kMaxWideThreads - kWarpSize;
    const int most_threads = wide ? kWideThreads : kMaxGridThreads;
    const int threads = wide        ? kWideThreads
                        : by_memory ? kAheadThreads
                        : slowed    ? kTwoAheadThreads
                                    : kMaxGridThreads;
    const auto grid =
        grid_shape(ceil_div(chunks, in_thread), threads, most_threads, true, device, request);
    if (grid || !held) return grid;
  }
  const int size = forward_ring_size(problem, chunks, most, request);
  return RingShape{forward_threads(ceil_div(chunks, size), in_thread), size};
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
  plan.shared_chunks = forward_shared_chunks(plan.chunks_per_thread, plan.vectorized);
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
// doubles the time. (2048 x 131072: .92 with 27 clusters of four, .93 with 28, .945 with 29 and 30,
// .64 with 33; 2048 x 262144 .94 with 14 of eight, .96 with 15; but float32 2048 x 131072 .96 and
// .94.)
//
// On an H100, whose memory is slower, blocks and pairs are on all multiprocessors: 4096 x 32768
// bfloat16 .94 of a copy with 131, .95 with 132, x 65536 .935 with 65 pairs, .965 with 66. Clusters
// of four are on seven tenths of them: 1024 x 131072 .92 with 28, .956 with 23, 1340 x 100000 .89
// and .94, 2048 x 65536 float32 .94 and .97. And with float32 parameters 65536 by 29 fours .92, by
// 23 .945, 110000 by 17 sixes .88, by 15 .965, 131072 by 15 sevens .925, by 13 .94; but 98304 by 22
// fives .94, by 19 .915, 57344 by 38 threes .92, by 31 .84.
//
// Where 16-bit rows are not aligned instructions set the pace, and clusters are as many as find a
// place: on an H100 131071 columns .755 with 23, .85 with 30, in eights 262143 .81 with 14, .83
// with 15, on an H200, with 28 and 30 fours, 131071 .70 and .74, with 65 and 66 pairs 33001 .64 and
// .65, 50257 .82 and .83. So it is with float32 in large blocks: on an H100 65535 columns .85 and
// .92, 57001 .90 and .925, on an H200 .785 and .82, .84 and .87, in eights 131071 .76 and .80; but
// on an H100 53001 .915 and .91, 44001 .94 and .92, on an H200 .86 and .74. And with float32
// parameters on an H200: 49152 by 38 threes .90, by 39 .92, 65536 by 29 fours .90, by 30 .915.
int64_t forward_ring_teams(const RingShape& shape, const ForwardProblem& problem,
                           const DeviceProperties& device) {
  const int sms = device.sm_count;
  if (shape.grid_rows > 0) return shape.grid_rows;
  const bool slow = has_slow_memory(device);
  if (shape.cluster_size == 1) return slow ? sms : (sms - 1) | 1;
  if (shape.cluster_size == kLargeClusterSize) return device.large_clusters;
  const int fit = resident_clusters(shape.cluster_size, 1, device);
  constexpr int kManyThreads = 416;
  const bool is_16_bit = size_in_bytes(problem.x_dtype) == 2;
  const bool many = is_16_bit || shape.threads > kManyThreads;
  if (!is_vectorized(problem) && many) return fit;
  if (has_wide_parameters(problem) && !slow && shape.cluster_size > 2) return fit;
  if (!slow && is_16_bit && shape.cluster_size >= 4) return (fit - 1) | 1;
  const int size = shape.cluster_size;
  const bool seven_tenths = size == 4 || size == 6 || size == 7;
  const int used = size == 2 ? (slow ? sms : sms - 2) : seven_tenths ? sms * 7 / 10 : sms - sms / 7;
  return std::max(1, used / size);
}

// Whether a block has a warp more that only exchanges moments, if there is room for it: in a grid,
// and in a cluster where instructions set the pace. Of a copy on an H200, without and so: bfloat16
// 65537 columns .685 and .74, 50257 .79 and .815, 98001 .72 and .78, 140001 .70 and .73, in one
// block 22001 .79 and .82, but 30001, of 15 warps, .84 and .82; float32 80001 .87 and .915, 44001
// .75 and .78, but 32769, in threes, .89 and .86, in one block 8201 .935 and .91; aligned ones gain
// nothing (bfloat16 24576 .91 and .905, float32 12288 .935 and .94). On an H100 bfloat16 loses (.87
// and .85, .90 and .89, .87 and .87, .90 and .87, .89 and .88).
bool has_forward_exchange_warp(const RingShape& shape, const ForwardProblem& problem,
                               const DeviceProperties& device, const PlanRequest& request) {
  if (shape.grid_rows > 0) return true;
  const int most_threads = has_wide_parameters(problem) ? kMaxWideThreads : kMaxThreadsPerRow;
  if (shape.threads + kWarpSize > most_threads || is_vectorized(problem)) return false;
  if (request.exchange_warp) return *request.exchange_warp;
  if (!is_uneven(problem) || has_slow_memory(device)) return false;
  constexpr int kMostAlone = 448, kLeastFloats = 4;
  return size_in_bytes(problem.x_dtype) == 2 ? shape.cluster_size > 1 || shape.threads <= kMostAlone
                                             : shape.cluster_size >= kLeastFloats;
}

// Whether blocks of the ring, or clusters of them, are kept together (see Pace): aligned rows, of
// up to three blocks, that are many for each. Of a copy on an H200, without and so: bfloat16 25000
// columns .88 and .94, 28672 .90 and .935, 32768 .92 and .945, 40960 .895 and .94, 65536 .935 and
// .965, float32 16384 .955 and .965, 32768 .94 and .965, beside float32 parameters 18432 .925 and
// .95, 40960 .925 and .955, 49152, in threes, .905 and .92. But larger clusters, on fewer
// multiprocessors, drift less, and know each other's progress too late: 131072 .905 and .89, 262144
// .95 and .93. Rows that are not aligned wait for instructions (50257 .80 and .79), and of a few
// rows each the pace takes more than it gives (512 x 32768 .87 and .83).
bool keep_together(const ForwardPlan& plan, int64_t turns, const DeviceProperties& device) {
  constexpr int kMostBlocks = 3;
  return plan.vectorized && !plan.in_grid && plan.cluster_size <= kMostBlocks &&
         turns > kFewTurns && !has_slow_memory(device);
}

void shape_forward_ring(ForwardPlan& plan, const RingShape& shape, const ForwardProblem& problem,
                        const DeviceProperties& device, const PlanRequest& request) {
  plan.kernel = Kernel::kRing;
  const bool wide = has_wide_parameters(problem);
  plan.chunks_per_thread = wide ? kWideRingChunks : kForwardChunks;
  plan.cluster_size = shape.cluster_size;
  plan.threads_per_row = shape.threads;
  plan.in_grid = shape.grid_rows > 0;
  plan.exchange_warp = has_forward_exchange_warp(shape, problem, device, request);
  plan.rows_ahead = rows_ahead(shape, problem);
  // Few rows are shared evenly, and those of blocks that are kept together. Of others, clusters
  // would rather be an odd number: with 64 instead of 65 they read rows a power of two apart, and
  // 4096 x 65536 reached .915.
  int64_t teams = forward_ring_teams(shape, problem, device);
  if (request.blocks && !plan.in_grid) {
    teams = std::clamp<int64_t>(*request.blocks / plan.cluster_size, 1, teams);
  }
  const int64_t turns = ceil_div(problem.rows, teams);
  const bool paced = keep_together(plan, turns, device);
  if (turns <= kFewTurns || paced) teams = ceil_div(problem.rows, turns);
  plan.blocks = teams * plan.cluster_size;
  if (paced) {
    // A row each, for what a block knows of the others is as old, and more: beyond a row and 0, 1,
    // 2 and 3 MB (pauses of 4000, 4000, 8000 and 12000 cycles for a row, each the best that was
    // tried) 32768 columns .948, .941, .947 and .947, 40960 .895, .918, .919 and .940, 32768 beside
    // float32 parameters .86, .895, .91 and .92. (To wait for the others instead, beyond a row and
    // 4 MB, was as good.)
    constexpr int64_t kMoreBytes = 3 << 20;
    plan.most_ahead =
        static_cast<int>(teams + kMoreBytes / (problem.cols * size_in_bytes(problem.x_dtype)));
  }
  if (shape.grid_rows > 0) {
    plan.workspace_bytes = grid_exchange_bytes(plan.blocks);
  }
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
      shape_forward_cluster(plan, chunks, request);
      break;
    case Kernel::kElements:
      if (streams_wide_rows(problem, device)) {
        shape_wide_stream(plan, problem, device, request);
        return plan;
      }
      if (const int warps = wide_warps(problem, device); warps > 0) {
        shape_wide_elements(plan, problem, warps);
        break;
      }
      shape_elements(plan, problem, device);
      plan.in_bulk = copies_in_bulk(plan, problem, device, request);
      if (plan.in_bulk && plan.threads_per_row > kWarpSize) {
        plan.shared_bytes = bulk_tensor_bytes(plan.rows_per_block, problem.cols);
      }
      break;
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

}  // namespace fastnorm::cuda
