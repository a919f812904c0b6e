// What the backward's kernels that stream rows, or take few of them one by one, are launched with.
// They are compiled in files of their own.
#pragma once

#include "launch.cuh"

namespace fastnorm::cuda {

// A divisor that the host knows. To divide by it takes two instructions, and not 20 to 30, one
// after the other: dx alone of 768 columns, a row in each warp, had 150 of these before its first
// load.
struct Divisor {
  static constexpr unsigned kMost = 65536;
  unsigned reciprocal = 0;
  Divisor() = default;
  explicit Divisor(int divisor) : reciprocal(kMost / static_cast<unsigned>(divisor) + 1) {}
  // Of a number that is, times the divisor, less than kMost.
  __device__ __forceinline__ int quotient(unsigned number) const {
    return static_cast<int>(number * reciprocal / kMost);
  }
};

// By turns: whose it is. (By a division in the kernel, 24 instructions that wait for each other,
// which took 8 percent of the time of 2048 x 65537 bfloat16 on an H200.)
struct Turns {
  unsigned takers = 1, reciprocal = 0;
  Turns() = default;
  explicit Turns(int number)
      : takers(static_cast<unsigned>(number)), reciprocal((1u << 31) / takers + 1) {}
  // Of a turn that is, times their number, less than 2^31.
  __device__ __forceinline__ int taker(int turn) const {
    const unsigned round = __umulhi(2 * static_cast<unsigned>(turn), reciprocal);
    return turn - static_cast<int>(round * takers);
  }
};

template <class X, class DY = X>
struct RingParameters {
  int64_t rows, cols;
  float inverse_cols;
  const X* x;
  const X* x_end;  // of the last row
  int64_t x_row_stride;
  const DY* dy;
  const DY* dy_end;
  int64_t dy_row_stride;
  const float* mean;
  const float* rstd;
  const void* weight;
  DType weight_dtype;
  X* dx;
  float* dw_partials;  // [partials, cols] or null
  float* db_partials;
  int lanes;  // of a row, kWarp
  int teams;  // of lanes in a warp, each with a row
  int pitch;  // lanes from one team to the next
  int warps;  // of a row and block, else
  Divisor by_pitch, by_warps, by_cluster_size;
  int groups;       // of warps in the block, each with rows of its own; warps, for kWarp
  int run_columns;  // see BackwardPlan
  // A unit is what a group works on at once: a row, or in kWarp one for each team of lanes. In each
  // turn all groups of the grid take one, in the last turn only so many.
  int64_t unit_stride;
  int64_t x_step, dy_step, dx_step;  // bytes from a team's row to its next one
  int full_turns, last_turn;
  int cluster_size;  // kCluster, kGrid: blocks of a row
  uint4* exchange;   // kGrid: [rows at once][kGridExchanges][blocks of a row]
  int merged;        // but for kGrid: see BackwardPlan
  // kElements: steps of 2 * kWarpSize columns that the warps of a row have, those from
  // first_longer_warp on one more.
  int warp_steps, first_longer_warp;
  // kGrid: rows of partial sums that a group of blocks leaves, one after so many turns.
  int shares, share_turns;
  bool brakes;  // see BackwardPlan
  int most_ahead;
  Turns relays;  // of a block's warps
};

template <class X>
struct FewRowsParameters {
  int64_t rows, cols;
  float inverse_cols;
  const X* x;
  int64_t x_row_stride;
  const X* dy;
  int64_t dy_row_stride;
  const float* mean;
  const float* rstd;
  const void* weight;
  X* dx;
  void* dw;  // or null
  void* db;
  DType weight_dtype, dw_dtype, db_dtype;
  int lanes;  // of a row, kWarp
  int teams;  // of lanes in a warp, each with a row
  int pitch;  // lanes from one team to the next
  int warps;  // of a row and block, else
  Divisor by_pitch, by_warps;
  int block_rows;         // rows of a block
  int run_columns;        // see BackwardPlan
  int cluster_size;       // blocks of a row
  int slices;             // blocks of a tile of columns
  int tile_lanes;         // chunks of a row in a tile
  int column_blocks;      // the first ones of the grid
  int clusters_of_tiles;  // of these; or blocks, where there are no clusters
  int64_t slice_rows;     // of a tile, for each of its blocks
};

// Of backward_ring.cuh: rows that stream through shared memory.
template <bool kVectorized, class X, class DY>
cudaError_t launch_ring(const RingParameters<X, DY>& p, const BackwardPlan& plan,
                        cudaStream_t stream);

// How many clusters of the ring's blocks the current device runs side by side, by one instantiation
// for all.
cudaError_t count_clusters(DeviceProperties& properties);

// Of few_rows.cuh: few of them.
template <class X>
cudaError_t launch_few_rows(const FewRowsParameters<X>& p, const BackwardPlan& plan,
                            cudaStream_t stream);

// Of backward_elements.cuh: many and few that end within a chunk. `tiles`: of columns, if the plan
// has any.
template <class X>
cudaError_t launch_backward_elements(const RingParameters<X>& p, const FewRowsParameters<X>& tiles,
                                     const BackwardPlan& plan, cudaStream_t stream);

// Of backward_wide.cuh: wide ones of them.
template <class X>
cudaError_t launch_backward_wide(const RingParameters<X>& p, const BackwardPlan& plan,
                                 cudaStream_t stream);

}  // namespace fastnorm::cuda
