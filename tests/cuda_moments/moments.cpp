// Moments of rows of float32 as the CUDA kernels of the forward take them, on the CPU.
#include "moments.cuh"

#include <algorithm>
#include <vector>

namespace {

using namespace fastnorm::cuda;

// As forward_short_rows: a row in kLanes lanes, which have the chunks lane, lane + kLanes, ...
template <int kLanes, int kChunks, int kColumns>
void take_short_rows(const float* x, int rows, int cols, SetMoments<float>* result) {
  for (int first = 0; first < rows; first += kWarpSize / kLanes) {
    Warp::run([&] {
      const int lane = static_cast<int>(threadIdx.x) % kLanes;
      const int row = first + static_cast<int>(threadIdx.x) / kLanes;
      const auto add_up = [&](auto& thread) {
        for (int k = 0; k < kChunks; ++k) {
          const int column = (lane + k * kLanes) * kColumns, left = cols - column;
          Pack<float, kColumns> chunk = {};
          for (int i = 0; i < std::min(left, kColumns) && row < rows; ++i) {
            chunk.elements[i] = x[row * cols + column + i];
          }
          thread.add_chunk(k, chunk, left >= kColumns);
          for (int i = 0; i < left && left < kColumns; ++i) thread.add(chunk.elements[i]);
        }
      };
      const float inverse_cols = 1.f / cols;
      const auto by_differences = [&](SetMoments<float>(&moments)[1]) {
        ChunkMoments<float, kChunks, kColumns> threads[1];
        add_up(threads[0]);
        merge_threads<kLanes>(moments, threads, static_cast<float>(cols), inverse_cols);
      };
      SetMoments<float> moments[1];
      if constexpr (kSumsFirst<kColumns, kLanes, kChunks>) {
        ThreadSums<float> threads[1];
        add_up(threads[0]);
        merge_sums<kLanes>(moments, threads, inverse_cols, by_differences);
      } else {
        by_differences(moments);
      }
      if (lane == 0 && row < rows) result[row] = moments[0];
    });
  }
}

// As forward_rows: warps have neighbouring chunks, the last one the columns behind the last whole
// chunk too, and merge their sums, or their sets.
template <int kLanes, int kChunks, int kColumns>
void take_rows(const float* x, int rows, int cols, SetMoments<float>* result) {
  static_assert(kLanes == kWarpSize);
  constexpr int kSize = kWarpSize * kChunks * kColumns;
  const int overhang = cols % kColumns, whole = cols - overhang;
  const int warps = (whole + kSize - 1) / kSize;
  const float inverse_cols = 1.f / cols;
  std::vector<SetMoments<float>> sets(warps);
  for (int row = 0; row < rows; ++row) {
    const float* const columns = x + static_cast<size_t>(row) * cols;
    // What one of a warp's threads has.
    const auto add_up = [&](int warp, auto& thread) {
      const int begin = warp * kSize, end = std::min(begin + kSize, whole);
      const int lane = static_cast<int>(threadIdx.x);
      for (int k = 0; k < kChunks; ++k) {
        const int column = begin + (k * kWarpSize + lane) * kColumns;
        Pack<float, kColumns> chunk = {};
        if (column < end) std::copy_n(columns + column, kColumns, chunk.elements);
        thread.add_chunk(k, chunk, column < end);
      }
      const bool last = end == whole;
      if (last && lane < overhang) thread.add(columns[whole + lane]);
      return static_cast<float>(end - begin + (last ? overhang : 0));
    };
    if constexpr (kSumsFirst<kColumns, kLanes, kChunks>) {
      WarpSums<kWarpSize> sums;
      bool taken = false;
      for (int warp = 0; warp < warps; ++warp) {
        Warp::run([&] {
          ThreadSums<float> thread;
          add_up(warp, thread);
          sums.put(warp, thread);
        });
      }
      Warp::run([&] {
        SetMoments<float> moments;
        const bool does = take_sums(moments, sums.merge(warps), inverse_cols);
        if (threadIdx.x == 0) taken = does, result[row] = moments;
      });
      if (taken) continue;
    }
    for (int warp = 0; warp < warps; ++warp) {
      Warp::run([&] {
        ChunkMoments<float, kChunks, kColumns> thread;
        const float total = add_up(warp, thread);
        const SetMoments<float> moments = merge_warp(thread, total, 1 / total);
        if (threadIdx.x == 0) sets[warp] = moments;
      });
    }
    Warp::run([&] {
      const SetMoments<float> moments =
          merge_sets<kWarpSize>(sets.data(), cols, kSize, inverse_cols, overhang);
      if (threadIdx.x == 0) result[row] = moments;
    });
  }
}

struct Shape {
  int lanes, chunks, columns;
  void (*take_short_rows)(const float*, int, int, SetMoments<float>*);
  void (*take_rows)(const float*, int, int, SetMoments<float>*);
};

template <int kLanes, int kChunks, int kColumns>
constexpr Shape shape() {
  Shape result = {kLanes, kChunks, kColumns, take_short_rows<kLanes, kChunks, kColumns>, nullptr};
  if constexpr (kLanes == kWarpSize) result.take_rows = take_rows<kLanes, kChunks, kColumns>;
  return result;
}

constexpr Shape kShapes[] = {
    shape<1, 1, 4>(),  shape<1, 2, 4>(),  shape<2, 1, 4>(),  shape<4, 2, 4>(),  shape<4, 3, 4>(),
    shape<4, 4, 4>(),  shape<4, 5, 4>(),  shape<8, 4, 4>(),  shape<16, 4, 4>(), shape<16, 5, 4>(),
    shape<32, 3, 4>(), shape<32, 4, 4>(), shape<32, 5, 4>(), shape<32, 8, 4>(), shape<1, 1, 8>(),
    shape<1, 3, 8>(),  shape<1, 5, 8>(),  shape<2, 4, 8>(),  shape<2, 5, 8>(),  shape<4, 5, 8>(),
    shape<8, 4, 8>(),  shape<16, 4, 8>(), shape<32, 4, 8>(), shape<32, 5, 8>(), shape<32, 8, 8>(),
};

}  // namespace

// Mean and rstd of each row. False where there is no such shape.
extern "C" bool take_moments(bool by_blocks, int lanes, int chunks, int columns, const float* x,
                             int rows, int cols, float eps, float* moments) {
  for (const Shape& shape : kShapes) {
    if (shape.lanes != lanes || shape.chunks != chunks || shape.columns != columns) continue;
    const auto take = by_blocks ? shape.take_rows : shape.take_short_rows;
    if (take == nullptr) return false;
    std::vector<SetMoments<float>> result(rows);
    take(x, rows, cols, result.data());
    for (int row = 0; row < rows; ++row) {
      moments[2 * row] = result[row].mean;
      moments[2 * row + 1] = rstd_of(result[row], 1.f / cols, eps);
    }
    return true;
  }
  return false;
}
