// Mean and sum of squared differences from it, of the chunks of a thread and of a row's threads.
#pragma once

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

// Whether the point of reference lies so far from the mean, kDeviations standard deviations, that
// the mean lacks what was rounded off differences from that point. True where no variance tells.
template <int kDeviations, class A>
__device__ __forceinline__ bool is_far(A distance, A variance) {
  return !(distance * distance < kDeviations * kDeviations * variance);
}

// What a mean lacks, given the mean of differences from it. (The sum of their squares is as good as
// before: it lacks but the square of this.)
template <class A>
__device__ __forceinline__ A lacking(A rest) {
  return isfinite(rest) ? rest : A(0);  // 16384 differences of 1e37 have no sum in float32
}

// The number itself, of which the compiler does not know that: what depends on it is computed anew.
__device__ __forceinline__ float forgotten(float value) {
  asm volatile("" : "+f"(value));
  return value;
}

// What the means of kRows rows, each of kLanes lanes, lack: zero but for rows whose point of
// reference was far off. `sum(r)` is this lane's sum of differences from the mean of row r. By the
// whole warp, but only for rows that ask for it: none depends on another. For all rows it took 2 to
// 4 % of the time of 64 to 1024 columns of bfloat16 on an H200.
template <int kLanes, class A, int kRows, class Sum>
__device__ __forceinline__ void find_lacking(A (&lacks)[kRows], const A (&distances)[kRows],
                                             const A (&squares)[kRows], A inverse_cols,
                                             const Sum& sum) {
  bool far[kRows], any_far = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    lacks[r] = 0;
    any_far |= far[r] = is_far<3>(distances[r], squares[r] * inverse_cols);
  }
  if (!__any_sync(kAllLanes, any_far)) return;
  A sums[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = sum(r);
  sum_lanes<kLanes>(sums);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (far[r]) lacks[r] = lacking(sums[r] * inverse_cols);
  }
}

// Of a thread's columns, by differences from the mean of its first chunk: that chunk takes two
// passes, all others one. Such a sum of squares is at most as many times the one about the thread's
// own mean as the thread has chunks, for what lies between the two means lies between the first
// one's columns and the second one too: nothing cancels that would matter.
template <class A>
struct ThreadMoments {
  static constexpr A kShare = A(1.0 / 64);
  A reference = 0;
  A sum = 0;  // of the differences, of each but kShare: 64 of 1e37 have no sum in float32
  A squares = 0;
  A count = 0;

  // Adds the thread's chunk k, after those before it, if it exists.
  template <class X, int kColumns>
  __device__ __forceinline__ void add_chunk(int k, const Pack<X, kColumns>& chunk, bool exists) {
    A new_sum = sum, new_squares = squares;
    if (k == 0) {
      A values[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) values[i] = chunk.template get<A>(i);
      const A mean = tree_mean(values);
      const A finite = reference_point(mean);
      reference = exists ? finite : A(0);
      new_sum = mean - finite;  // none, or not finite
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const A delta = chunk.template get<A>(i) - reference;
      if (k > 0) new_sum = fma(delta, kShare, new_sum);
      new_squares = fma(delta, delta, new_squares);
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

// Of a set of columns whose number is known from elsewhere.
template <class A>
struct SetMoments {
  A mean = 0;
  A m2 = 0;
};

// The moments of what the threads of a warp have, in all of them; the first lane's is not nothing.
// Two passes, as in merge_lanes, but that the sum of squares of differences from the mean is made
// of that of differences from the thread's point of reference. Where one outlier moves the first
// lane's far off, the mean is mended.
template <class A>
__device__ __forceinline__ SetMoments<A> merge_warp(const ThreadMoments<A>& thread,
                                                    A inverse_total) {
  constexpr A kTimes = 1 / ThreadMoments<A>::kShare;
  const A reference = __shfl_sync(kAllLanes, thread.reference, 0);
  const A share = thread.count * inverse_total;
  const A sum = thread.sum * (kTimes * inverse_total);
  A values[] = {fma(share, thread.reference - reference, sum)};
  sum_lanes<kWarpSize>(values);
  A mean = reference + values[0];
  const A delta = thread.reference - mean;
  const A twice = thread.sum * (2 * kTimes);
  values[0] = fma(delta, fma(thread.count, delta, twice), thread.squares);
  if (isinf(thread.squares)) values[0] = thread.squares;  // and not NaN, of two that overflow
  sum_lanes<kWarpSize>(values);
  const A m2 = values[0];
  // (For all rows, 8192 columns of bfloat16 took 1.5 % more time.)
  if (is_far<1>(reference - mean, m2 * inverse_total)) {
    values[0] = fma(share, delta, sum);
    sum_lanes<kWarpSize>(values);
    mean += lacking(values[0]);
  }
  return {mean, m2 + (mean - mean)};  // not a number where there is no mean
}

// The moments of the union of the sets of kWidth neighbouring lanes (a power of two), in all of
// them; the first lane's set is not empty. Two passes over the sets' means: no division by counts,
// and equal means leave no variance.
template <int kWidth, class A>
__device__ __forceinline__ SetMoments<A> merge_lanes(const SetMoments<A>& set, A count,
                                                     A inverse_total) {
  const A reference = reference_point(__shfl_sync(kAllLanes, set.mean, 0, kWidth));
  const A share = count * inverse_total;
  A values[] = {share * (set.mean - reference)};
  sum_lanes<kWidth>(values);
  const A mean = reference + values[0];
  const A delta = set.mean - mean;
  values[0] = fma(count * delta, delta, set.m2);
  sum_lanes<kWidth>(values);
  return {mean, values[0]};
}

// How many of `columns` columns, `size` to each set, are in set `index`; as a float, for it is
// multiplied with. The last `overhang` of them are in the set of the one before them.
template <class A>
__device__ __forceinline__ A columns_of_set(int columns, int size, int index, int overhang = 0) {
  const int left = columns - overhang - index * size;
  const A count = fmax(A(0), fmin(static_cast<A>(left), static_cast<A>(size)));
  return left > 0 && left <= size ? count + static_cast<A>(overhang) : count;
}

// The same one after the other, without shuffles, of kFew at the most. `whole`: columns but for
// those that the last set has beside its size.
template <int kFew, class A>
__device__ __forceinline__ SetMoments<A> merge_few_sets(const SetMoments<A>* sets, int columns,
                                                        int size, A inverse_columns, int whole) {
  const auto count = [&](int i) {
    return static_cast<A>((i + 1) * size < whole ? size : columns - i * size);
  };
  const volatile SetMoments<A>* const one = sets;  // or all are kept in registers, which spill
  const A reference = reference_point(sets[0].mean);
  A difference = 0, m2 = 0;
#pragma unroll
  for (int i = 0; i < kFew; ++i) {
    if (i * size < whole) {
      difference = fma(count(i) * inverse_columns, one[i].mean - reference, difference);
    }
  }
  const A mean = reference + difference;
#pragma unroll
  for (int i = 0; i < kFew; ++i) {
    if (i * size < whole) {
      const A delta = one[i].mean - mean;
      m2 += fma(count(i) * delta, delta, one[i].m2);
    }
  }
  return {mean, m2};
}

// The moments of `columns` columns, cut into sets of `size` but for the last one, in every lane of
// the calling warp. At most 32 sets.
template <class A>
__device__ __forceinline__ SetMoments<A> merge_sets(const SetMoments<A>* sets, int columns,
                                                    int size, A inverse_columns, int overhang = 0) {
  const int lane = threadIdx.x % kWarpSize;
  const auto merge = [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    const int index = lane % kWidth;
    const A count = columns_of_set<A>(columns, size, index, overhang);
    return merge_lanes<kWidth>(count > 0 ? sets[index] : SetMoments<A>(), count, inverse_columns);
  };
  constexpr int kFew = 4;
  const int whole = columns - overhang;
  if (whole <= size) return sets[0];
  if (whole <= kFew * size)
    return merge_few_sets<kFew>(sets, columns, size, inverse_columns, whole);
  if (whole <= 8 * size) return merge(std::integral_constant<int, 8>());
  return merge(std::integral_constant<int, kWarpSize>());
}

// The same for any number of sets, too large for an outlier to move their means far.
template <class A, class Index>
__device__ __forceinline__ SetMoments<A> merge_many_sets(const SetMoments<A>* sets, Index number,
                                                         Index columns, Index size,
                                                         A inverse_columns) {
  const auto share = [&](Index i) {
    return static_cast<A>(i + 1 < number ? size : columns - i * size) * inverse_columns;
  };
  const A reference = reference_point(sets[0].mean);
  A values[] = {0};
#pragma unroll 1
  for (Index i = threadIdx.x % kWarpSize; i < number; i += kWarpSize) {
    values[0] = fma(share(i), sets[i].mean - reference, values[0]);
  }
  sum_lanes<kWarpSize>(values);
  const A mean = reference + values[0];
  values[0] = 0;
#pragma unroll 1
  for (Index i = threadIdx.x % kWarpSize; i < number; i += kWarpSize) {
    const A delta = sets[i].mean - mean;
    values[0] += fma(share(i) * static_cast<A>(columns) * delta, delta, sets[i].m2);
  }
  sum_lanes<kWarpSize>(values);
  return {mean, values[0]};
}

}  // namespace fastnorm::cuda
