// Rows of a few columns that end within a chunk: a warp takes many of them at once, as they lie in
// memory, one behind the other, into shared memory, whence one to 16 lanes each read a row in words
// of four bytes. Of bfloat16 rows read from device memory column by column, or kept in
// chunks, the forward of 5162220 x 13 reached .57 of a copy on an H200, of 1065220 x 63 .67; .74
// and .86 so. The backward of 13421772 x 5 reached .22 of an elementwise sum, so .62; of 6710886 x
// 5 float32 .40 and .81. Read from shared memory an element at a time, as neighbours of other
// lanes' columns, the forwards reached .62 and .64: accesses to shared memory were 96 % of what a
// multiprocessor has.
#pragma once

#include "async.cuh"
#include "launch.cuh"
#include "stage.cuh"

namespace fastnorm::cuda {

// The columns of a lane of such a row, neighbours: kCount at most, and two fewer at the least (one
// at the least where kCount is four). Of a row's kLanes lanes the first may have one more.
template <class X, int kLanes, int kCount>
struct TinyRun {
  static constexpr int kSize = static_cast<int>(sizeof(X));
  static constexpr int kTeams = kWarpSize / kLanes;  // rows side by side
  static constexpr int kWhole = kCount == kLeastTinyLane ? 1 : kCount - 2;
  using Values = float[kCount];

  int begin, count;

  __device__ __forceinline__ explicit TinyRun(int cols) {
    const int lane = threadIdx.x % kLanes;
    const int least = cols / kLanes, longer = cols % kLanes;
    begin = lane * least + min(lane, longer);
    count = least + (lane < longer ? 1 : 0);
  }

  __device__ __forceinline__ bool has(int i) const { return i < kWhole || i < count; }

  // From shared memory, where the first column is at `address`; zero beyond the last one.
  __device__ __forceinline__ void load(Values& values, unsigned address) const {
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

  // Into shared memory, likewise.
  __device__ __forceinline__ void store(const Values& values, unsigned address) const {
    if constexpr (kIs16Bit<X>) {
      Pack<X, 2> pairs[kCount / 2];
#pragma unroll
      for (int j = 0; j < kCount / 2; ++j) pairs[j].set_pair(0, values[2 * j], values[2 * j + 1]);
      // The words in which they lie; of the first and the last one other lanes may have a half.
      const int odd = address / 2 % 2, bits = 16 * odd, end = odd + count;
      const unsigned first = address - 2 * odd;
      uint32_t last = 0;
#pragma unroll
      for (int j = 0; j <= kCount / 2; ++j) {
        const uint32_t low = j > 0 ? pairs[(j + kCount / 2 - 1) % (kCount / 2)].bits32(0) : 0;
        const uint32_t high = j < kCount / 2 ? pairs[j % (kCount / 2)].bits32(0) : 0;
        const uint32_t word = __funnelshift_l(low, high, bits);
        store_word(first + 4 * j, word,
                   j > 0 ? 2 * j + 2 <= kWhole || 2 * j + 2 <= end : odd == 0 && 2 <= end);
        if (2 * j + 1 >= kWhole && 2 * j + 1 == end) last = word;
      }
      store_half(address, pairs[0].bits32(0), odd == 1);
      store_half(first + 2 * (end - 1), last, end % 2 == 1);
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

  static __device__ __forceinline__ void store_half(unsigned address, uint32_t word, bool exists) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.shared.u16 [%0], %1;}" ::"r"(address),
                 "h"(static_cast<uint16_t>(word)), "r"(static_cast<int>(exists))
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

  // How far into a granule tiles of a tensor begin: all of them, where rows are dense. Others are
  // copied element by element.
  static __device__ __forceinline__ int offset_of(const X* tensor, bool dense) {
    return dense ? static_cast<int>(reinterpret_cast<uintptr_t>(tensor) % kChunkBytes) : 0;
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
    const int elements = before + kTileRows * cols;
    // Rows that there are: this tile's, and behind them as many as can lie in its last granule.
    const auto there = static_cast<unsigned>(min(rows - first, int64_t{kTileRows + kColumns}));
    const int whole = dense ? min((elements + kColumns - 1) / kColumns,
                                  (before + static_cast<int>(there) * cols) / kColumns)
                            : 0;
#pragma unroll
    for (int k = 0; k < (kGranules + kWarpSize - 1) / kWarpSize; ++k) {
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
