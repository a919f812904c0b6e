// The forward: y, mean and rstd.
// Included once per instruction set, by layer_norm_kernels.h: see there.

template <typename F>
struct Statistics {
  F mean;
  F rstd;
};

template <typename F>
Statistics<F> statistics_at(const ForwardArgs& args, int64_t row) {
  return {static_cast<const F*>(args.mean)[row], static_cast<const F*>(args.rstd)[row]};
}

template <typename F>
void write_statistics(const ForwardArgs& args, int64_t row, const Moments& moments) {
  const double variance = moments.squares / static_cast<double>(args.cols);
  static_cast<F*>(args.mean)[row] = static_cast<F>(moments.mean);
  static_cast<F*>(args.rstd)[row] = static_cast<F>(1 / __builtin_sqrt(variance + args.eps));
}

template <typename F>
FASTNORM_INLINE Vector<F> normalized(Vector<F> x, const Statistics<F>& row, Vector<F> weight,
                                     Vector<F> bias) {
  return multiply_add<F>((x - row.mean) * row.rstd, weight, bias);
}

// Meanwhile brings the next row, which lies `x_ahead` further on, into the cache.
template <typename X, typename Y, typename W, typename B>
[[gnu::noinline]] void normalize(const X* __restrict x, Parameter<W> weight, Parameter<B> bias,
                                 Statistics<Float<X>> row, Y* __restrict y, int64_t cols,
                                 int64_t x_ahead) {
  using F = Float<X>;
  constexpr int64_t kStep = kLanes<F>;
  constexpr bool kEvenOdd = kIsBFloat16<X> && kIsBFloat16<Y> && kIsBFloat16<W> && kIsBFloat16<B>;
  int64_t i = 0;
  for (; i + 2 * kStep <= cols; i += 2 * kStep) {
    prefetch<2 * kStep>(x + i + x_ahead);
    const Pair<F> values = load_pair<kEvenOdd>(x + i);
    const Pair<F> weights = weight.template pair<kEvenOdd>(i);
    const Pair<F> biases = bias.template pair<kEvenOdd>(i);
    store_pair<kEvenOdd>(y + i, {normalized<F>(values.first, row, weights.first, biases.first),
                                 normalized<F>(values.second, row, weights.second, biases.second)});
  }
  if (i + kStep <= cols) {
    store(y + i, normalized<F>(load(x + i), row, weight[i], bias[i]));
    i += kStep;
  }
  if (i < cols) {
    i = cols - kStep;
    store(y + i, normalized<F>(load(x + i), row, weight[i], bias[i]));
  }
}

constexpr int64_t kShortRow = 512;  // columns of rows that are taken together in the forward

struct ForwardJob {
  const ForwardArgs* args;
  Moments* moments;  // of every row's tiles, where rows are shared
  int64_t tiles;
};

template <typename X, typename Y, typename W, typename B>
struct Forward {
  using F = Float<X>;

  static void whole_rows(void* context, int64_t begin, int64_t end) {
    const ForwardJob& job = *static_cast<const ForwardJob*>(context);
    const ForwardArgs& args = *job.args;
    const int64_t cols = args.cols;
    const bool narrow = cols < kLanes<F>;
    NarrowRows<X, kGroup> narrow_x;
    NarrowRows<Y> narrow_y;
    NarrowRows<W> narrow_weight;
    NarrowRows<B> narrow_bias;
    const Parameter<W> weight = parameter<W>(args.weight, 1, cols, &narrow_weight);
    const Parameter<B> bias = parameter<B>(args.bias, 0, cols, &narrow_bias);
    for (int64_t row = begin; row < end;) {
      const int64_t group = cols <= kShortRow && end - row >= kGroup ? kGroup : 1;
      const X* x = row_at<X>(args.x, row, args.x_row_stride);
      int64_t x_stride = args.x_row_stride;
      if (narrow) {
        for (int64_t r = 0; r < group; ++r) copy(x + r * x_stride, narrow_x.row(r, cols), cols);
        x = narrow_x.row(0, cols);
        x_stride = narrow_x.kStride;
      }
      Moments moments[kGroup];
      if (group == kGroup) {
        tile_moments<kGroup, 1>(x, x_stride, cols, moments);
      } else if (cols <= kShortRow) {
        tile_moments<1, 1>(x, 0, cols, moments);
      } else {
        moments[0] = long_row_moments(x, cols, job.tiles);
      }
      for (int64_t r = 0; r < group; ++r) write_statistics<F>(args, row + r, moments[r]);
      for (int64_t r = 0; r < group; ++r) {
        const bool is_last = row + r + 1 == end;
        Y* const y = static_cast<Y*>(args.y) + (row + r) * cols;
        Y* const y_or_copy = narrow ? narrow_y.row(0, cols) : y;
        normalize(x + r * x_stride, weight, bias, statistics_at<F>(args, row + r), y_or_copy, cols,
                  is_last ? 0 : x_stride);
        if (narrow) copy<Y>(y_or_copy, y, cols);
      }
      row += group;
    }
  }

  static Moments long_row_moments(const X* x, int64_t cols, int64_t tiles) {
    Moments moments;
    const Tile first = tile_at(0, cols);
    tile_moments<1, 2>(x, 0, first.size, &moments);
    RowMoments all(moments, first.size);
    for (int64_t i = 1; i < tiles; ++i) {
      const Tile tile = tile_at(i, cols);
      tile_moments<1, 2>(x + tile.begin, 0, tile.size, &moments);
      all.add(moments, tile.size);
    }
    return all.all();
  }

  static void tiles_moments(void* context, int64_t begin, int64_t end) {
    const ForwardJob& job = *static_cast<const ForwardJob*>(context);
    for (int64_t i = begin; i < end; ++i) {
      const Tile tile = tile_at(i % job.tiles, job.args->cols);
      const X* x = row_at<X>(job.args->x, i / job.tiles, job.args->x_row_stride);
      tile_moments<1, 2>(x + tile.begin, 0, tile.size, job.moments + i);
    }
  }

  static void tiles_normalize(void* context, int64_t begin, int64_t end) {
    const ForwardJob& job = *static_cast<const ForwardJob*>(context);
    const ForwardArgs& args = *job.args;
    NarrowRows<W> constant_weight;
    NarrowRows<B> constant_bias;
    const Parameter<W> weight = parameter<W>(args.weight, 1, args.cols, &constant_weight);
    const Parameter<B> bias = parameter<B>(args.bias, 0, args.cols, &constant_bias);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / job.tiles;
      const Tile tile = tile_at(i % job.tiles, args.cols);
      normalize(row_at<X>(args.x, row, args.x_row_stride) + tile.begin, weight.from(tile.begin),
                bias.from(tile.begin), statistics_at<F>(args, row),
                static_cast<Y*>(args.y) + row * args.cols + tile.begin, tile.size, 0);
    }
  }

  static void run(const ForwardArgs& args, Moments* scratch, const ThreadPool& pool) {
    const ForwardPartition partition = fastnorm::cpu::partition(args);
    ForwardJob job{&args, scratch, tile_count(args.cols)};
    if (!partition.share_rows) {
      pool.run(args.rows, partition.rows_per_task, whole_rows, &job);
      return;
    }
    pool.run(args.rows * job.tiles, 1, tiles_moments, &job);
    for (int64_t row = 0; row < args.rows; ++row) {
      const Moments* tiles = scratch + row * job.tiles;
      RowMoments moments(tiles[0], tile_at(0, args.cols).size);
      for (int64_t tile = 1; tile < job.tiles; ++tile) {
        moments.add(tiles[tile], tile_at(tile, args.cols).size);
      }
      write_statistics<F>(args, row, moments.all());
    }
    pool.run(args.rows * job.tiles, 1, tiles_normalize, &job);
  }
};

using ForwardRun = void (*)(const ForwardArgs& args, Moments* scratch, const ThreadPool& pool);

// A missing weight or bias is a float constant whatever its dtype.
template <typename X, typename Y, typename W>
ForwardRun choose_bias(const ForwardArgs& args) {
  const bool full = args.bias == nullptr || args.bias_dtype == accumulation_dtype(args.x_dtype);
  return full ? Forward<X, Y, W, Float<X>>::run : Forward<X, Y, W, X>::run;
}

template <typename X, typename Y>
ForwardRun choose_weight(const ForwardArgs& args) {
  const bool full = args.weight == nullptr || args.weight_dtype == accumulation_dtype(args.x_dtype);
  return full ? choose_bias<X, Y, Float<X>>(args) : choose_bias<X, Y, X>(args);
}

template <typename X>
ForwardRun choose_y(const ForwardArgs& args) {
  switch (args.y_dtype) {
    case DType::kFloat16:
      return choose_weight<X, Float16>(args);
    case DType::kBFloat16:
      return choose_weight<X, BFloat16>(args);
    default:
      return choose_weight<X, float>(args);
  }
}

ForwardRun choose_forward(const ForwardArgs& args) {
  switch (args.x_dtype) {
    case DType::kFloat16:
      return choose_y<Float16>(args);
    case DType::kBFloat16:
      return choose_y<BFloat16>(args);
    case DType::kFloat64:
      return choose_weight<double, double>(args);
    default:
      return choose_y<float>(args);
  }
}

template <typename F>
void fill_empty_rows(const ForwardArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    static_cast<F*>(args.mean)[row] = 0;
    static_cast<F*>(args.rstd)[row] = static_cast<F>(__builtin_nan(""));
  }
}

void forward(const ForwardArgs& args, Moments* scratch, const ThreadPool& pool) {
  if (args.rows == 0) return;
  if (args.cols > 0) return choose_forward(args)(args, scratch, pool);
  const bool is_double = args.x_dtype == DType::kFloat64;
  is_double ? fill_empty_rows<double>(args) : fill_empty_rows<float>(args);
}
