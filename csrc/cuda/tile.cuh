// A thread's share of a row: which columns it owns, and a tile of registers that holds them.
#pragma once

#include "numeric.cuh"
#include "realign.cuh"
#include "shift.cuh"
#include "stage.cuh"

namespace fastnorm::cuda {

// The columns of one thread: chunks `first`, first + step, ... of a chunk of X each, within `cols`.
// Ownership goes by column index, whatever the row's alignment, so that a row is always summed in
// the same order. kVectorized: chunks exist whole or not at all and move by wide accesses. It is a
// template parameter because a branch at each access keeps the loads from being in flight together:
// without it 16384 x 4096 bfloat16 took 186 us on an H200, with it 115 us.
template <class X, bool kVectorized>
struct Share {
  static constexpr int kColumns = kChunkColumns<X>;
  static constexpr bool kWhole = kVectorized;

  int first;  // first chunk
  int step;   // chunks between two of this thread's
  int cols;   // columns of the row, or of the piece of it that this block has

  __device__ __forceinline__ int column(int k) const { return (first + k * step) * kColumns; }

  // How many columns the row has from chunk k on: kColumns or more if the chunk is whole, none or
  // less if it does not exist. Not clamped to [0, kColumns]: nvcc 13.0 computes such a clamp for
  // sm_90 in one instruction (VIMNMX.RELU) and then takes `clamped > 0` for `clamped == kColumns`.
  __device__ __forceinline__ int left(int k) const { return cols - column(k); }

  // Whether one of the first kChunks chunks exists in part: the row's last one, in one thread. What
  // that takes is kept out of the way of all others by one branch for all chunks together.
  template <int kChunks>
  __device__ __forceinline__ bool has_partial_chunk() const {
    bool partial = false;
    if constexpr (!kVectorized) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) partial |= left(k) > 0 && left(k) < kColumns;
    }
    return partial;
  }
};

// The elements of a share, packed in their own dtype, to be unpacked where they are used.
template <class T, int kChunks, int kColumns>
struct Tile {
  Pack<T, kColumns> chunks[kChunks];

  // Reads the share from `row`; columns that do not exist are zero. A null row is all zeros.
  template <class RowShare>
  __device__ __forceinline__ void load(const T* row, const RowShare& share) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      chunks[k] = load_pack<RowShare::kWhole, T, kColumns>(row + share.column(k),
                                                           row == nullptr ? 0 : share.left(k));
    }
  }

  // The same of whole chunks; of one that does not exist, whatever is in some registers.
  template <class RowShare>
  __device__ __forceinline__ void load_plain(const T* row, const RowShare& share, bool exists) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      chunks[k] = load_pack_if<T, kColumns>(row + share.column(k), exists && share.left(k) > 0);
    }
  }

  // The same for rows that have whole warps; `end` is the end of the tensor's memory.
  template <class RowShare>
  __device__ __forceinline__ void load_by_warps(const T* row, const RowShare& share, const T* end) {
    if constexpr (RowShare::kWhole || kColumns * sizeof(T) != kChunkBytes) {
      load(row, share);
    } else if (row == nullptr) {
      load(row, share);
    } else {
      load_shifted<kChunks>(chunks, row, share, end);
    }
  }

  template <class A>
  __device__ __forceinline__ A get(int k, int i) const {
    return chunks[k].template get<A>(i);
  }
};

// Writes rows, or pieces of them, that have whole warps. Where they are not aligned, threads shift
// their chunks together with their neighbours' into the granules of device memory, or, if a chunk
// of T does not fill one, warps gather theirs in shared memory. All threads of the block come here.
template <class T, int kChunks, int kColumns, bool kVectorized>
struct RowWriter {
  static constexpr int kMaxWarps = kMaxThreadsPerRow / kWarpSize;
  static constexpr bool kFillsGranule = kColumns * sizeof(T) == kChunkBytes;
  using Stage = WarpStage<T, kWarpSize * kColumns>;

  struct alignas(16) LastLanes {
    Granule chunks[kMaxWarps][kChunks];
  };
  struct Stages {
    typename Stage::Buffer buffers[kMaxWarps];
  };
  struct Unused {};
  using Storage =
      std::conditional_t<kVectorized, Unused, std::conditional_t<kFillsGranule, LastLanes, Stages>>;
  Storage& storage;

  // chunk(k) is this thread's chunk k. An inactive row is not written.
  template <class RowShare, class Chunk>
  __device__ __forceinline__ void write(T* row, bool active, const RowShare& share,
                                        const Chunk& chunk) const {
    if constexpr (kVectorized) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        if (active && share.left(k) > 0) store_wide(row + share.column(k), chunk(k));
      }
    } else if constexpr (kFillsGranule) {
      write_granules(row, active, share, chunk);
    } else {
      const int lane = threadIdx.x % kWarpSize;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int begin = share.column(k) - lane * kColumns;  // of the warp's span
        Stage stage(storage.buffers[warp_of_block()], row + begin);
        stage.put(lane * kColumns, chunk(k), share.left(k));
        stage.flush(active ? min(kWarpSize * kColumns, share.cols - begin) : 0);
      }
    }
  }

 private:
  static __device__ __forceinline__ int warp_of_block() {
    return (threadIdx.y * blockDim.x + threadIdx.x) / kWarpSize;
  }

  template <class RowShare, class Chunk>
  __device__ __forceinline__ void write_granules(T* row, bool active, const RowShare& share,
                                                 const Chunk& chunk) const {
    const int lane = threadIdx.x % kWarpSize;
    const int warp = warp_of_block();
    const int warps = share.step / kWarpSize;  // of the row
    const int first_warp = warp - share.first / kWarpSize;
    Granule own[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) own[k] = to_granule(chunk(k));
    __syncthreads();  // the row before has been read
    if (lane == kWarpSize - 1) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) storage.chunks[warp][k] = own[k];
    }
    __syncthreads();
    if (!active) return;
    // Granule i has the last bytes of chunk i - 1 and the first ones of chunk i.
    const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(row) % kChunkBytes);
    T* const base = row - offset / static_cast<int>(sizeof(T));
    const int begin = offset / static_cast<int>(sizeof(T));
    const int end = begin + share.cols;  // the row's, in elements from `base`
    with_offset(kChunkBytes - offset, [&](auto word, int bits) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        Granule previous = shuffle_up(own[k]);
        if (lane == 0) {
          if (warp > first_warp) {
            previous = storage.chunks[warp - 1][k];
          } else if (k > 0) {
            previous = storage.chunks[first_warp + warps - 1][k - 1];
          }
        }
        const int column = share.column(k);
        const Granule granule = shift<decltype(word)::value>(previous, own[k], bits);
        write_granule(base + column, column, granule, begin, end);
        if (k == kChunks - 1 && share.first == share.step - 1) {  // no thread comes after
          write_granule(base + column + kColumns, column + kColumns,
                        shift<decltype(word)::value>(own[k], Granule(), bits), begin, end);
        }
      }
    });
  }

  // Writes the elements of a granule at `column` that lie within [begin, end).
  static __device__ __forceinline__ void write_granule(T* target, int column,
                                                       const Granule& granule, int begin, int end) {
    if (column >= begin && column + kColumns <= end) {
      *reinterpret_cast<uint4*>(target) =
          make_uint4(granule.words[0], granule.words[1], granule.words[2], granule.words[3]);
    } else if (column + kColumns > begin && column < end) {
      const auto pack = to_pack<T, kColumns>(granule);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (column + i >= begin && column + i < end) target[i] = pack.element(i);
      }
    }
  }
};

// Writes the rows of a warp that has several, consecutive ones of a dense tensor: a team of lanes
// each. All lanes come here, those beyond the last row as well.
// kPairs: of an even number of lanes each, so that neighbours can store a wider T together.
// kGathers: aligned rows of an odd number of chunks and few lanes. Half of them begin in the middle
// of a sector of 32 bytes, and what four lanes write at once is half of two sectors and all of one.
// By way of shared memory they are written as one run: 986895 x 136 bfloat16 took 161.1 us on an
// H200 lane by lane, with 29 % more sectors written than there are, and 143.9 us so.
template <class T, int kChunks, int kColumns, bool kVectorized, bool kPairs = false,
          bool kGathers = false>
struct ShortRowWriter {
  using Stage = WarpStage<T, kWarpSize * kChunks * kColumns>;
  struct Unused {};
  using Storage = std::conditional_t<(kVectorized && !kGathers) || kMovesByElements<T>, Unused,
                                     typename Stage::Buffer>;

  Storage& storage;  // this warp's
  T* tensor;
  int64_t rows;
  int teams, team;

  // chunk(k) is chunk k of this lane's row, first_row + team.
  template <class RowShare, class Chunk>
  __device__ __forceinline__ void write(int64_t first_row, const RowShare& share,
                                        const Chunk& chunk) const {
    if constexpr (kGathers) {
      T* const staged = storage.elements + team * share.cols;
      __syncwarp();  // what was staged before has been written
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const Pack<T, kColumns> pack = chunk(k);
        if (share.left(k) > 0) store_pack(staged + share.column(k), pack);
      }
      __syncwarp();
      const int64_t left = rows - first_row;
      const int count = static_cast<int>(left < teams ? left : teams) * share.cols;
      T* const target = tensor + first_row * share.cols;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int i = (k * kWarpSize + static_cast<int>(threadIdx.x)) * kColumns;
        if (i < count) {
          *reinterpret_cast<uint4*>(target + i) =
              *reinterpret_cast<const uint4*>(storage.elements + i);
        }
      }
    } else if constexpr (kVectorized) {
      T* const row = tensor + (first_row + team) * share.cols;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const bool exists = first_row + team < rows && share.left(k) > 0;
        if constexpr (kPairs && kColumns * sizeof(T) > kChunkBytes) {
          const int distance = share.first % 2 == 0 ? kColumns : -kColumns;
          const bool neighbour_exists = first_row + team < rows && share.left(k) > distance;
          store_with_neighbour(row + share.column(k), chunk(k), exists, neighbour_exists);
        } else if (exists) {
          store_pack(row + share.column(k), chunk(k));
        }
      }
    } else if constexpr (kMovesByElements<T>) {
      if (first_row + team >= rows) return;
      T* const row = tensor + (first_row + team) * share.cols;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const Pack<T, kColumns> pack = chunk(k);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          if (i < share.left(k)) row[share.column(k) + i] = pack.element(i);
        }
      }
    } else {
      Stage stage(storage, tensor + first_row * share.cols);
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        stage.put(team * share.cols + share.column(k), chunk(k), share.left(k));
      }
      const int64_t left = rows - first_row;
      stage.flush(static_cast<int>(left < teams ? left : teams) * share.cols);
    }
  }
};

}  // namespace fastnorm::cuda
