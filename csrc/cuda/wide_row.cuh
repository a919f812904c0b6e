// A wide row of a tensor, wherever it begins, and its place in shared memory, to which and
// from where it moves in bulk.
#pragma once

#include "async.cuh"
#include "numeric.cuh"

namespace fastnorm::cuda {

// Of a wide row a warp has steps of columns, of which a lane has a pair: neighbours in a 16-bit
// row, a warp's width apart in one of float32.
constexpr int kPairStep = 2 * kWarpSize;
template <class X>
constexpr int kPairGap = kIs16Bit<X> ? 1 : kWarpSize;
template <class X>
__device__ __forceinline__ int first_of_lane() {
  return static_cast<int>(threadIdx.x) % kWarpSize * (kIs16Bit<X> ? 2 : 1);
}

// A pair whose first column is at an address in shared memory; zero what does not exist.
template <class X>
__device__ __forceinline__ Pack<X, 2> load_pair(unsigned from, bool first, bool second) {
  const unsigned other = from + kPairGap<X> * static_cast<unsigned>(sizeof(X));
  Pack<X, 2> pair;
  if constexpr (kIs16Bit<X>) {
    uint32_t low = 0, high = 0;
    if (first) low = load_bits16(from);
    if (second) high = load_bits16(other);
    pair.set_bits32(0, low | high << 16);
  } else {
    pair.words[0] = first ? load_element<float>(from) : 0;
    pair.words[1] = second ? load_element<float>(other) : 0;
  }
  return pair;
}

// Puts what exists of one there.
template <class X>
__device__ __forceinline__ void put_pair(unsigned to, const Pack<X, 2>& pair, bool first,
                                         bool second) {
  if (first) put_element(to, pair.element(0));
  if (second) {
    put_element(to + kPairGap<X> * static_cast<unsigned>(sizeof(X)), pair.element(1));
  }
}

// Places `from` to `to` of a row, as far as they are whole granules.
struct Granules {
  int from, to;
};

// The place is as far behind a whole sector of shared memory as the row is behind one of device
// memory: from that sector on, of both, places are counted.
template <class T>
struct WideRow {
  static constexpr int kSize = static_cast<int>(sizeof(T));
  static constexpr int kGranule = kChunkBytes / kSize;
  using Element = std::remove_const_t<T>;
  T* sector;
  int begin, end;

  __device__ __forceinline__ WideRow(T* row, int cols)
      : begin(static_cast<int>(reinterpret_cast<uintptr_t>(row) % kSectorBytes) / kSize) {
    sector = row - begin;
    end = begin + cols;
  }

  // All that the row has a part in, unless that is not all between `first` and `behind`.
  __device__ __forceinline__ Granules granules(const T* first, const T* behind) const {
    int from = round_down<kGranule>(begin), to = round_up<kGranule>(end);
    if (sector + from < first) from = round_up<kGranule>(begin);
    if (sector + to > behind) to = round_down<kGranule>(end);
    return {from, to};
  }
  // Those that the row fills.
  __device__ __forceinline__ Granules granules() const {
    return {round_up<kGranule>(begin), round_down<kGranule>(end)};
  }

  // Into shared memory, by one thread: the barrier expects them.
  __device__ __forceinline__ void copy_in(Element* stage, const Granules& all,
                                          unsigned barrier) const {
    copy_bulk(shared_address(stage + all.from), sector + all.from, (all.to - all.from) * kSize,
              barrier);
  }
  // From there, by one thread.
  __device__ __forceinline__ void copy_out(const T* stage, const Granules& all) const {
    store_bulk(sector + all.from, shared_address(stage + all.from), (all.to - all.from) * kSize);
  }
  // What is before and behind them, by at least as many threads as a granule has elements.
  __device__ __forceinline__ void copy_ends(Element* target, const T* source, const Granules& all,
                                            int thread) const {
    if (begin + thread < all.from) target[begin + thread] = source[begin + thread];
    if (all.to + thread < end) target[all.to + thread] = source[all.to + thread];
  }
};

}  // namespace fastnorm::cuda
