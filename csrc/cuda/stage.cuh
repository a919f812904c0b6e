// Stores that lanes make together. Two of them, of rows that are written as a wider type; a warp,
// of rows that start anywhere: it gathers a span of them in shared memory, laid out as in device
// memory relative to its 16-byte boundaries, and writes it out in wide accesses.
#pragma once

#include "numeric.cuh"
#include "shift.cuh"

namespace fastnorm::cuda {

// Stores a pack of two granules at `target`, if it exists, together with that of the neighbouring
// lane (the other of 2 i and 2 i + 1), which lies right behind or before it: each access writes
// whole sectors of 32 bytes so, not halves: 16384 x 8192 float16 to float32 took 200 us on an H200
// for 212 us. All lanes of the warp come here.
template <class T, int kCount>
__device__ __forceinline__ void store_with_neighbour(T* target, const Pack<T, kCount>& pack,
                                                     bool exists, bool neighbour_exists) {
  static_assert(sizeof(T) == 4 && sizeof(pack) == 2 * kChunkBytes);
  constexpr int kHalf = kCount / 2;
  const bool odd = threadIdx.x % 2 == 1;
  Pack<T, kHalf> first, second;  // of the even lane's pack, and of the odd one's
#pragma unroll
  for (int j = 0; j < kHalf; ++j) {
    const T own = odd ? pack.words[kHalf + j] : pack.words[j];
    const T given = odd ? pack.words[j] : pack.words[kHalf + j];
    const T other = __shfl_xor_sync(kAllLanes, given, 1);
    first.words[j] = odd ? other : own;
    second.words[j] = odd ? own : other;
  }
  T* const place = odd ? target - kHalf : target;
  if (odd ? neighbour_exists : exists) store_pack(place, first);
  if (odd ? exists : neighbour_exists) store_pack(place + kCount, second);
}

// A span of at most kCapacity elements of T that one warp writes.
template <class T, int kCapacity>
class WarpStage {
 public:
  static constexpr int kWide = 16 / static_cast<int>(sizeof(T));  // elements of a wide access

  struct alignas(16) Buffer {
    T elements[kCapacity + kWide];
  };

  // `target` is where the span's first element goes.
  __device__ __forceinline__ WarpStage(Buffer& buffer, T* target)
      : elements_(buffer.elements),
        target_(target),
        shift_(static_cast<int>(reinterpret_cast<uintptr_t>(target) / sizeof(T) % kWide)) {}

  // Puts the first `left` elements of a pack, or all of them, at `position` of the span.
  template <int kCount>
  __device__ __forceinline__ void put(int position, const Pack<T, kCount>& pack, int left) {
    T* const place = elements_ + shift_ + position;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < left) place[i] = pack.element(i);
    }
  }

  // Writes the first `count` elements of the span, once every lane of the warp has put its own.
  // Every lane must come here; afterwards the buffer is free again.
  __device__ __forceinline__ void flush(int count) {
    __syncwarp();
    const int lane = (threadIdx.y * blockDim.x + threadIdx.x) % kWarpSize;
    const int end = shift_ + (count > 0 ? count : 0);
    const int first_wide = shift_ == 0 ? 0 : 1;
    const int end_wide = end / kWide;
    T* const origin = target_ - shift_;
#pragma unroll 1
    for (int i = first_wide + lane; i < end_wide; i += kWarpSize) {
      *reinterpret_cast<uint4*>(origin + i * kWide) =
          *reinterpret_cast<const uint4*>(elements_ + i * kWide);
    }
    // What is left over before the first boundary and after the last one.
    const int part = lane / kWide;
    const int begin = part == 0 ? 0 : end_wide * kWide;
    const int i = begin + lane % kWide;
    const bool head = part == 0 && first_wide == 1;
    const bool tail = part == 1 && end_wide >= first_wide;
    if ((head || tail) && i >= shift_ && i < end) origin[i] = elements_[i];
    __syncwarp();
  }

 private:
  T* elements_;
  T* target_;
  int shift_;  // elements between the 16-byte boundary before the span and the span
};

// Writes `count` elements to `target`. They are staged from as far into a granule on as `target` is
// into one. The whole warp comes here.
template <int kCapacity, class X>
__device__ __forceinline__ void write_staged(X* target, const X* staged, int count) {
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(X));
  const int lane = threadIdx.x % kWarpSize;
  const int begin = static_cast<int>(reinterpret_cast<uintptr_t>(target) % kChunkBytes / sizeof(X));
  const int end = begin + count, whole = end / kElements;
  X* const origin = target - begin;
#pragma unroll
  for (int first = 0; first < kCapacity / kElements + 1; first += kWarpSize) {
    const int i = first + lane;
    if (i < whole && (i > 0 || begin == 0)) {
      reinterpret_cast<uint4*>(origin)[i] = reinterpret_cast<const uint4*>(staged)[i];
    }
  }
  // The elements before the first whole granule and after the last one.
  const int part = lane / kElements;
  const int i = (part == 0 ? 0 : whole * kElements) + lane % kElements;
  const bool outside = part == 0 ? begin > 0 : part == 1 && (whole > 0 || begin == 0);
  if (outside && i >= begin && i < end) origin[i] = staged[i];
}

}  // namespace fastnorm::cuda
