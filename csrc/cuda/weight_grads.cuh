// dw and db: sums over rows, in two stages and a fixed order. column_sums adds up slices of rows
// where the dx kernel has not done so already; finish_weight_grads adds up the partial sums.
#pragma once

#include <algorithm>

#include "launch.cuh"
#include "tile.cuh"

namespace fastnorm::cuda {

constexpr int kColumnThreads = 256;

// Rounds a value to element i of a tensor of any dtype.
template <class A>
__device__ __forceinline__ void store_element(void* target, DType dtype, int64_t i, A value) {
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(target)[i] = static_cast<float>(value);
      break;
    case DType::kFloat16:
      static_cast<Half*>(target)[i] = narrow<Half>(static_cast<float>(value));
      break;
    case DType::kBFloat16:
      static_cast<BFloat16*>(target)[i] = narrow<BFloat16>(static_cast<float>(value));
      break;
    case DType::kFloat64:
      static_cast<double*>(target)[i] = static_cast<double>(value);
      break;
  }
}

// The same for the first `left` of the columns from `column` on, or all of them, if there is such a
// tensor, of X or float32: value(i) is that of the i-th. kVectorized: all or none are there, and
// aligned.
template <class X, bool kVectorized, class Value>
__device__ __forceinline__ void store_columns(void* target, DType dtype, int64_t column, int left,
                                              const Value& value) {
  constexpr int kColumns = kChunkColumns<X>;
  if (target == nullptr || left <= 0) return;
  if constexpr (kVectorized) {
    const auto store = [&](auto element) {
      using T = decltype(element);
      Pack<T, kColumns> pack;
#pragma unroll
      for (int i = 0; i < kColumns; i += 2) pack.set_pair(i, value(i), value(i + 1));
      store_pack(static_cast<T*>(target) + column, pack);
    };
    if (dtype == DType::kFloat32) {
      store(float());
    } else {
      store(X());
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (i < left) store_element(target, dtype, column + i, value(i));
    }
  }
}

// The sum of `count` numbers, `stride` apart, in eight chains: one alone has twice PyTorch's error
// where 75 numbers are equal.
template <class A>
__device__ __forceinline__ A sum_column(const A* first, int stride, int count) {
  constexpr int kChains = 8;
  A chains[kChains] = {};
  for (int i = 0; i < count; i += kChains) {
#pragma unroll
    for (int j = 0; j < kChains; ++j) {
      if (i + j < count) chains[j] += first[(i + j) * stride];
    }
  }
#pragma unroll
  for (int step = kChains / 2; step > 0; step /= 2) {
#pragma unroll
    for (int j = 0; j < step; ++j) chains[j] += chains[j + step];
  }
  return chains[0];
}

template <class X, class DY>
struct ColumnParameters {
  using A = Accumulator<X>;
  int64_t rows, cols;
  const DY* dy;
  int64_t dy_row_stride;
  const X* x;
  int64_t x_row_stride;
  const A* mean;
  const A* rstd;
  A* dw_partials;
  A* db_partials;
  int64_t tiles;
  int64_t slices;
  int width;           // columns of a tile
  int64_t whole_rows;  // of which granules do not reach beyond the tensors' memory
};

// Blocks that an SM must hold, as plan_columns counts on. More registers are needed where dy is
// wider.
template <class X, class DY, int kWarps>
constexpr int kLeastColumnBlocks =
    std::is_same_v<X, DY> && !std::is_same_v<X, double> ? kWarps * kWarpSize / kColumnThreads : 1;

// Of aligned rows. A block adds up one tile of columns, a chunk per threadIdx.x, over every so many
// groups of rows, which its threadIdx.y share. All blocks together go through x and dy from front
// to back: 65536 x 1024 bfloat16 took 78.5 us on an H200, 80.5 us where each had rows of its own,
// and 75.8 us where all blocks run side by side (see plan_columns); 16384 x 8192 137.8, 138.4 and
// 135.4 us.
//
// (By addresses that advance it is a sixth fewer instructions, but ptxas has all loads of a turn
// ahead of its arithmetic then, and 65536 x 1024 took 77.2 us for 75.0; as one kernel with the next
// one 76.)
template <class X, class DY>
__global__ void __launch_bounds__(kColumnThreads, (kLeastColumnBlocks<X, DY, kColumnWarps>))
    column_sums(const ColumnParameters<X, DY> p) {
  using A = Accumulator<X>;
  constexpr int kColumns = kChunkColumns<X>;
  constexpr int kUnroll = 4;  // rows in flight per thread
  __shared__ A staging[kColumnThreads * kColumns];

  const int64_t slice = blockIdx.x / p.tiles;
  const int64_t tile = blockIdx.x - slice * p.tiles;
  const int64_t begin = tile * blockDim.x * kColumns;
  const int64_t width = static_cast<int64_t>(blockDim.x) * kColumns;
  const Share<X, true> share{static_cast<int>(threadIdx.x), 0,
                             static_cast<int>(min(width, p.cols - begin))};
  const int64_t group = kUnroll * blockDim.y;

  A dw[kColumns] = {}, db[kColumns] = {};
  for (int64_t row = slice * group + threadIdx.y; row < p.rows; row += p.slices * group) {
    Tile<X, 1, kColumns> x[kUnroll];
    Tile<DY, 1, kColumns> dy[kUnroll];
    A mean[kUnroll], rstd[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t r = row + static_cast<int64_t>(u) * blockDim.y;
      const bool active = r < p.rows;
      x[u].load(active ? p.x + r * p.x_row_stride + begin : nullptr, share);
      dy[u].load(active ? p.dy + r * p.dy_row_stride + begin : nullptr, share);
      mean[u] = active ? p.mean[r] : A(0);
      rstd[u] = active ? p.rstd[r] : A(0);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const A g = dy[u].template get<A>(0, i);
        const A xhat = (x[u].template get<A>(0, i) - mean[u]) * rstd[u];
        dw[i] = fma(g, xhat, dw[i]);
        db[i] += g;
      }
    }
  }

  const auto store = [&](const A(&values)[kColumns], A* partials) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      staging[threadIdx.y * width + share.column(0) + i] = values[i];
    }
    __syncthreads();
    for (int column = threadIdx.y * blockDim.x + threadIdx.x; column < share.cols;
         column += kColumnThreads) {
      partials[slice * p.cols + begin + column] =
          sum_column(staging + column, static_cast<int>(width), blockDim.y);
    }
  };
  store(dw, p.dw_partials);
  store(db, p.db_partials);
}

// Of rows that are not aligned. A column's sum does not depend on which thread has it, and rows as
// many apart as a chunk has columns begin at the same place in their granules. So a thread that has
// only such rows adds up granules as they are, some of whose columns may be those of the row before
// or after, and are dropped (kGranules). Where granules of x and dy hold other columns, it reads
// words from wherever a chunk begins. Of 134 MB bfloat16 on an H200, by words and so: 101 columns
// 116 and 79 us, 1023 98 and 78 us, 4095 98 and 78 us, 50257 102 and 88 us (aligned 1024 75 us; a
// mere read 71).
template <class X, class DY, bool kGranules>
__global__ void __launch_bounds__(kColumnThreads,
                                  (kGranules ? kLeastColumnBlocks<X, DY, kUnevenColumnWarps> : 1))
    uneven_column_sums(const ColumnParameters<X, DY> p) {
  using A = Accumulator<X>;
  constexpr int kColumns = kChunkColumns<X>;
  constexpr int kUnroll = 4;  // rows in flight per thread
  __shared__ A staging[kColumnThreads * kColumns];

  const int64_t slice = blockIdx.x / p.tiles;
  const int64_t begin = (blockIdx.x - slice * p.tiles) * p.width;
  const int width = static_cast<int>(min(static_cast<int64_t>(p.width), p.cols - begin));
  const int64_t group = kUnroll * blockDim.y;
  const int64_t first_row = slice * group + threadIdx.y;
  int column = threadIdx.x * kColumns;  // this thread's first one, of the tile
  if constexpr (kGranules) {
    const uintptr_t element = reinterpret_cast<uintptr_t>(p.x) / sizeof(X);
    column -= static_cast<int>((element + first_row * p.x_row_stride + begin) % kColumns);
  }
  A dw[kColumns] = {}, db[kColumns] = {};
  const auto add = [&](int i, A x, A g, A mean, A rstd) {
    dw[i] = fma(g, (x - mean) * rstd, dw[i]);
    db[i] += g;
  };
  const auto load = [&](auto& pack, const auto* first) {  // of the tile in a row, if there is one
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(first)>>;
    pack = load_pack<kGranules, T, kColumns>(first + column, first == nullptr ? 0 : width - column);
  };
  const int64_t rows = kGranules ? p.whole_rows : p.rows;
  const int64_t step = p.slices * group;
  int64_t row = first_row;
  for (; row < rows; row += step) {
    Pack<X, kColumns> x[kUnroll];
    Pack<DY, kColumns> dy[kUnroll];
    A mean[kUnroll], rstd[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t r = row + static_cast<int64_t>(u) * blockDim.y;
      const bool active = r < rows;
      load(x[u], active ? p.x + r * p.x_row_stride + begin : nullptr);
      load(dy[u], active ? p.dy + r * p.dy_row_stride + begin : nullptr);
      mean[u] = active ? p.mean[r] : A(0);
      rstd[u] = active ? p.rstd[r] : A(0);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        add(i, x[u].template get<A>(i), dy[u].template get<A>(i), mean[u], rstd[u]);
      }
    }
  }
  if constexpr (kGranules) {  // the last rows, of which the first turn left out may have some
#pragma unroll 1
    for (row -= step; row < p.rows; row += step) {
#pragma unroll 1
      for (int64_t r = row; r < min(p.rows, row + group); r += blockDim.y) {
        const int64_t x_at = r * p.x_row_stride + begin + column;
        const int64_t dy_at = r * p.dy_row_stride + begin + column;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          if (r < p.whole_rows || column + i < 0 || column + i >= width) continue;
          add(i, widen(p.x[x_at + i]), widen(p.dy[dy_at + i]), p.mean[r], p.rstd[r]);
        }
      }
    }
  }

  const auto store = [&](const A(&values)[kColumns], A* partials) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int to = column + i;
      if (to >= 0 && to < width) staging[threadIdx.y * width + to] = values[i];
    }
    __syncthreads();
    const int threads = blockDim.x * blockDim.y;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < width; i += threads) {
      partials[slice * p.cols + begin + i] = sum_column(staging + i, width, blockDim.y);
    }
  };
  store(dw, p.dw_partials);
  store(db, p.db_partials);
}

template <class X, class DY>
cudaError_t launch_column_sums(const BackwardArgs& args, const BackwardPlan& plan,
                               Accumulator<X>* dw_partials, Accumulator<X>* db_partials,
                               cudaStream_t stream) {
  using A = Accumulator<X>;
  constexpr int kColumns = kChunkColumns<X>;
  ColumnParameters<X, DY> p;
  p.rows = args.rows;
  p.cols = args.cols;
  p.dy = static_cast<const DY*>(args.dy);
  p.dy_row_stride = args.dy_row_stride;
  p.x = static_cast<const X*>(args.x);
  p.x_row_stride = args.x_row_stride;
  p.mean = static_cast<const A*>(args.mean);
  p.rstd = static_cast<const A*>(args.rstd);
  p.dw_partials = dw_partials;
  p.db_partials = db_partials;
  p.tiles = plan.column_tiles;
  p.width = plan.column_width;
  p.slices = plan.partials;
  // Rows behind which the tensors have as many elements as a granule may reach beyond a row.
  const int64_t stride = std::min(args.x_row_stride, args.dy_row_stride);
  const int64_t last_rows = stride > 0 ? (kColumns - 2 + stride) / stride : args.rows;
  p.whole_rows = std::max<int64_t>(0, args.rows - last_rows);
  const uintptr_t x_element = reinterpret_cast<uintptr_t>(args.x) / sizeof(X);
  const uintptr_t dy_element = reinterpret_cast<uintptr_t>(args.dy) / sizeof(DY);
  const bool alike = (x_element - dy_element) % kColumns == 0 &&
                     (args.x_row_stride - args.dy_row_stride) % kColumns == 0;
  // Rows of whole chunks have one shape, aligned or not, which leaves no thread for granules.
  const bool by_granules = args.cols % kColumns != 0 && alike && p.whole_rows > 0;
  const auto kernel = plan.vectorized ? column_sums<X, DY>
                      : by_granules   ? uneven_column_sums<X, DY, true>
                                      : uneven_column_sums<X, DY, false>;
  return Launch(plan.column_tiles * plan.partials, dim3(plan.column_threads, plan.column_rows),
                stream)(kernel, p);
}

// Adds up the rows of partial sums that a plan has, and writes dw and db, each in its own dtype,
// where they are asked for (weight_grads.cu).
template <class A>
cudaError_t finish_weight_grads(const BackwardArgs& args, const BackwardPlan& plan,
                                const A* dw_partials, const A* db_partials, cudaStream_t stream);

}  // namespace fastnorm::cuda
