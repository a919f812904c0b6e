// The mean of a row and the sum of squared differences from it.
// Included once per instruction set, by layer_norm_kernels.h: see there.

// Adds in pairs, so that 2^n equal numbers have their exact sum.
template <typename F, int kCount>
FASTNORM_INLINE F sum_all(Vector<F> (&sums)[kCount]) {
#pragma GCC unroll 4
  for (int half = kCount / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
  }
  return sum_lanes<F>(sums[0]);
}

// The mean of a tile's first columns, nearly. Each term is divided before it is added, so that the
// sum does not overflow where the mean does not. Of equal numbers it is that number.
template <typename X>
FASTNORM_INLINE Float<X> mean_of_first(const X* x, int64_t cols) {
  using F = Float<X>;
  constexpr int64_t kStep = kLanes<F>;
  constexpr int kVectors = 16;
  if (cols < kStep) {
    const Vector<F> row = load(x + cols - kStep);
    const F inverse = F(1) / static_cast<F>(cols);
    const F first = row[kStep - cols];
    return first + sum_lanes<F>(masked<F>((row - first) * inverse, last_lanes<F>(cols)));
  }
  if (cols < kVectors * kStep) return sum_lanes<F>(load(x) * (F(1) / kStep));
  Vector<F> terms[kVectors];
#pragma GCC unroll 16
  for (int k = 0; k < kVectors; ++k) terms[k] = load(x + k * kStep) * (F(1) / (kVectors * kStep));
  return sum_all<F>(terms);
}

template <typename F>
FASTNORM_INLINE void add_deviation(Vector<F> deviation, Vector<F> inverse, Vector<F>* mean,
                                   Vector<F>* squares) {
  *mean = multiply_add<F>(deviation, inverse, *mean);
  *squares = multiply_add<F>(deviation, deviation, *squares);
}

// The mean of deviations from `near`, and the sum of their squares.
template <typename F>
struct Deviations {
  F mean;
  F squares;
};

// Of a tile of kRows rows together. Short rows are taken several together to hide the latency of
// each one's last sums, long rows with more sums side by side to hide the latency of addition.
template <int kRows, int kPairs, typename X>
FASTNORM_INLINE void deviations_from(const Float<X> (&near)[kRows], const X* x, int64_t row_stride,
                                     int64_t cols, Deviations<Float<X>> (&result)[kRows]) {
  using F = Float<X>;
  constexpr int64_t kStep = kLanes<F>;
  constexpr bool kEvenOdd = kIsBFloat16<X>;
  const Vector<F> inverse = F(1) / static_cast<F>(cols) - Vector<F>{};
  Vector<F> means[kRows][2 * kPairs] = {};
  Vector<F> squares[kRows][2 * kPairs] = {};
  int64_t i = 0;
  for (; i + 2 * kPairs * kStep <= cols; i += 2 * kPairs * kStep) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int k = 0; k < kPairs; ++k) {
        const Pair<F> pair = load_pair<kEvenOdd>(x + r * row_stride + i + 2 * k * kStep);
        add_deviation<F>(pair.first - near[r], inverse, &means[r][2 * k], &squares[r][2 * k]);
        add_deviation<F>(pair.second - near[r], inverse, &means[r][2 * k + 1],
                         &squares[r][2 * k + 1]);
      }
    }
  }
  for (; i + kStep <= cols; i += kStep) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      add_deviation<F>(load(x + r * row_stride + i) - near[r], inverse, &means[r][0],
                       &squares[r][0]);
    }
  }
  if (i < cols) {
    const Bits<F> tail = last_lanes<F>(cols % kStep);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vector<F> deviation = load(x + r * row_stride + cols - kStep) - near[r];
      add_deviation<F>(masked<F>(deviation, tail), inverse, &means[r][1], &squares[r][1]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    result[r].mean = sum_all<F>(means[r]);
    result[r].squares = sum_all<F>(squares[r]);
  }
}

template <typename F>
constexpr F kMost = sizeof(F) < sizeof(double) ? F(__FLT_MAX__) : F(__DBL_MAX__);

// Two passes in double, for rows whose squares float32 does not hold, and for infinities and NaN.
template <typename X>
[[gnu::noinline, gnu::cold]] Moments moments_in_double(const X* x, int64_t cols) {
  constexpr int64_t kStep = kLanes<Float<X>>;
  const auto value = [=](int64_t i) -> double {
    const int64_t from = i + kStep <= cols ? i : cols - kStep;
    return load(x + from)[i - from];
  };
  Moments result = {};
  for (int64_t i = 0; i < cols; ++i) result.mean += value(i) / static_cast<double>(cols);
  for (int64_t i = 0; i < cols; ++i) {
    const double deviation = value(i) - result.mean;
    result.squares += deviation * deviation;
  }
  return result;
}

// The moments of a row whose `near` was too far off to be of use: once more, from its mean.
template <typename X>
[[gnu::noinline, gnu::cold]] Moments moments_about(double mean, const X* x, int64_t cols) {
  using F = Float<X>;
  const F near[] = {static_cast<F>(mean)};
  Deviations<F> found[1];
  deviations_from<1, 2>(near, x, 0, cols, found);
  if (!(found[0].squares <= kMost<F>)) return moments_in_double(x, cols);
  const double correction = found[0].mean;
  const double squares = found[0].squares - static_cast<double>(cols) * correction * correction;
  return {near[0] + correction, squares < 0 ? 0 : squares};
}

// One pass over a tile of kRows rows together: the deviations from a near mean correct it and the
// sum of their squares. Where it is d off the mean of n columns, n d^2 is subtracted from that sum;
// a row that this would leave less than half of is walked a second time.
template <int kRows, int kPairs, typename X>
[[gnu::noinline]] void tile_moments(const X* x, int64_t row_stride, int64_t cols,
                                    Moments* moments) {
  using F = Float<X>;
  F near[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) near[r] = mean_of_first(x + r * row_stride, cols);
  Deviations<F> found[kRows];
  deviations_from<kRows, kPairs>(near, x, row_stride, cols, found);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const double correction = found[r].mean;
    const double excess = static_cast<double>(cols) * correction * correction;
    const double remaining = found[r].squares - excess;
    moments[r] = {near[r] + correction, remaining};
    // So written, NaN and infinity come here, too.
    if (!(excess <= remaining && found[r].squares <= kMost<F>)) [[unlikely]] {
      moments[r] = moments_about(near[r] + correction, x + r * row_stride, cols);
    }
  }
}

// Merges a row's tiles, in order (Chan, Golub and LeVeque 1979).
class RowMoments {
 public:
  FASTNORM_INLINE RowMoments(const Moments& first_tile, int64_t cols)
      : all_(first_tile), cols_(static_cast<double>(cols)) {}

  FASTNORM_INLINE void add(const Moments& tile, int64_t cols) {
    const double tile_cols = static_cast<double>(cols);
    const double difference = tile.mean - all_.mean;
    const double share = tile_cols / (cols_ + tile_cols);
    // An infinite mean stays, unless it meets the other infinity or NaN.
    all_.mean += __builtin_isinf(all_.mean) ? tile.mean : difference * share;
    all_.squares += tile.squares + difference * difference * cols_ * share;
    cols_ += tile_cols;
  }

  FASTNORM_INLINE const Moments& all() const { return all_; }

 private:
  Moments all_;
  double cols_;
};
