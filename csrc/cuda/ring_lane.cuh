// A lane of the backward's ring: which kernel it is in, which columns of which rows are its own,
// where they lie in shared memory, and how they and the rows' statistics get there.
#pragma once

#include "backward_parameters.cuh"
#include "ring_stage.cuh"

namespace fastnorm::cuda {

// What an instantiation of backward_ring is for, and what follows from that.
template <class T, class TOfDy, RingSpan kRingSpan, bool kIsVectorized, bool kIsCached,
          int kLaneChunks, bool kHasWholeWarps, bool kHasTail>
struct RingKind {
  using X = T;
  using DY = TOfDy;
  using Parameters = RingParameters<X, DY>;
  static constexpr RingSpan kSpan = kRingSpan;
  static constexpr bool kVectorized = kIsVectorized;
  static constexpr bool kCached = kIsCached;
  static constexpr int kChunks = kLaneChunks;
  static constexpr bool kWholeWarps = kHasWholeWarps;
  static constexpr bool kTail = kHasTail;

  static constexpr bool kShort = kSpan == RingSpan::kWarp;
  static constexpr bool kCluster = kSpan == RingSpan::kCluster;
  static constexpr bool kGrid = kSpan == RingSpan::kGrid;
  static constexpr int kColumns = kChunkColumns<X>;
  static constexpr int kWarpColumns = kWarpSize * kChunks * kColumns;
  static constexpr int kSize = static_cast<int>(sizeof(X));
  static constexpr int kDySize = static_cast<int>(sizeof(DY));
  static constexpr int kDyParts = kDySize / kSize;  // granules of dy for a chunk of x
  static constexpr bool kWideDy = kDyParts > 1;
  // Lanes read what others have copied.
  static constexpr bool kShares = kWideDy || !kVectorized;

  static constexpr int kStages = kRingStages<X, kSpan, DY>;
  static constexpr int kAhead = kRingAhead<X, kSpan>;
  // Those that are filled before the first row's sums: with all of them 32768 x 4096 bfloat16 took
  // 196.3 us on an H200, 65536 x 3072 302.5 us; 195.9 and 300.6 us so.
  static constexpr int kFirstStages = kShort ? kStages : kAhead + 1;
  static constexpr unsigned kXBytes =
      kRingGranules<X, kSpan, kVectorized, kChunks, X, kTail> * kChunkBytes;
  static constexpr unsigned kDyBytes =
      kRingGranules<X, kSpan, kVectorized, kChunks, DY, kTail> * kChunkBytes;
  static constexpr unsigned kStageBytes = kXBytes + kDyBytes;
  static constexpr unsigned kWarpBytes = kStages * kStageBytes;

  // Which lane it is, and how long its warp's run, ptxas would work out anew wherever it is needed,
  // from threadIdx.x, for which it waits. What does not follow from that stays in registers: of
  // rows that are not aligned 4096 x 50257 bfloat16 took 448 us so on an H200, 422 us since, 8192 x
  // 16385 258 us and 238 us. (Of float32 that spills.)
  static constexpr bool kStays = kIs16Bit<X> && !kVectorized && !kShort;
  // Where a run begins would be kept in registers beside the places that a lane advances from row
  // to row: of rows that are not aligned 2048 x 100001 bfloat16 took 443 us so on an H200, 431 us
  // since, 300000 x 200 float32 216 us and 209 us. (Of float32 in a block that spills, by dy or dx:
  // 16384 x 4096, one element off, 201 us and 226 us.)
  static constexpr bool kDetachesX = !kVectorized;
  static constexpr bool kDetaches =
      !kVectorized && !(std::is_same_v<X, float> && kSpan == RingSpan::kBlock);
  // Aligned float32 rows in a grid are faster if ptxas does not know that warps are whole: 100 x
  // 600000 227 us on an H200 so, 234 us. (For those of a block see backward_ring.)
  static constexpr bool kAsksForWarps = !kWholeWarps || (kGrid && kVectorized && !kIs16Bit<X>);
};

// Who owns what. Lane `lane` of a team owns the chunks lane, lane + lanes, ... of its run, which
// begins at column `begin` of the row and has `run` columns.
template <class Kind>
struct RingPlace {
  int warp;          // of the block
  int lanes, teams;  // of a team, and teams of the warp
  int team, lane;
  bool idle;            // between two teams or behind the last: as if its rows were beyond the last
  int group, row_warp;  // of warps that hold a row in this block, and the warp of those
  int cluster_size, rank;  // blocks that hold a row, and the block of those
  int begin, run;
  int behind;            // columns behind the run, one to a lane
  int behind_from_here;  // of those, this lane's and the next ones'
  int64_t unit;          // the first that its group works on (see RingParameters)
  // Rows of this team: `first`, first + stride, ...; `count` of them, beyond the last row perhaps.
  int count;
  int64_t first, stride;
  // The run of the first one.
  const char* x;
  const char* dy;

  __device__ __forceinline__ explicit RingPlace(const typename Kind::Parameters& p) {
    constexpr bool kShort = Kind::kShort, kSpansBlocks = Kind::kGrid || Kind::kCluster;
    warp = Kind::kAsksForWarps ? threadIdx.x / kWarpSize : warp_index();
    lanes = kShort ? p.lanes : kWarpSize;
    teams = kShort ? p.teams : 1;
    team = kShort ? p.by_pitch.quotient(threadIdx.x % kWarpSize) : 0;
    lane = kShort         ? threadIdx.x % kWarpSize - team * p.pitch
           : Kind::kStays ? lane_index()
                          : threadIdx.x % kWarpSize;
    idle = kShort && (lane >= lanes || team >= teams);
    // (Of rows that are not aligned the register of a reciprocal makes float32 spill: 16384 x 4096,
    // one element off, 201 us on an H200 so, 252 us with 12 bytes of spills.)
    group = kShort              ? warp
            : kSpansBlocks      ? 0
            : Kind::kVectorized ? p.by_warps.quotient(warp)
                                : warp / p.warps;
    row_warp = kShort ? 0 : warp - group * p.warps;
    cluster_size = kSpansBlocks ? p.cluster_size : 1;
    const int cluster = kSpansBlocks ? p.by_cluster_size.quotient(blockIdx.x) : blockIdx.x;
    rank = static_cast<int>(blockIdx.x) - cluster * cluster_size;
    const int run_columns = Kind::kTail ? p.run_columns : Kind::kWarpColumns;
    begin = (rank * p.warps * (kShort ? 0 : 1) + row_warp) * run_columns;
    const int left = static_cast<int>(p.cols) - begin;
    run = min(left, lanes * Kind::kChunks * Kind::kColumns);
    behind = Kind::kTail ? min(left, run_columns) - run : 0;
    behind_from_here = behind - lane;
    if constexpr (Kind::kStays) asm volatile("" : "+r"(run));
    if constexpr (Kind::kTail) asm volatile("" : "+r"(behind_from_here));
    unit = static_cast<int64_t>(cluster) * p.groups + group;
    count = p.full_turns + (unit < p.last_turn ? 1 : 0);
    first = idle ? p.rows : unit * teams + team;
    stride = p.unit_stride * teams;
    x = reinterpret_cast<const char*>(p.x + first * p.x_row_stride + begin);
    dy = reinterpret_cast<const char*>(p.dy + first * p.dy_row_stride + begin);
  }

  __device__ __forceinline__ bool has_tail() const { return behind_from_here > 0; }

  // The first column of this lane's chunk k, of the run.
  __device__ __forceinline__ int column(int k) const { return (lane + k * lanes) * Kind::kColumns; }
  // Columns from there on, unclamped (see Share::left).
  __device__ __forceinline__ int left(int k) const { return run - column(k); }
};

// Where a lane's granules lie in shared memory.
template <class Kind>
struct RingSlots {
  unsigned ring, end;   // this lane's place in the first stage, and behind the last one
  unsigned chunk_step;  // from one of its chunks to the next
  // From its place in a stage to what it copies of dy, and to its chunks.
  unsigned dy_copies, dy_place;
  unsigned dy_copy_step, dy_chunk_step;

  __device__ __forceinline__ RingSlots(const RingPlace<Kind>& at, const void* memory) {
    constexpr bool kVectorized = Kind::kVectorized, kWideDy = Kind::kWideDy;
    constexpr int kDyParts = Kind::kDyParts;
    // Idle ones read what the last of their team does, and write nothing.
    const int place = Kind::kShort && Kind::kShares ? min(at.lane, at.lanes - 1) : at.lane;
    const int x_granule =
        kVectorized ? threadIdx.x % kWarpSize : at.team * (at.lanes * Kind::kChunks + 1) + place;
    ring = keep(shared_address(memory) + at.warp * Kind::kWarpBytes + x_granule * kChunkBytes);
    end = ring + Kind::kStages * Kind::kStageBytes;
    chunk_step = (kVectorized ? kWarpSize : at.lanes) * kChunkBytes;
    const int dy_granule =
        kWideDy ? at.team * (at.lanes * Kind::kChunks * kDyParts + (kVectorized ? 0 : 1)) + place
                : x_granule;
    dy_copies = Kind::kXBytes + (dy_granule - x_granule) * kChunkBytes;
    dy_place = dy_copies + (kDyParts - 1) * place * kChunkBytes;
    dy_copy_step = kWideDy ? at.lanes * kChunkBytes : chunk_step;
    dy_chunk_step = kDyParts * dy_copy_step;
  }

  __device__ __forceinline__ unsigned stage(int s) const { return ring + s * Kind::kStageBytes; }

  __device__ __forceinline__ unsigned next(unsigned slot) const {
    slot += Kind::kStageBytes;
    if (slot == end) slot = ring;
    asm volatile("" : "+r"(slot));  // or ptxas would work it out again and again
    return slot;
  }

  __device__ __forceinline__ auto load_x(unsigned slot, int k) const {
    return load_shared_pack<typename Kind::X, Kind::kColumns>(slot + k * chunk_step);
  }
  __device__ __forceinline__ auto load_dy(unsigned slot, int k) const {
    return load_shared_pack<typename Kind::DY, Kind::kColumns>(slot + dy_place + k * dy_chunk_step);
  }

  // Zeros for chunks that do not exist, which are never copied.
  __device__ __forceinline__ void clear_missing(const RingPlace<Kind>& at) const {
#pragma unroll
    for (int k = 0; k < Kind::kChunks; ++k) {
      if (at.left(k) <= 0 && !(Kind::kShares && at.idle)) {
        for (int s = 0; s < Kind::kStages; ++s) {
          store_shared(stage(s) + k * chunk_step, Granule());
#pragma unroll
          for (int g = 0; g < Kind::kDyParts; ++g) {
            store_shared(stage(s) + dy_place + k * dy_chunk_step + g * kChunkBytes, Granule());
          }
        }
      }
    }
  }
};

// Copies rows into the ring, one after the other.
template <class Kind>
class RingCopies {
 public:
  using Parameters = typename Kind::Parameters;

  __device__ __forceinline__ RingCopies(const Parameters& p, const RingPlace<Kind>& at,
                                        const RingSlots<Kind>& slots)
      : p_(p), at_(at), slots_(slots) {
    x_ = detach<Kind::kDetachesX>(at.x + at.lane * kChunkBytes);
    dy_ = detach<Kind::kDetaches>(at.dy + at.lane * kChunkBytes);
    left_ = Kind::kShares && at.idle ? 0 : at.count;
    row_ = at.first;
    // A team that has another row to come does not reach the end of the tensor.
    const bool apart = min(p.x_step, p.dy_step) >= 2 * kChunkBytes;
    careful_ = apart ? (Kind::kShort ? 2 : 1) : at.count;
    x_granules_ = at.run > 0 ? (at.run + at.behind + Kind::kColumns - 1) / Kind::kColumns + 1 : 0;
    dy_granules_ = at.run > 0 ? (at.run * Kind::kDySize + kChunkBytes - 1) / kChunkBytes + 1 : 0;
  }

  // The next row's, into the stage whose place of this lane is `slot`.
  __device__ __forceinline__ void copy_row(unsigned slot) {
    if (left_ > 0) {
      if (Kind::kShort && row_ >= p_.rows) {
        clear(slot);
      } else if constexpr (Kind::kVectorized) {
        copy_chunks(slot);
      } else {
        copy_run(slot);
      }
      x_ += p_.x_step;
      dy_ += p_.dy_step;
      row_ += at_.stride;
      --left_;
    }
    commit_copies();
  }

 private:
  const Parameters& p_;
  const RingPlace<Kind>& at_;
  const RingSlots<Kind>& slots_;
  // This lane's first granule of the next row, as far into a granule as the run is.
  const char* x_;
  const char* dy_;
  int left_;  // rows to come
  int64_t row_;
  int careful_;                   // rows to the end, of which one may reach the tensors' ends
  int x_granules_, dy_granules_;  // of a run, and the one that it may reach into

  __device__ __forceinline__ void clear(unsigned slot) const {
    constexpr int kMore = Kind::kVectorized ? 0 : 1, kDyChunks = Kind::kChunks * Kind::kDyParts;
#pragma unroll
    for (int k = 0; k < Kind::kChunks + kMore; ++k) {
      if (k < Kind::kChunks || at_.lane == 0) {
        store_shared(slot + k * slots_.chunk_step, Granule());
      }
    }
#pragma unroll
    for (int k = 0; k < kDyChunks + kMore; ++k) {
      if (k < kDyChunks || at_.lane == 0) {
        store_shared(slot + slots_.dy_copies + k * slots_.dy_copy_step, Granule());
      }
    }
  }

  __device__ __forceinline__ void copy_chunks(unsigned slot) const {
#pragma unroll
    for (int k = 0; k < Kind::kChunks; ++k) {
      if (at_.left(k) > 0) {
        copy_granule<Kind::kCached>(slot + k * slots_.chunk_step, x_ + k * at_.lanes * kChunkBytes);
      }
    }
#pragma unroll
    for (int k = 0; k < Kind::kChunks * Kind::kDyParts; ++k) {
      const bool exists =
          Kind::kWideDy ? at_.column(k) < at_.run * Kind::kDyParts : at_.left(k) > 0;
      if (exists) {
        copy_granule<Kind::kCached>(slot + slots_.dy_copies + k * slots_.dy_copy_step,
                                    dy_ + k * at_.lanes * kChunkBytes);
      }
    }
  }

  __device__ __forceinline__ void copy_run(unsigned slot) const {
    constexpr int kChunks = Kind::kChunks, kDyChunks = kChunks * Kind::kDyParts;
    const unsigned dy_slot = slot + slots_.dy_copies;
    if (left_ > careful_) {
      copy_granules<kChunks>(slot, slots_.chunk_step, x_, x_granules_, at_.lane, at_.lanes);
      copy_granules<kDyChunks>(dy_slot, slots_.dy_copy_step, dy_,
                               Kind::kWideDy ? dy_granules_ : x_granules_, at_.lane, at_.lanes);
    } else {
      constexpr int kMore = Kind::kTail ? 1 : 0;
      const int columns = at_.run + at_.behind;
      copy_last_granules<Kind::kSize, kChunks + kMore>(slot, slots_.chunk_step, x_, p_.x_end,
                                                       columns * Kind::kSize, at_.lane, at_.lanes);
      copy_last_granules<Kind::kDySize, kDyChunks + kMore>(dy_slot, slots_.dy_copy_step, dy_,
                                                           p_.dy_end, columns * Kind::kDySize,
                                                           at_.lane, at_.lanes);
    }
  }
};

// Asks for mean and rstd of the rows, one after the other.
template <class Kind>
class RingStatistics {
 public:
  __device__ __forceinline__ RingStatistics(const typename Kind::Parameters& p,
                                            const RingPlace<Kind>& at)
      : p_(p),
        stride_(at.stride),
        mean_(p.mean + as_of_a_lane(at.first)),
        rstd_(p.rstd + as_of_a_lane(at.first)),
        row_(at.first),
        left_(at.count) {}

  // Those of the next row.
  __device__ __forceinline__ void load(float& mean, float& rstd) {
    mean = rstd = 0;
    if (left_ > 0 && (!Kind::kShort || row_ < p_.rows)) {
      mean = __ldg(mean_);
      rstd = __ldg(rstd_);
    }
    mean_ += stride_;
    rstd_ += stride_;
    row_ += stride_;
    --left_;
  }

 private:
  const typename Kind::Parameters& p_;
  int64_t stride_;
  const float* mean_;
  const float* rstd_;
  int64_t row_;
  int left_;
};

}  // namespace fastnorm::cuda
