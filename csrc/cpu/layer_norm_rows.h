// Rows and parameters as the kernels read them, narrow ones too.
// Included once per instruction set, by layer_norm_kernels.h: see there.

constexpr int64_t kGroup = 4;  // rows taken together

template <typename T>
const T* row_at(const void* base, int64_t row, int64_t stride) {
  return static_cast<const T*>(base) + row * stride;
}

// Copies of up to kRows rows narrower than a vector, each at the end of a vector's room. Two
// vectors' room is also what a constant Parameter needs.
template <typename T, int kRows = 2>
struct NarrowRows {
  static constexpr int64_t kStride = kLanes<Float<T>>;
  T room[kRows * kStride] = {};

  T* row(int64_t index, int64_t cols) { return room + (index + 1) * kStride - cols; }
};

template <int64_t kCount, typename T>
FASTNORM_INLINE void prefetch(const T* values) {
  constexpr int64_t kLine = 64 / sizeof(T);
#pragma GCC unroll 4
  for (int64_t i = 0; i < kCount; i += kLine) __builtin_prefetch(values + i);
}

template <typename T>
void copy(const T* from, T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

// weight or bias. A missing one is a constant pair of vectors that all columns read.
template <typename W>
struct Parameter {
  const W* data;
  int64_t step;

  FASTNORM_INLINE Vector<Float<W>> operator[](int64_t column) const {
    return load(data + column * step);
  }
  template <bool kEvenOdd>
  FASTNORM_INLINE Pair<Float<W>> pair(int64_t column) const {
    return load_pair<kEvenOdd>(data + column * step);
  }
  Parameter from(int64_t column) const { return {data + column * step, step}; }
};

template <typename W>
Parameter<W> parameter(const void* data, Float<W> constant, int64_t cols, NarrowRows<W>* narrow) {
  if (data == nullptr) {
    const Vector<Float<W>> all = constant - Vector<Float<W>>{};
    store(narrow->room, all);
    store(narrow->room + kLanes<Float<W>>, all);
    return {narrow->room, 0};
  }
  const W* values = static_cast<const W*>(data);
  if (cols >= kLanes<Float<W>>) return {values, 1};
  copy(values, narrow->row(0, cols), cols);
  return {narrow->row(0, cols), 1};
}
