// What the parts of the forward's plan share: rows by column, the ring, and the others.
#pragma once

#include <optional>

#include "plan_shapes.h"

namespace fastnorm::cuda {

// The most threads of an uneven row whose parameters have another dtype, with kRegisterChunks.
constexpr int kMaxUnevenThreads = 384;

// Shared memory of a block of the forward beside what its plan says.
constexpr int kReductionBytes = 2048;

// Whether rows end within a chunk, and so are never aligned.
inline bool is_uneven(const ForwardProblem& problem) {
  return problem.cols % chunk_columns(problem.x_dtype) != 0;
}

// Whether pairs of 16-bit columns may lie in whole words in every row.
inline bool has_even_columns(const ForwardProblem& problem) {
  return size_in_bytes(problem.x_dtype) == 2 && problem.cols % 2 == 0;
}

// 16-bit rows with float32 parameters.
inline bool has_wide_parameters(const ForwardProblem& problem) {
  return size_in_bytes(problem.x_dtype) == 2 && problem.y_as_x && !problem.one_dtype;
}

// Uneven rows of a 16-bit type are slowed by what they have to execute where memory is fast.
inline bool is_slowed(const ForwardProblem& problem, const DeviceProperties& device) {
  return size_in_bytes(problem.x_dtype) == 2 && is_uneven(problem) &&
         !has_wide_parameters(problem) && !has_slow_memory(device);
}

inline bool is_vectorized(const ForwardProblem& problem) {
  return problem.aligned && !is_uneven(problem);
}

// Whole warps for `chunks` chunks.
inline int forward_threads(int64_t chunks, int chunks_per_thread) {
  return static_cast<int>(ceil_div(chunks, int64_t{kWarpSize} * chunks_per_thread) * kWarpSize);
}

// The chunks that each lane of a row has in registers.
int register_chunks(int64_t chunks, const ForwardProblem& problem);

// Whether rows that end within a chunk are taken by column (kElements).
bool elements_run(const ForwardProblem& problem, const DeviceProperties& device);

// The block, or the cluster or grid of blocks, that holds a row of so many chunks in the ring; none
// where rows cannot be streamed so.
std::optional<RingShape> forward_ring_shape(const ForwardProblem& problem, int64_t chunks,
                                            const DeviceProperties& device,
                                            const PlanRequest& request);

// Make a plan of either.
void shape_forward_elements(ForwardPlan& plan, const ForwardProblem& problem,
                            const DeviceProperties& device, const PlanRequest& request);
void shape_forward_ring(ForwardPlan& plan, const RingShape& shape, const ForwardProblem& problem,
                        const DeviceProperties& device, const PlanRequest& request);

}  // namespace fastnorm::cuda
