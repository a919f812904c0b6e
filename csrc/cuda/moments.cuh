// Mean and sum of squared differences from it, of the chunks of a thread and of a row's threads: by
// differences from a point within the row; of many 16-bit rows from the sums of columns and of
// their squares, where that loses no more than a bit.
#pragma once

#include <limits>

#include "plan.h"
#include "reduce.cuh"

namespace fastnorm::cuda {

// The mean of 2, 4 or 8 numbers, as a tree: exact where all of them are equal, and safe from
// overflow, for they are divided first.
template <class A, int kCount>
__device__ __forceinline__ A tree_mean(A (&values)[kCount]) {
  constexpr A kShare = A(1.0 / kCount);
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    values[i] = fma(values[i], kShare, values[i + kCount / 2] * kShare);
  }
#pragma unroll
  for (int stride = kCount / 4; stride > 0; stride /= 2) {
#pragma unroll
    for (int i = 0; i < stride; ++i) values[i] += values[i + stride];
  }
  return values[0];
}

// What differences are averaged from, so that equal columns have exactly their value as mean: one
// of them, or zero where differences from it would be NaN.
template <class A>
__device__ __forceinline__ A reference_point(A column) {
  return isfinite(column) ? column : A(0);
}

// Of a thread's columns, by differences from the mean of its first kLeading chunks: these take two
// passes, each about its own mean, all others one. Such a sum of squares is at most as many times
// the one about the thread's own mean as the thread has chunks for each of those, for what lies
// between the two means lies between the first ones' columns and the second one too: little
// cancels.
//
// The columns of a chunk are summed by themselves. Where the first chunk is an outlier, all others
// are as far from its mean, and one chain of equal terms errs by several units: of 72 columns of
// bfloat16 behind eight of 1000 rstd was 1.4 times as far off as it may be, of 27001 2.7 times.
//
// kMost: columns whose differences are summed, at the most. Of each the sum has but one kMost-th
// (or a power of two less), for 64 differences of 1e37 have no sum in float32; and no less than
// that, for what is lost of subnormal ones is so many times as much in the mean.
// kForgets: 16-bit columns are unpacked again for the second pass, where registers are short.
template <class A, int kMost, int kLeading = 1, bool kForgets = false>
struct ThreadMoments {
  static constexpr A kTimes = A(next_power_of_two(kMost));
  static constexpr A kShare = 1 / kTimes;
  static_assert(kLeading == 1 || kLeading == 2);
  A reference = 0;
  A sum = 0;  // of the differences, of each but kShare
  A squares = 0;
  A count = 0;

  // Adds the thread's chunk k, after those before it, if it exists.
  template <class X, int kColumns>
  __device__ __forceinline__ void add_chunk(int k, Pack<X, kColumns> chunk, bool exists) {
    A new_sum = 0, new_squares = 0, center = 0;
    if (k < kLeading) {
      A values[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) values[i] = chunk.template get<A>(i);
      const A mean = tree_mean(values);
      center = reference_point(mean);
      if (k == 0) reference = exists ? center : A(0);
      new_sum = mean - center;  // none, or not finite
      if constexpr (kForgets) forget_unpacked(chunk);
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const A delta = chunk.template get<A>(i) - (k > 0 && k < kLeading ? center : reference);
      if (k >= kLeading) new_sum = fma(delta, kShare, new_sum);
      new_squares = fma(delta, delta, new_squares);
    }
    if (k > 0 && k < kLeading) {  // from either mean to the middle between them
      const A half = A(0.5) * center - A(0.5) * reference;
      new_squares = fma(2 * kColumns * half, half, new_squares);
      reference = exists ? reference + half : reference;
    }
    if (k > 0) {
      new_sum += sum;
      new_squares += squares;
    }
    sum = exists ? new_sum : sum;
    squares = exists ? new_squares : squares;
    count = exists ? A(kColumns * (k + 1)) : count;
  }

  // Adds one more column.
  __device__ __forceinline__ void add(A value) {
    if (count == 0) reference = reference_point(value);
    const A delta = value - reference;
    sum = fma(delta, kShare, sum);
    squares = fma(delta, delta, squares);
    count += 1;
  }
};

// Of up to kChunks chunks, of which the first adds nothing to the sum. (By one leading chunk of
// eight, rstd of 20480 columns of bfloat16 behind eight of 1000 is 1.7 times as far off as it may
// be.)
template <class A, int kChunks, int kColumns, bool kForgets = false>
using ChunkMoments = ThreadMoments<A, (kChunks > 1 ? kChunks - 1 : 1) * kColumns,
                                   (kChunks < kForwardChunks ? 1 : 2), kForgets>;

// Of a set of columns whose number is known from elsewhere.
template <class A>
struct SetMoments {
  static constexpr A kInfinity = std::numeric_limits<A>::infinity();
  A mean = 0;
  A m2 = 0;
};

// What makes xhat of a column: by a fused multiply and add where the row is centred, by a
// difference and a product else, of which equal columns leave nothing.
template <class A>
struct Standardizer {
  A rstd;
  A constant;  // the mean, or if centred less its product with rstd

  template <bool kCentred>
  __device__ __forceinline__ A xhat(A x) const {
    return kCentred ? fma(x, rstd, constant) : (x - constant) * rstd;
  }
};

// Whether the mean lies within two standard deviations of zero. What a fused multiply and add then
// loses is no more than rounding the mean to float32 has lost.
template <class A>
__device__ __forceinline__ bool is_centred(const SetMoments<A>& row, A inverse_total) {
  return row.mean * row.mean <= A(4) * inverse_total * row.m2;
}

// 1 / standard deviation of a row. Squares beyond float32 leave infinity less infinity (see
// merge_differences), which is no number: the variance is infinite then. None has a row of which
// the mean is not finite.
template <class A>
__device__ __forceinline__ A rstd_of(const SetMoments<A>& row, A inverse_total, A eps) {
  const A m2 = isnan(row.m2) ? SetMoments<A>::kInfinity : row.m2;
  return rsqrt(fma(m2, inverse_total, eps)) + (row.mean - row.mean);
}

// The moments of kRows rows that kWidth neighbouring lanes share (1: of which each has all), in all
// of them, by differences from a point within each row. `from(r, point, mean, squares)` tells what
// they add up to in this lane, as a share of the mean, and their squares.
//
// The sum of squares about the mean is that about the point less `total` times the square of what
// lies between. While that is no more than a standard deviation, two bits cancel at the most. Rows
// where it is more, or nothing is finite, take a second pass, about the mean that the first one
// found: by the whole warp, but none depends on another. Two passes for all rows took 2 to 5 % more
// time on an H200, and 8 registers more, where 16384 x 8192 bfloat16 with float32 parameters has
// none to spare (143 us, so 134.6 us).
template <int kWidth, class A, int kRows, class Differences>
__device__ __forceinline__ void merge_differences(SetMoments<A> (&rows)[kRows],
                                                  const A (&points)[kRows], A total,
                                                  const Differences& from) {
  A at[kRows], values[2 * kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) at[r] = points[r];
  bool again = false;
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) from(r, at[r], values[2 * r], values[2 * r + 1]);
    sum_lanes<kWidth>(values);
    bool any_far = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const A distance = values[2 * r], between = total * distance * distance;
      rows[r] = {at[r] + distance, values[2 * r + 1] - between};
      const bool far = !(between <= rows[r].m2);
      any_far |= far;
      if (far && !again) at[r] = rows[r].mean;  // the others' second pass repeats their first
    }
    if (again || !__any_sync(kAllLanes, any_far)) break;
    again = true;
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rows[r].mean = isfinite(values[2 * r]) ? at[r] + values[2 * r] : at[r];
  }
}

// Whether chunks are summed as they are first: of 16-bit types, eight columns each. It is the same
// for all rows of a width. On 92 multiprocessors of an H100, each with an H200's share of memory,
// 131072 x 1023 bfloat16 reached .943 of a copy by differences and .961 so, 32768 x 4095 .935 and
// .977, 883011 x 152 .96 and .976. An earlier form, with a register more for xhat, had 64, 192, 384
// and 512 columns the same, and with spills of a few words 671088 x 200 .96 and .935, 4096 x 32768
// in the ring .863 and .843.
template <int kColumns, int kLanes, int kChunks>
constexpr bool kSumsFirst =
    kColumns == 8 && ((kLanes == kWarpSize && kChunks < kForwardChunks) || kChunks == 5);

// Sums of a thread's columns and of their squares: two instructions for a column, where differences
// take three and the first chunk four.
template <class A>
struct ThreadSums {
  A sum = 0;
  A squares = 0;

  // Adds a chunk, if it exists. Each is summed by itself, or errors of equal terms add up.
  template <class X, int kColumns>
  __device__ __forceinline__ void add_chunk(int k, const Pack<X, kColumns>& chunk, bool exists) {
    A new_sum = chunk.template get<A>(0), new_squares = new_sum * new_sum;
#pragma unroll
    for (int i = 1; i < kColumns; ++i) {
      const A value = chunk.template get<A>(i);
      new_sum += value;
      new_squares = fma(value, value, new_squares);
    }
    if (k > 0) {
      new_sum += sum;
      new_squares += squares;
    }
    sum = exists ? new_sum : sum;
    squares = exists ? new_squares : squares;
  }

  // Adds one more column.
  __device__ __forceinline__ void add(A value) {
    sum += value;
    squares = fma(value, value, squares);
  }
};

// The moments that sums of columns and of their squares amount to; false where more than one bit
// cancels, for the mean does not lie within a standard deviation of zero, or something is not
// finite.
template <class A>
__device__ __forceinline__ bool take_sums(SetMoments<A>& row, const ThreadSums<A>& sums,
                                          A inverse_total) {
  const A mean = sums.sum * inverse_total, between = sums.sum * mean;
  row = {mean, sums.squares - between};
  return between <= row.m2 && row.m2 < SetMoments<A>::kInfinity;
}

// The moments of kRows rows that kWidth neighbouring lanes share, in all of them, from their sums
// if these do. `by_differences(rows)` tells what to take else: called by the whole warp, but none
// depends on another row.
template <int kWidth, class A, int kRows, class ByDifferences>
__device__ __forceinline__ void merge_sums(SetMoments<A> (&rows)[kRows],
                                           const ThreadSums<A> (&threads)[kRows], A inverse_total,
                                           const ByDifferences& by_differences) {
  A values[2 * kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    values[2 * r] = threads[r].sum;
    values[2 * r + 1] = threads[r].squares;
  }
  sum_lanes<kWidth>(values);
  bool taken[kRows], all_taken = true;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    taken[r] = take_sums(rows[r], {values[2 * r], values[2 * r + 1]}, inverse_total);
    all_taken &= taken[r];
  }
  if (__all_sync(kAllLanes, all_taken)) return;
  SetMoments<A> others[kRows];
  by_differences(others);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (!taken[r]) rows[r] = others[r];
  }
}

// The sums of a row's warps, in shared memory, up to kMost. They need no numbers of columns beside
// them: to merge them takes a warp 35 instructions, moments 85.
template <int kMost>
struct WarpSums {
  static constexpr int kHalf = kWarpSize / 2;
  static_assert(kMost == kHalf || kMost == kWarpSize);
  float halves[2][kMost];  // of columns, of squares

  // Of the calling warp's threads.
  __device__ __forceinline__ void put(int warp, const ThreadSums<float>& thread) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const float mine = sum_halves(thread.sum, thread.squares, lane);
    if (lane % kHalf == 0) halves[lane / kHalf][warp] = mine;
  }

  // Of all `warps`, when they have put theirs.
  __device__ __forceinline__ ThreadSums<float> merge(int warps) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = lane % kHalf;
    const float* const half = halves[lane / kHalf];
    float mine = warp < warps ? half[warp] : 0.f;
    if (kMost > kHalf && warp + kHalf < warps) mine += half[warp + kMost - kHalf];
    mine = sum_within_halves(mine);
    return {__shfl_sync(kAllLanes, mine, 0), __shfl_sync(kAllLanes, mine, kHalf)};
  }
};

// The moments of the columns of kWidth neighbouring lanes, which make up `total` in each row, in
// all of them; the first lane's are not nothing.
template <int kWidth, class A, class Moments, int kRows>
__device__ __forceinline__ void merge_threads(SetMoments<A> (&rows)[kRows],
                                              const Moments (&threads)[kRows], A total,
                                              A inverse_total) {
  constexpr A kTimes = Moments::kTimes;
  A points[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) points[r] = of_first_lane<kWidth>(threads[r].reference);
  merge_differences<kWidth>(rows, points, total, [&](int r, A point, A& mean, A& squares) {
    const Moments& thread = threads[r];
    const A delta = thread.reference - point;
    mean = fma(thread.count * inverse_total, delta, thread.sum * (kTimes * inverse_total));
    squares = fma(delta, fma(thread.count, delta, thread.sum * (2 * kTimes)), thread.squares);
    if (isinf(thread.squares)) squares = thread.squares;  // and not NaN, of two that overflow
  });
}

template <class A, class Moments>
__device__ __forceinline__ SetMoments<A> merge_warp(const Moments& thread, A total,
                                                    A inverse_total) {
  SetMoments<A> row[1];
  const Moments threads[] = {thread};
  merge_threads<kWarpSize>(row, threads, total, inverse_total);
  return row[0];
}

// The moments of the union of the sets of kWidth neighbouring lanes, in all of them; the first
// lane's set is not empty. Equal means leave no variance.
template <int kWidth, class A>
__device__ __forceinline__ SetMoments<A> merge_lanes(const SetMoments<A>& set, A count, A total,
                                                     A inverse_total) {
  SetMoments<A> row[1];
  const A points[] = {reference_point(of_first_lane<kWidth>(set.mean))};
  merge_differences<kWidth>(row, points, total, [&](int, A point, A& mean, A& squares) {
    const A delta = set.mean - point;
    mean = count * inverse_total * delta;
    squares = fma(count * delta, delta, set.m2);
  });
  return row[0];
}

// How many of `columns` columns, `size` to each set, are in set `index`; as a float, for it is
// multiplied with. The last `overhang` of them are in the set of the one before them.
template <class A>
__device__ __forceinline__ A columns_of_set(int columns, int size, int index, int overhang = 0) {
  const int left = columns - overhang - index * size;
  const A count = fmax(A(0), fmin(static_cast<A>(left), static_cast<A>(size)));
  return left > 0 && left <= size ? count + static_cast<A>(overhang) : count;
}

// The moments of `columns` columns, cut into sets of `size` but for the last one, in every lane of
// the calling warp. At most kMost sets; how many may be does not change the sum.
template <int kMost = 16, class A>
__device__ __forceinline__ SetMoments<A> merge_sets(const SetMoments<A>* sets, int columns,
                                                    int size, A inverse_columns, int overhang = 0) {
  constexpr int kFew = 4;
  const int whole = columns - overhang;
  if (whole <= size) return sets[0];
  const A total = static_cast<A>(columns);
  if (whole > kFew * size) {
    const int index = threadIdx.x % kMost;
    const A count = columns_of_set<A>(columns, size, index, overhang);
    return merge_lanes<kMost>(count > 0 ? sets[index] : SetMoments<A>(), count, total,
                              inverse_columns);
  }
  // One after the other, without shuffles.
  const volatile SetMoments<A>* const one = sets;  // or all are kept in registers, which spill
  SetMoments<A> row[1];
  const A points[] = {reference_point(sets[0].mean)};
  merge_differences<1>(row, points, total, [&](int, A point, A& mean, A& squares) {
    mean = squares = 0;
#pragma unroll
    for (int i = 0; i < kFew; ++i) {
      if (i * size < whole) {
        const A count = static_cast<A>((i + 1) * size < whole ? size : columns - i * size);
        const A delta = one[i].mean - point;
        mean = fma(count * inverse_columns, delta, mean);
        squares += fma(count * delta, delta, one[i].m2);
      }
    }
  });
  return row[0];
}

// The same for any number of sets.
template <class A, class Index>
__device__ __forceinline__ SetMoments<A> merge_many_sets(const SetMoments<A>* sets, Index number,
                                                         Index columns, Index size,
                                                         A inverse_columns) {
  SetMoments<A> row[1];
  const A points[] = {reference_point(sets[0].mean)};
  merge_differences<kWarpSize>(
      row, points, static_cast<A>(columns), [&](int, A point, A& mean, A& squares) {
        mean = squares = 0;
#pragma unroll 1
        for (Index i = threadIdx.x % kWarpSize; i < number; i += kWarpSize) {
          const A count = static_cast<A>(i + 1 < number ? size : columns - i * size);
          const A delta = sets[i].mean - point;
          mean = fma(count * inverse_columns, delta, mean);
          squares += fma(count * delta, delta, sets[i].m2);
        }
      });
  return row[0];
}

}  // namespace fastnorm::cuda
