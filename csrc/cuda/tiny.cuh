// Rows of a few columns that end within a chunk, and of few chunks in the backward: a warp takes
// many of them at once, as they lie in memory, one behind the other, into shared memory, whence one
// to 16 lanes each read a row in words of four bytes. Of bfloat16 rows read from device memory
// column by column, or kept in chunks, the forward of 5162220 x 13 reached .57 of a copy on an
// H200, of 1065220 x 63 .67; .74 and .86 so. The backward of 13421772 x 5 reached .22 of an
// elementwise sum, so .62; of 6710886 x 5 float32 .40 and .81. Read from shared memory an element
// at a time, as neighbours of other lanes' columns, the forwards reached .62 and .64: accesses to
// shared memory were 96 % of what a multiprocessor has.
#pragma once

#include "async.cuh"
#include "launch.cuh"
#include "stage.cuh"

namespace fastnorm::cuda {

// The columns of a lane of such a row, neighbours: kCount at most, and two fewer at the least (one
// at the least where kCount is two). Lanes that have one more are not the first, but spread
// evenly: of 17, 34, 68 and 113 columns two of a warp's lanes meet in a bank so, three else.
template <class X, int kLanes, int kCount>
struct TinyRun {
  static constexpr int kSize = static_cast<int>(sizeof(X));
  static constexpr int kTeams = kWarpSize / kLanes;  // rows side by side
  static constexpr int kWhole = kCount == 2 ? 1 : kCount - 2;
  using Values = float[kCount];

  // Whether lanes may have a whole granule each.
  static constexpr bool kMayBeGranules = kCount * kSize == kChunkBytes;

  int begin, count;
  bool granules = false;  // they have, of all tensors

  __device__ __forceinline__ explicit TinyRun(int cols) {
    const int lane = threadIdx.x % kLanes;
    begin = lane * cols / kLanes;
    count = (lane + 1) * cols / kLanes - begin;
  }

  __device__ __forceinline__ bool has(int i) const { return i < kWhole || i < count; }

  // From shared memory, where the first column is at `address`; zero beyond the last one.
  __device__ __forceinline__ void load(Values& values, unsigned address) const {
    if constexpr (kMayBeGranules) {
      if (granules) {
        const auto granule = to_pack<X, kCount>(load_shared(address));
#pragma unroll
        for (int i = 0; i < kCount; ++i) values[i] = granule.template get<float>(i);
        return;
      }
    }
    if constexpr (kIs16Bit<X>) {
      // Words in which they lie, and what they lack of them.
      const unsigned first = address / 4 * 4;
      const int bits = address % 4 * 8;
      uint32_t words[kCount / 2 + 1];
#pragma unroll
      for (int j = 0; j <= kCount / 2; ++j) words[j] = load_word(first + 4 * j);
#pragma unroll
      for (int j = 0; j < kCount / 2; ++j) {
        Pack<X, 2> pair;
        pair.set_bits32(0, __funnelshift_r(words[j], words[j + 1], bits));
        values[2 * j] = pair.template get<float>(0);
        values[2 * j + 1] = pair.template get<float>(1);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = __uint_as_float(load_word(address + 4 * i));
    }
#pragma unroll
    for (int i = kWhole; i < kCount; ++i) values[i] = i < count ? values[i] : 0.f;
  }

  // Into shared memory, by all of a warp, whose runs follow each other from a whole word to another
  // one. A word is its first element's lane's, who gets the second from the next lane if need be.
  __device__ __forceinline__ void store(Values& values, unsigned address) const {
    if constexpr (kMayBeGranules) {
      if (granules) {
        Pack<X, kCount> pack;
#pragma unroll
        for (int i = 0; i < kCount; i += 2) pack.set_pair(i, values[i], values[i + 1]);
        store_shared(address, to_granule(pack));
        return;
      }
    }
    if constexpr (kIs16Bit<X>) {
      const float behind = __shfl_down_sync(kAllLanes, values[0], 1);
#pragma unroll
      for (int i = kWhole; i < kCount; ++i) values[i] = i == count ? behind : values[i];
      uint32_t words[kCount / 2 + 1];
#pragma unroll
      for (int j = 0; j <= kCount / 2; ++j) {
        Pack<X, 2> pair;
        pair.set_pair(0, j < kCount / 2 ? values[2 * j] : behind,
                      j < kCount / 2 ? values[2 * j + 1] : 0.f);
        words[j] = pair.bits32(0);
      }
      const unsigned odd = address / 2 % 2, first = address + 2 * odd;
      const int left = count - static_cast<int>(odd);  // in as many columns, a word for two
#pragma unroll
      for (int j = 0; j < kCount / 2; ++j) {
        const uint32_t word = __funnelshift_r(words[j], words[j + 1], 16 * odd);
        store_word(first + 4 * j, word, 2 * j + 1 < kWhole || 2 * j < left);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        store_word(address + 4 * i, __float_as_uint(values[i]), has(i));
      }
    }
  }

  // From device memory; `absent` where there are none.
  template <class W>
  __device__ __forceinline__ void load_parameter(Values& values, const W* parameter,
                                                 float absent) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = parameter != nullptr && has(i) ? widen(parameter[begin + i]) : absent;
    }
  }

 private:
  static __device__ __forceinline__ uint32_t load_word(unsigned address) {
    uint32_t word;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
  }

  // Without branches, whose state is kept in local memory where there are so many.
  static __device__ __forceinline__ void store_word(unsigned address, uint32_t word, bool exists) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.shared.u32 [%0], %1;}" ::"r"(address),
                 "r"(word), "r"(static_cast<int>(exists))
                 : "memory");
  }
};

// kRows rows of each of a warp's teams of lanes: of any width, as many as fill granules.
template <class X, int kLanes, int kCount, int kRows>
struct TinyTile {
  static constexpr int kSize = static_cast<int>(sizeof(X));
  static constexpr int kColumns = kChunkBytes / kSize;  // of a granule
  static constexpr int kTileRows = kWarpSize / kLanes * kRows;
  static_assert(kTileRows * sizeof(X) % kChunkBytes == 0);
  static constexpr int kCapacity = kTileRows * kLanes * kCount;  // elements
  // They begin as far into a granule as in device memory, and a word more may be read.
  static constexpr int kGranules = kCapacity * static_cast<int>(sizeof(X)) / kChunkBytes + 2;
  static constexpr int kLaneGranules = (kGranules + kWarpSize - 1) / kWarpSize;

  // How far into a granule tiles of a tensor begin: all of them, where rows are dense. Others are
  // copied element by element.
  static __device__ __forceinline__ int offset_of(const X* tensor, bool dense) {
    return dense ? static_cast<int>(reinterpret_cast<uintptr_t>(tensor) % kChunkBytes) : 0;
  }

  // The same of what is put into shared memory, which begins at a whole word.
  static __device__ __forceinline__ int put_offset_of(const X* tensor) {
    return offset_of(tensor, true) / 4 * 4;
  }

  // Writes `count` elements so put to `target`, where the tile begins.
  static __device__ __forceinline__ void write(X* target, const uint4* source, int count) {
    const X* const staged = reinterpret_cast<const X*>(source);
    if (offset_of(target, true) == put_offset_of(target)) {
      write_staged<kCapacity>(target, staged, count);
    } else {
      const int begin = put_offset_of(target) / kSize;
      for (int i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) {
        target[i] = staged[begin + i];
      }
    }
  }

  // Starts to copy the rows from `first` on, zeros beyond the last one. Granules that lie within
  // the tensor are copied whole; element by element all of the last tile of 5162220 x 13 bfloat16
  // took a tenth of all the time.
  static __device__ __forceinline__ void copy(uint4* target, const X* tensor, int64_t row_stride,
                                              int64_t first, int64_t rows, int cols) {
    const int lane = threadIdx.x % kWarpSize;
    const bool dense = row_stride == cols;
    const int before = offset_of(tensor, dense) / kSize;
    const X* const source = tensor + first * row_stride;
    if (!dense && (cols | row_stride) % kColumns == 0 && offset_of(tensor, true) == 0) {
      copy_apart(target, source, row_stride, min(rows - first, int64_t{kTileRows}), cols);
      return;
    }
    const int elements = before + kTileRows * cols;
    // Rows that there are: this tile's, and behind them as many as can lie in its last granule.
    const auto there = static_cast<unsigned>(min(rows - first, int64_t{kTileRows + kColumns}));
    const int whole = dense ? min((elements + kColumns - 1) / kColumns,
                                  (before + static_cast<int>(there) * cols) / kColumns)
                            : 0;
#pragma unroll
    for (int k = 0; k < kLaneGranules; ++k) {
      const int i = k * kWarpSize + lane;
      if (i < whole) start_copy(target + i, source - before + i * kColumns);
    }
    constexpr int kAtOnce = 4;  // loads under way, of rows with gaps between them
#pragma unroll 1
    for (int i = whole * kColumns + lane; i < elements; i += kAtOnce * kWarpSize) {
      X loaded[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        // What lies before the tile is in no row either.
        const unsigned at = i + k * kWarpSize - before, row = at / static_cast<unsigned>(cols);
        loaded[k] = row < there ? source[row * row_stride + (at - row * cols)] : X{};
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int place = i + k * kWarpSize;
        if (place < elements) reinterpret_cast<X*>(target)[place] = loaded[k];
      }
    }
  }

 private:
  // Of rows of whole granules with others between them.
  static __device__ __forceinline__ void copy_apart(uint4* target, const X* source,
                                                    int64_t row_stride, int64_t rows, int cols) {
    const auto of_row = static_cast<unsigned>(cols / kColumns);
#pragma unroll 1
    for (unsigned i = threadIdx.x % kWarpSize; i < kTileRows * of_row; i += kWarpSize) {
      const unsigned row = i / of_row;
      if (row < rows) {
        start_copy(target + i, source + row * row_stride + (i - row * of_row) * kColumns);
      } else {
        target[i] = make_uint4(0, 0, 0, 0);
      }
    }
  }
};

// This lane's granules of a tile, the first and every 32nd behind it.
template <class Tile, class T>
struct TinyGranules {
  T* next;       // of the next tile, the first
  int left;      // of a tile, from there on
  bool aligned;  // tiles begin at whole granules

  // `first`: of the first tile. `within`: granules that lie within a tile; else all of which it has
  // a part.
  __device__ __forceinline__ TinyGranules(T* first, int cols, bool within) {
    const int lane = threadIdx.x % kWarpSize;
    const int before = Tile::offset_of(first, true) / Tile::kSize;
    const int elements = before + Tile::kTileRows * cols;
    left = (within ? elements : elements + Tile::kColumns - 1) / Tile::kColumns - lane;
    next = first - before + lane * Tile::kColumns;
    aligned = before == 0;
  }

  __device__ __forceinline__ void copy_in(uint4* target) const {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int k = 0; k < Tile::kLaneGranules; ++k) {
      if (k * kWarpSize < left) {
        start_copy(target + lane + k * kWarpSize, next + k * kWarpSize * Tile::kColumns);
      }
    }
  }
  __device__ __forceinline__ void copy_out(const uint4* source) const {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int k = 0; k < Tile::kLaneGranules; ++k) {
      if (k * kWarpSize < left) {
        reinterpret_cast<uint4*>(next)[k * kWarpSize] = source[lane + k * kWarpSize];
      }
    }
  }
};

// The tiles that a warp has: every `step`-th from `tile` on. Those whose granules all lie within
// dense tensors move without any of what the others take: of 33 columns of bfloat16 245 of the 605
// instructions of a tile of the forward were for that and for weight and bias.
template <class Tile>
struct TinyTiles {
  int64_t rows;
  int tile, step, end;
  int whole = 0;  // the first of all tiles, that lie so

  __device__ __forceinline__ TinyTiles(int64_t rows, int tile, int step, int end, bool dense)
      : rows(rows), tile(tile), step(step), end(end) {
    if (dense && rows > Tile::kColumns) {
      whole = static_cast<int>((rows - Tile::kColumns) / Tile::kTileRows);
    }
  }
  static __device__ __forceinline__ int count_of(int64_t rows) {
    return static_cast<int>((rows + Tile::kTileRows - 1) / Tile::kTileRows);
  }
  static __device__ __forceinline__ int64_t first_row(int t) {
    return int64_t{t} * Tile::kTileRows;
  }
  // Of a tile, those that there are.
  __device__ __forceinline__ int rows_of(int t) const {
    return t < whole ? Tile::kTileRows
                     : static_cast<int>(min(rows - first_row(t), int64_t{Tile::kTileRows}));
  }
};

// Calls body(lanes, columns) with those of a plan.
template <class X, bool kForward, class Plan, class Body>
cudaError_t with_tiny_run(const Plan& plan, const Body& body) {
  const auto with_lanes = [&](auto lanes) {
    return visit_number<kLeastTinyLane, kMostTinyLane, 2>(
        plan.columns_per_thread, [&](auto columns) {
          constexpr int kLanes = decltype(lanes)::value, kCount = decltype(columns)::value;
          if constexpr (is_tiny_shape(kLanes, kCount, sizeof(X), kForward)) {
            return body(lanes, columns);
          } else {
            return cudaErrorInvalidValue;
          }
        });
  };
  switch (plan.threads_per_row) {
    case 1:
      return with_lanes(std::integral_constant<int, 1>());
    case 2:
      return with_lanes(std::integral_constant<int, 2>());
    case 4:
      return with_lanes(std::integral_constant<int, 4>());
    case 8:
      return with_lanes(std::integral_constant<int, 8>());
    case 16:
      return with_lanes(std::integral_constant<int, 16>());
  }
  return cudaErrorInvalidValue;
}

}  // namespace fastnorm::cuda
