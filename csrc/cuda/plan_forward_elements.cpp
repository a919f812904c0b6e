// How a forward runs whose rows end within a chunk and are taken by column; see plan_forward.h.
#include <algorithm>

#include "plan_forward.h"

namespace fastnorm::cuda {
namespace {

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
void shape_lanes(ForwardPlan& plan, const ForwardProblem& problem, const DeviceProperties& device) {
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

}  // namespace

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
  shape_lanes(plan, problem, device);
  if (!by_bulk && chunks_fill_warps(problem) && !pairs_fill_warps(problem, plan)) return false;
  return plan.shared_bytes + kReductionBytes <= shared_bytes_of(device);
}

void shape_forward_elements(ForwardPlan& plan, const ForwardProblem& problem,
                            const DeviceProperties& device, const PlanRequest& request) {
  if (streams_wide_rows(problem, device)) {
    shape_wide_stream(plan, problem, device, request);
    return;
  }
  if (const int warps = wide_warps(problem, device); warps > 0) {
    shape_wide_elements(plan, problem, warps);
  } else {
    shape_lanes(plan, problem, device);
    plan.in_bulk = copies_in_bulk(plan, problem, device, request);
    if (plan.in_bulk && plan.threads_per_row > kWarpSize) {
      plan.shared_bytes = bulk_tensor_bytes(plan.rows_per_block, problem.cols);
    }
  }
  plan.blocks = ceil_div(problem.rows, plan.rows_per_block);
}

}  // namespace fastnorm::cuda
