// The backward: dx, dw and db.
// Included once per instruction set, by layer_norm_kernels.h: see there.
//
// With n = (x - mean) * rstd and g = weight * dy, and means over the row's columns:
//   dx = rstd * (g - mean(g) - n * mean(g * n)),  dw = sum of dy * n,  db = sum of dy over rows.

// One tile of some rows that lie a fixed distance apart. All pointers are to the tile's first
// column; dw, db are sums to add to; `row_sums` holds two per row to add to: of g and of g * n.
template <typename F>
struct TileOfRows {
  const void* dy;
  int64_t dy_stride;
  const void* x;
  int64_t x_stride;
  const void* weight;
  int64_t weight_step;
  const F* mean;
  const F* rstd;
  F* dw;
  F* db;
  double* row_sums;
  int64_t cols;
};

template <typename F>
using AddTile = void (*)(const TileOfRows<F>& tile);

// kRows rows together, so that the sums over rows are loaded and stored once for all of them.
template <int kRows, bool kDx, bool kDw, bool kDb, typename Dy, typename X, typename W>
struct TileSums {
  using F = Float<X>;
  static constexpr int64_t kStep = kLanes<F>;

  const Dy* dy;
  int64_t dy_stride;
  const X* x;
  int64_t x_stride;
  Parameter<W> weight;
  F* dw;
  F* db;
  F mean[kRows];
  F rstd[kRows];
  Vector<F> g_sums[kRows];
  Vector<F> gn_sums[kRows];

  template <bool kMasked>
  FASTNORM_INLINE void add(int64_t column, Bits<F> mask) {
    Vector<F> dw_sums, db_sums, weights;
    if constexpr (kDw) dw_sums = load(dw + column);
    if constexpr (kDb) db_sums = load(db + column);
    if constexpr (kDx) weights = weight[column];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      Vector<F> grad = load(dy + r * dy_stride + column);
      if constexpr (kMasked) grad = masked<F>(grad, mask);
      if constexpr (kDb) db_sums += grad;
      if constexpr (kDx || kDw) {
        Vector<F> n = (load(x + r * x_stride + column) - mean[r]) * rstd[r];
        if constexpr (kMasked) n = masked<F>(n, mask);
        if constexpr (kDw) dw_sums += grad * n;
        if constexpr (kDx) {
          Vector<F> g = weights * grad;
          if constexpr (kMasked) g = masked<F>(g, mask);
          g_sums[r] += g;
          gn_sums[r] += g * n;
        }
      }
    }
    if constexpr (kDw) store(dw + column, dw_sums);
    if constexpr (kDb) store(db + column, db_sums);
  }

  [[gnu::noinline]] static void run(const TileOfRows<F>& tile) {
    TileSums sums;
    sums.dy = static_cast<const Dy*>(tile.dy);
    sums.dy_stride = tile.dy_stride;
    sums.x = static_cast<const X*>(tile.x);
    sums.x_stride = tile.x_stride;
    sums.weight = {static_cast<const W*>(tile.weight), tile.weight_step};
    sums.dw = tile.dw;
    sums.db = tile.db;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      sums.mean[r] = tile.mean[r];
      sums.rstd[r] = tile.rstd[r];
      sums.g_sums[r] = Vector<F>{};
      sums.gn_sums[r] = Vector<F>{};
    }
    const int64_t cols = tile.cols;
    int64_t i = 0;
    for (; i + kStep <= cols; i += kStep) sums.template add<false>(i, Bits<F>{});
    if (i < cols) sums.template add<true>(cols - kStep, last_lanes<F>(cols % kStep));
    if constexpr (kDx) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        tile.row_sums[2 * r] += sum_lanes<F>(sums.g_sums[r]);
        tile.row_sums[2 * r + 1] += sum_lanes<F>(sums.gn_sums[r]);
      }
    }
  }
};

template <int kRows, typename Dy, typename X, typename W>
AddTile<Float<X>> choose_sums(const BackwardArgs& args) {
  const bool dw = args.dw != nullptr, db = args.db != nullptr;
  if (args.dx != nullptr) {
    if (dw && db) return TileSums<kRows, true, true, true, Dy, X, W>::run;
    if (dw) return TileSums<kRows, true, true, false, Dy, X, W>::run;
    if (db) return TileSums<kRows, true, false, true, Dy, X, W>::run;
    return TileSums<kRows, true, false, false, Dy, X, W>::run;
  }
  // The weight is not read, nor is x for db alone.
  if (dw && db) return TileSums<kRows, false, true, true, Dy, X, Float<X>>::run;
  if (dw) return TileSums<kRows, false, true, false, Dy, X, Float<X>>::run;
  return TileSums<kRows, false, false, true, Dy, Float<X>, Float<X>>::run;
}

// The row's mean(g) and mean(g * n), and its statistics.
template <typename F>
struct RowScalars {
  F mean;
  F rstd;
  F g_mean;
  F gn_mean_rstd;
};

template <typename F>
FASTNORM_INLINE Vector<F> dx_of(Vector<F> dy, Vector<F> x, Vector<F> weight,
                                const RowScalars<F>& row) {
  return (weight * dy - row.g_mean - (x - row.mean) * row.gn_mean_rstd) * row.rstd;
}

template <typename Dy, typename X, typename W>
[[gnu::noinline]] void write_dx(const Dy* __restrict dy, const X* __restrict x, Parameter<W> weight,
                                const RowScalars<Float<X>> row, X* __restrict dx, int64_t cols,
                                int64_t dy_ahead, int64_t x_ahead, int64_t dx_ahead) {
  using F = Float<X>;
  constexpr int64_t kStep = kLanes<F>;
  constexpr bool kEvenOdd = kIsBFloat16<Dy> && kIsBFloat16<X> && kIsBFloat16<W>;
  int64_t i = 0;
  for (; i + 2 * kStep <= cols; i += 2 * kStep) {
    __builtin_prefetch(dy + i + dy_ahead);
    __builtin_prefetch(x + i + x_ahead);
    __builtin_prefetch(dx + i + dx_ahead, 1);
    const Pair<F> dys = load_pair<kEvenOdd>(dy + i);
    const Pair<F> xs = load_pair<kEvenOdd>(x + i);
    const Pair<F> weights = weight.template pair<kEvenOdd>(i);
    store_pair<kEvenOdd>(dx + i, {dx_of<F>(dys.first, xs.first, weights.first, row),
                                  dx_of<F>(dys.second, xs.second, weights.second, row)});
  }
  if (i + kStep <= cols) {
    store(dx + i, dx_of<F>(load(dy + i), load(x + i), weight[i], row));
    i += kStep;
  }
  if (i < cols) {
    i = cols - kStep;
    store(dx + i, dx_of<F>(load(dy + i), load(x + i), weight[i], row));
  }
}

template <typename F>
struct BackwardJob {
  const BackwardArgs* args;
  const BackwardPartition* partition;
  F* slots;
  AddTile<F> add_rows;  // of kGroup rows
  AddTile<F> add_row;
  int64_t tiles;
  // Where rows are shared: the block at work, its rows' tiles' sums, and its rows' sums.
  int64_t first_row;
  int64_t block_rows;
  double* tile_sums;
  double* row_sums;
};

template <typename F>
void set_to_zero(F* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = 0;
}

template <typename Dy, typename X, typename W>
struct Backward {
  using F = Float<X>;
  using Job = BackwardJob<F>;

  static RowScalars<F> row_scalars(const BackwardArgs& args, int64_t row, const double* sums) {
    const F mean = static_cast<const F*>(args.mean)[row];
    const F rstd = static_cast<const F*>(args.rstd)[row];
    const double inverse = 1 / static_cast<double>(args.cols);
    const F gn_mean = static_cast<F>(sums[1] * inverse);
    return {mean, rstd, static_cast<F>(sums[0] * inverse), gn_mean * rstd};
  }

  // Only dx needs the weight: without it W may not be the weight's type.
  static Parameter<W> weight_of(const BackwardArgs& args, NarrowRows<W>* narrow) {
    return parameter<W>(args.dx == nullptr ? nullptr : args.weight, 1, args.cols, narrow);
  }

  // Adds blocks of whole rows into their slots, and writes the rows' dx.
  static void whole_rows(void* context, int64_t begin, int64_t end) {
    const Job& job = *static_cast<const Job*>(context);
    const BackwardArgs& args = *job.args;
    const BackwardPartition& partition = *job.partition;
    const int64_t cols = args.cols;
    const bool narrow = cols < kLanes<F>;
    NarrowRows<Dy, kGroup> narrow_dy;
    NarrowRows<X, kGroup> narrow_x;
    NarrowRows<X> narrow_dx;
    NarrowRows<W> narrow_weight;
    const Parameter<W> weight = weight_of(args, &narrow_weight);
    for (int64_t block = begin; block < end; ++block) {
      F* dw = nullptr;
      F* db = nullptr;
      if (partition.slots > 0) {
        F* const slot = job.slots + block * partition.slot_stride;
        set_to_zero(slot, partition.slot_stride);
        dw = slot + partition.margin;
        db = dw + partition.slot_stride / 2;
      }
      const int64_t first = block * partition.rows_per_block;
      const int64_t last = first + partition.rows_per_block < args.rows
                               ? first + partition.rows_per_block
                               : args.rows;
      for (int64_t row = first; row < last;) {
        const int64_t group = last - row >= kGroup ? kGroup : 1;
        const Dy* dy = row_at<Dy>(args.dy, row, args.dy_row_stride);
        const X* x = row_at<X>(args.x, row, args.x_row_stride);
        int64_t dy_stride = args.dy_row_stride;
        int64_t x_stride = args.x_row_stride;
        if (narrow) {
          for (int64_t r = 0; r < group; ++r) {
            copy(dy + r * dy_stride, narrow_dy.row(r, cols), cols);
            copy(x + r * x_stride, narrow_x.row(r, cols), cols);
          }
          dy = narrow_dy.row(0, cols);
          x = narrow_x.row(0, cols);
          dy_stride = narrow_dy.kStride;
          x_stride = narrow_x.kStride;
        }
        double sums[2 * kGroup] = {};
        for (int64_t i = 0; i < job.tiles; ++i) {
          const Tile tile = tile_at(i, cols);
          const TileOfRows<F> tile_of_rows{dy + tile.begin,
                                           dy_stride,
                                           x + tile.begin,
                                           x_stride,
                                           weight.from(tile.begin).data,
                                           weight.step,
                                           static_cast<const F*>(args.mean) + row,
                                           static_cast<const F*>(args.rstd) + row,
                                           dw == nullptr ? nullptr : dw + tile.begin,
                                           db == nullptr ? nullptr : db + tile.begin,
                                           sums,
                                           tile.size};
          (group == kGroup ? job.add_rows : job.add_row)(tile_of_rows);
        }
        if (args.dx != nullptr) {
          const int64_t ahead = last - row >= 2 * group ? group : 0;
          for (int64_t r = 0; r < group; ++r) {
            const bool is_last = row + r + 1 == last;
            X* const dx = static_cast<X*>(args.dx) + (row + r) * cols;
            X* const dx_or_copy = narrow ? narrow_dx.row(0, cols) : dx;
            write_dx(dy + r * dy_stride, x + r * x_stride, weight,
                     row_scalars(args, row + r, sums + 2 * r), dx_or_copy, cols, ahead * dy_stride,
                     ahead * x_stride, is_last ? 0 : cols);
            if (narrow) copy<X>(dx_or_copy, dx, cols);
          }
        }
        row += group;
      }
    }
  }

  // Adds one tile of all the block's rows to dw and db, and writes the rows' sums in this tile.
  static void shared_sums(void* context, int64_t begin, int64_t end) {
    const Job& job = *static_cast<const Job*>(context);
    const BackwardArgs& args = *job.args;
    NarrowRows<W> constant_weight;
    const Parameter<W> weight = weight_of(args, &constant_weight);
    F dw[2 * kTile];
    F db[2 * kTile];
    for (int64_t i = begin; i < end; ++i) {
      const Tile tile = tile_at(i, args.cols);
      double* sums = job.tile_sums + 2 * i * job.block_rows;
      set_to_zero(sums, 2 * job.block_rows);
      set_to_zero(dw, tile.size);
      set_to_zero(db, tile.size);
      for (int64_t row = 0; row < job.block_rows;) {
        const int64_t group = job.block_rows - row >= kGroup ? kGroup : 1;
        const int64_t r = job.first_row + row;
        const TileOfRows<F> tile_of_rows{row_at<Dy>(args.dy, r, args.dy_row_stride) + tile.begin,
                                         args.dy_row_stride,
                                         row_at<X>(args.x, r, args.x_row_stride) + tile.begin,
                                         args.x_row_stride,
                                         weight.from(tile.begin).data,
                                         weight.step,
                                         static_cast<const F*>(args.mean) + r,
                                         static_cast<const F*>(args.rstd) + r,
                                         dw,
                                         db,
                                         sums + 2 * row,
                                         tile.size};
        (group == kGroup ? job.add_rows : job.add_row)(tile_of_rows);
        row += group;
      }
      if (job.partition->slots == 0) continue;
      F* dw_slot = job.slots + job.partition->margin + tile.begin;
      F* db_slot = dw_slot + job.partition->slot_stride / 2;
      for (int64_t column = 0; column < tile.size; ++column) {
        dw_slot[column] += dw[column];
        db_slot[column] += db[column];
      }
    }
  }

  static void shared_dx(void* context, int64_t begin, int64_t end) {
    const Job& job = *static_cast<const Job*>(context);
    const BackwardArgs& args = *job.args;
    NarrowRows<W> constant_weight;
    const Parameter<W> weight = weight_of(args, &constant_weight);
    for (int64_t i = begin; i < end; ++i) {
      const Tile tile = tile_at(i % job.tiles, args.cols);
      const int64_t row = job.first_row + i / job.tiles;
      write_dx(row_at<Dy>(args.dy, row, args.dy_row_stride) + tile.begin,
               row_at<X>(args.x, row, args.x_row_stride) + tile.begin, weight.from(tile.begin),
               row_scalars(args, row, job.row_sums + 2 * (i / job.tiles)),
               static_cast<X*>(args.dx) + row * args.cols + tile.begin, tile.size, 0, 0, 0);
    }
  }

  static void shared_rows(Job& job, const ThreadPool& pool) {
    const BackwardArgs& args = *job.args;
    if (job.partition->slots > 0) set_to_zero(job.slots, job.partition->slot_stride);
    for (int64_t block = 0; block < job.partition->blocks; ++block) {
      job.first_row = block * job.partition->rows_per_block;
      job.block_rows = args.rows - job.first_row;
      if (job.block_rows > job.partition->rows_per_block) {
        job.block_rows = job.partition->rows_per_block;
      }
      pool.run(job.tiles, 1, shared_sums, &job);
      if (args.dx == nullptr) continue;
      set_to_zero(job.row_sums, 2 * job.block_rows);
      for (int64_t tile = 0; tile < job.tiles; ++tile) {
        const double* sums = job.tile_sums + 2 * tile * job.block_rows;
        for (int64_t i = 0; i < 2 * job.block_rows; ++i) job.row_sums[i] += sums[i];
      }
      pool.run(job.block_rows * job.tiles, 1, shared_dx, &job);
    }
  }

  static void run(const BackwardArgs& args, void* workspace, const ThreadPool& pool) {
    const BackwardPartition partition = fastnorm::cpu::partition(args);
    Job job{};
    job.args = &args;
    job.partition = &partition;
    job.tile_sums = static_cast<double*>(workspace);
    job.tiles = tile_count(args.cols);
    job.slots = reinterpret_cast<F*>(job.tile_sums + partition.row_sums);
    job.add_rows = choose_sums<kGroup, Dy, X, W>(args);
    job.add_row = choose_sums<1, Dy, X, W>(args);
    if (partition.share_rows) {
      const int64_t block_rows =
          partition.rows_per_block < args.rows ? partition.rows_per_block : args.rows;
      job.row_sums = job.tile_sums + 2 * job.tiles * block_rows;
      shared_rows(job, pool);
    } else {
      pool.run(partition.blocks, partition.blocks_per_task, whole_rows, &job);
    }
  }
};

// Adds up all slots, in double, for some columns of dw or db, which lies `offset` into each slot.
template <typename F, typename T>
void add_slots(const BackwardPartition& partition, const F* slots, int64_t offset, int64_t begin,
               int64_t end, void* sums) {
  constexpr int64_t kColumns = 256;
  for (int64_t column = begin; column < end; column += kColumns) {
    const int64_t count = end - column < kColumns ? end - column : kColumns;
    double totals[kColumns] = {};
    for (int64_t slot = 0; slot < partition.slots; ++slot) {
      const F* partial = slots + slot * partition.slot_stride + offset + column;
      for (int64_t i = 0; i < count; ++i) totals[i] += partial[i];
    }
    F rounded[kColumns];
    T converted[kColumns];
    for (int64_t i = 0; i < kColumns; ++i) rounded[i] = static_cast<F>(totals[i]);
    for (int64_t i = 0; i < kColumns; i += kLanes<F>) store(converted + i, load(rounded + i));
    copy<T>(converted, static_cast<T*>(sums) + column, count);
  }
}

template <typename F>
using AddSlots = void (*)(const BackwardPartition& partition, const F* slots, int64_t offset,
                          int64_t begin, int64_t end, void* sums);

template <typename F>
AddSlots<F> choose_add_slots(DType dtype) {
  if constexpr (sizeof(F) == sizeof(double)) {
    return add_slots<double, double>;
  } else if (dtype == DType::kFloat16) {
    return add_slots<float, Float16>;
  } else if (dtype == DType::kBFloat16) {
    return add_slots<float, BFloat16>;
  } else {
    return add_slots<float, float>;
  }
}

template <typename F>
struct ColumnSumsJob {
  const BackwardArgs* args;
  const BackwardPartition* partition;
  const F* slots;
};

template <typename F>
void column_sums(void* context, int64_t begin, int64_t end) {
  const ColumnSumsJob<F>& job = *static_cast<const ColumnSumsJob<F>*>(context);
  const BackwardArgs& args = *job.args;
  const BackwardPartition& partition = *job.partition;
  const int64_t dw_offset = partition.margin;
  const int64_t db_offset = partition.margin + partition.slot_stride / 2;
  if (args.dw != nullptr) {
    choose_add_slots<F>(args.weight_dtype)(partition, job.slots, dw_offset, begin, end, args.dw);
  }
  if (args.db != nullptr) {
    choose_add_slots<F>(args.bias_dtype)(partition, job.slots, db_offset, begin, end, args.db);
  }
}

using BackwardRun = void (*)(const BackwardArgs& args, void* workspace, const ThreadPool& pool);

template <typename Dy, typename X>
BackwardRun choose_backward_weight(const BackwardArgs& args) {
  const bool full = args.weight == nullptr || args.dx == nullptr ||
                    args.weight_dtype == accumulation_dtype(args.x_dtype);
  return full ? Backward<Dy, X, Float<X>>::run : Backward<Dy, X, X>::run;
}

template <typename X>
BackwardRun choose_dy(const BackwardArgs& args) {
  switch (args.dy_dtype) {
    case DType::kFloat16:
      return choose_backward_weight<Float16, X>(args);
    case DType::kBFloat16:
      return choose_backward_weight<BFloat16, X>(args);
    default:
      return choose_backward_weight<float, X>(args);
  }
}

BackwardRun choose_backward(const BackwardArgs& args) {
  switch (args.x_dtype) {
    case DType::kFloat16:
      return choose_dy<Float16>(args);
    case DType::kBFloat16:
      return choose_dy<BFloat16>(args);
    case DType::kFloat64:
      return choose_backward_weight<double, double>(args);
    default:
      return choose_dy<float>(args);
  }
}

template <typename F>
void backward_as(const BackwardArgs& args, void* workspace, const ThreadPool& pool) {
  if (args.rows > 0) choose_backward(args)(args, workspace, pool);
  if (args.dw == nullptr && args.db == nullptr) return;
  const BackwardPartition partition = fastnorm::cpu::partition(args);
  const double* start = static_cast<const double*>(workspace);
  ColumnSumsJob<F> job{&args, &partition, reinterpret_cast<const F*>(start + partition.row_sums)};
  constexpr int64_t kPartialsPerTask = 65536;
  pool.run(args.cols, kPartialsPerTask / (partition.slots + 1) + 1, column_sums<F>, &job);
}

void backward(const BackwardArgs& args, void* workspace, const ThreadPool& pool) {
  if (args.cols == 0) return;
  if (args.dx == nullptr && args.dw == nullptr && args.db == nullptr) return;
  const bool is_double = args.x_dtype == DType::kFloat64;
  (is_double ? backward_as<double> : backward_as<float>)(args, workspace, pool);
}
