// A warp's span of one row of the forward: read once, kept packed, written normalized.
#pragma once

#include "moments.cuh"
#include "span.cuh"

namespace fastnorm::cuda {

// y of one chunk, given x minus mean of its columns and what is added to xhat.
template <class Y, class A, class W, int kColumns, class Difference>
__device__ __forceinline__ Pack<Y, kColumns> scale(const Difference& difference, A rstd, A shift,
                                                   const Pack<W, kColumns>& weight,
                                                   const Pack<W, kColumns>& bias) {
  Pack<Y, kColumns> y;
  const auto value = [&](int i) {
    const A xhat = fma(difference(i), rstd, shift);
    return fma(xhat, weight.template get<A>(i), bias.template get<A>(i));
  };
#pragma unroll
  for (int i = 0; i < kColumns; i += 2) y.set_pair(i, value(i), value(i + 1));
  return y;
}

template <class Y, class A, class X, class W, int kColumns>
__device__ __forceinline__ Pack<Y, kColumns> normalize(const Pack<X, kColumns>& x, A mean, A rstd,
                                                       const Pack<W, kColumns>& weight,
                                                       const Pack<W, kColumns>& bias) {
  const auto difference = [&](int i) { return x.template get<A>(i) - mean; };
  // Minus zero leaves even a zero's sign.
  return scale<Y>(difference, rstd, A(-0.0), weight, bias);
}

// The first chunks of a lane stay in registers and the others in shared memory, so that an SM has
// room for the threads, and the bytes on their way, that it takes. A span that is not aligned is
// copied to shared memory whole, and shifted from there: 8192 x 12289 bfloat16 took 137.5 us on an
// H200 in two halves, each read when the one before had arrived, 126.5 us so. (y leaves in halves:
// in the place of x and as one it took 130 us.)
template <class X, int kChunks, int kShared, bool kVectorized>
class RowTile {
 public:
  using A = Accumulator<X>;
  using RowSpan = Span<X, kChunks>;
  static constexpr int kColumns = kChunkColumns<X>;
  static constexpr int kRegisters = kChunks - kShared;
  static constexpr int kStaged = kRegisterChunks;  // chunks of y that pass the stage together
  using Stage = SpanStage<kStaged>;
  // Of shared memory, for each warp.
  static constexpr int kGranules = kShared * kWarpSize + (kVectorized ? 0 : Stage::kGranules);
  static_assert(kGranules * kChunkBytes == forward_shared_bytes(kShared, kVectorized));
  static_assert(kVectorized || kGranules >= SpanStage<kChunks>::kGranules);

  // `shared` is the block's dynamic shared memory.
  __device__ __forceinline__ RowTile(uint4* shared, const RowSpan& span)
      : span_(span),
        shared_(shared + threadIdx.x / kWarpSize * kGranules + span.lane),
        stage_{shared + threadIdx.x / kWarpSize * kGranules + kShared * kWarpSize} {}

  // Reads the span of a row; `end` is the end of the tensor's memory.
  __device__ __forceinline__ void load(const X* row, const X* end) {
    if constexpr (kVectorized) {
#pragma unroll
      for (int k = kRegisters; k < kChunks; ++k) {
        if (span_.has(k)) start_copy(shared_chunk(k), row + span_.column(k));
      }
#pragma unroll
      for (int k = 0; k < kRegisters; ++k) {
        registers_[k] = load_wide<X, kColumns>(row + span_.column(k), span_.has(k));
      }
    } else {
      if (span_.cols <= 0) return;
      const X* const begin = row + span_.begin;
      const SpanStage<kChunks> all{shared_ - span_.lane};  // the stage and what lies before it
      all.fetch(begin, min(span_.cols, RowSpan::kSize), end);
      const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(begin) % kChunkBytes);
      const bool has_tail = span_.lane < span_.tail();
      X tail;
      if (has_tail) {
        const int place = span_.tail_column() - span_.begin;
        tail = *all.template element<X>(offset / static_cast<int>(sizeof(X)) + place);
      }
      with_offset(offset, [&](auto word, int bits) {
        constexpr int kWord = decltype(word)::value;
        if constexpr (kWord < 4) {
#pragma unroll
          for (int k = 0; k < kRegisters; ++k) {
            registers_[k] = to_pack<X, kColumns>(all.template shifted<kWord>(k, bits));
          }
          if constexpr (kShared > 0) __syncwarp();  // they have been read from where others go
#pragma unroll
          for (int k = kRegisters; k < kChunks; ++k) {
            store_granule(shared_chunk(k), all.template shifted<kWord>(k, bits));
            if (k % 2 == 1) __syncwarp();  // or so many are loaded at once that registers spill
          }
        }
      });
      if (span_.tail() > 0) {
        __syncwarp();  // the last granule has been read
        if (has_tail) *tail_place() = tail;
      }
    }
  }

  // Before anything is made of chunks that have been read.
  static __device__ __forceinline__ void wait() {
    if constexpr (kVectorized) wait_for_copies();
  }

  // The moments of the span, in every lane of the warp; none for a span without columns.
  __device__ __forceinline__ SetMoments<A> moments() const {
    ThreadMoments<A> thread;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (k == kRegisters) wait();
      thread.add_chunk(k, chunk(k), span_.has(k));
    }
    if constexpr (!kVectorized) {
      if (span_.lane < span_.tail()) thread.add(widen(*tail_place()));
    }
    A inverse = A(1.0 / RowSpan::kSize);
    if (!span_.whole()) inverse = span_.cols > 0 ? quotient(A(1), A(span_.cols)) : A(0);
    return merge_lanes<kWarpSize, true>(SetMoments<A>{thread.mean, thread.m2}, thread.count,
                                        inverse);
  }

  // Writes y. A missing weight is one and a missing bias zero.
  template <class Y, class W>
  __device__ __forceinline__ void write(Y* row, A mean, A rstd, const W* weight,
                                        const W* bias) const {
    const bool plain = weight != nullptr && bias != nullptr &&
                       (kVectorized || (is_aligned(weight) && is_aligned(bias)));
    if (plain) {
      write(
          row, mean, rstd,
          [&](int column) {
            return Affine<W>{load_wide<W, kColumns>(weight + column, true),
                             load_wide<W, kColumns>(bias + column, true)};
          },
          weight, bias);
    } else {
      write(
          row, mean, rstd,
          [&](int column) {
            return Affine<W>{load_parameter(weight, column, A(1)),
                             load_parameter(bias, column, A(0))};
          },
          weight, bias);
    }
  }

 private:
  template <class W>
  struct Affine {
    Pack<W, kColumns> weight, bias;
  };

  RowSpan span_;
  uint4* shared_;
  Stage stage_;
  Pack<X, kColumns> registers_[kRegisters];

  __device__ __forceinline__ uint4* shared_chunk(int k) const {
    return shared_ + (k - kRegisters) * kWarpSize;
  }

  __device__ __forceinline__ Pack<X, kColumns> chunk(int k) const {
    if (k < kRegisters) return registers_[k];
    return to_pack<X, kColumns>(load_granule(shared_chunk(k)));
  }

  // Of this lane's element of the tail: behind what passes through the stage. (A register for it
  // there is not.)
  __device__ __forceinline__ X* tail_place() const {
    return stage_.template element<X>(kStaged * kWarpSize * kColumns + span_.lane);
  }

  // Columns of the row from chunk k of the first lane on.
  __device__ __forceinline__ int columns_from(int k) const {
    return span_.cols - k * kWarpSize * kColumns;
  }

  template <class W>
  static __device__ __forceinline__ bool is_aligned(const W* parameters) {
    return reinterpret_cast<uintptr_t>(parameters) % alignof(Pack<W, kColumns>) == 0;
  }

  template <class W>
  static __device__ __forceinline__ Pack<W, kColumns> load_parameter(const W* parameters,
                                                                     int column, A absent) {
    if (kVectorized || parameters == nullptr || is_aligned(parameters)) {
      return load_wide<W, kColumns>(parameters + column, parameters != nullptr, absent);
    }
    return load_unaligned<W, kColumns>(parameters + column, kColumns);
  }

  // `affine` loads weight and bias of the chunk at a column.
  template <class Y, class W, class Load>
  __device__ __forceinline__ void write(Y* row, A mean, A rstd, const Load& affine, const W* weight,
                                        const W* bias) const {
    const auto y = [&](int k) {
      const Affine<W> parameters = affine(span_.column(k));
      return normalize<Y>(chunk(k), mean, rstd, parameters.weight, parameters.bias);
    };
    if constexpr (kVectorized) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        if (span_.has(k)) store_pack(row + span_.column(k), y(k));
      }
    } else {
      // Chunks of y that fit the stage together.
      constexpr int kGroup = sizeof(Y) > sizeof(X) ? kStaged * sizeof(X) / sizeof(Y) : kStaged;
      constexpr int kGroupColumns = kGroup * kWarpSize * kColumns;
#pragma unroll
      for (int first = 0; first < kChunks; first += kGroup) {
        const int cols = columns_from(first);
        if (cols <= 0) continue;
        stage_.open();
#pragma unroll
        for (int k = first; k < first + kGroup; ++k) {
          Y* const place =
              stage_.template element<Y>(((k - first) * kWarpSize + span_.lane) * kColumns);
          if (span_.has(k)) store_pack(place, y(k));
        }
        const int tail = span_.cols - span_.tail() + span_.lane - first * kWarpSize * kColumns;
        if (span_.lane < span_.tail() && tail < kGroupColumns && tail >= 0) {
          const int column = span_.tail_column();
          const auto parameter = [&](const W* parameters, A absent) {
            return parameters == nullptr ? absent : A(widen(parameters[column]));
          };
          const A xhat = (widen(*tail_place()) - mean) * rstd;
          const A value = fma(xhat, parameter(weight, A(1)), parameter(bias, A(0)));
          Pack<Y, 2> pair;
          pair.set_pair(0, value, value);
          *stage_.template element<Y>(tail) = pair.element(0);
        }
        stage_.store(row + span_.begin + first * kWarpSize * kColumns, min(cols, kGroupColumns));
      }
    }
  }
};

}  // namespace fastnorm::cuda
