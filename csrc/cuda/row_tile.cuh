// A warp's span of one row of the forward: read once, kept packed, written normalized.
#pragma once

#include "moments.cuh"
#include "realign.cuh"
#include "span.cuh"
#include "stage.cuh"

namespace fastnorm::cuda {

// y of one chunk.
template <class Y, bool kCentred = false, class A, class X, class W, int kColumns>
__device__ __forceinline__ Pack<Y, kColumns> normalize(const Pack<X, kColumns>& x,
                                                       const Standardizer<A>& standardizer,
                                                       const Pack<W, kColumns>& weight,
                                                       const Pack<W, kColumns>& bias) {
  Pack<Y, kColumns> y;
  const auto value = [&](int i) {
    const A xhat = standardizer.template xhat<kCentred>(x.template get<A>(i));
    return fma(xhat, weight.template get<A>(i), bias.template get<A>(i));
  };
#pragma unroll
  for (int i = 0; i < kColumns; i += 2) y.set_pair(i, value(i), value(i + 1));
  return y;
}

// What y is computed with. kLow: x is unpacked anew, for 40 or 48 registers instead of 56: of
// aligned rows, of 320 threads four blocks find a place on a multiprocessor then instead of three,
// 13421 x 10000 bfloat16 took 133.3 us on an H200 for 136.9 us, and with float32 parameters, which
// have to be waited for longer, 16384 x 8192 134.0 us for 142.2 us.
// kHigh: weight and bias of two chunks at once, for 64 registers. Where few rows are under way,
// nothing hides that they have to be waited for: in a CUDA graph 8 x 4096 took 1.86 us for 2.3 us,
// 512 x 8192 4.3 us for 4.6 us; and many rows are as fast. (All four at once spill: 162 us for 134
// us at 32768 x 4096.)
// kHigh also: of a chunk that does not exist x, in aligned rows, weight and bias are whatever is in
// some registers, and addresses are constant distances apart. Where there are registers for that,
// 131072 x 1023 bfloat16 took 141.0 us on an H200 for 146.3 us; with 40 it spills.
enum class RegisterUse : uint8_t { kLow, kMedium, kHigh };

// The first chunks of a lane stay in registers and the others in shared memory, so that an SM has
// room for the threads, and the bytes on their way, that it takes. A span that is not aligned is
// realigned in registers (realign.cuh), if they hold it and y, of the size of x, after it: 16384 x
// 4095 bfloat16 took 83 us on an H200 by way of a stage, 77 us so. Else it is copied to shared
// memory whole, and shifted from there: 8192 x 12289 took 137.5 us in two halves, each read when
// the one before had arrived, 126.5 us so. (y leaves in halves: in the place of x and as one it
// took 130 us. And the registers of eight chunks leave room for few threads; realigned in shared
// memory, each in the place of its lane, 8192 x 16385 took 184 us, by the stage 171 us: too much
// code.)
template <class X, class Y, int kChunks, int kShared, bool kVectorized, bool kOverhang,
          RegisterUse kRegisterUse = RegisterUse::kMedium>
class RowTile {
 public:
  using A = Accumulator<X>;
  using RowSpan = Span<X, kChunks, kOverhang>;
  static constexpr int kColumns = kChunkColumns<X>;
  static constexpr int kRegisters = kChunks - kShared;
  // Elements of eight bytes are moved one by one instead: nothing is to be shifted.
  static constexpr bool kByElements = !kVectorized && kMovesByElements<X>;
  static constexpr bool kStages =
      !kVectorized && !kByElements && (kShared > 0 || sizeof(Y) != sizeof(X));
  // Chunks of y that pass the stage together.
  static constexpr int kStaged = forward_staged_chunks(kChunks, kShared);
  using Stage = SpanStage<kStaged>;
  // Of shared memory, for each warp: chunks, and the stage.
  static constexpr int kGranules = kShared * kWarpSize + (kStages ? Stage::kGranules : 0);
  static_assert(kGranules * kChunkBytes == forward_shared_bytes(kChunks, kShared, kStages));
  static_assert(!kStages || kGranules >= SpanStage<kChunks>::kGranules);

  // `shared` is the block's dynamic shared memory.
  __device__ __forceinline__ RowTile(uint4* shared, const RowSpan& span)
      : span_(span),
        shared_(shared + threadIdx.x / kWarpSize * kGranules + span.lane),
        stage_{shared + threadIdx.x / kWarpSize * kGranules + kShared * kWarpSize} {}

  // Reads the span of a row; `end` is the end of the tensor's memory. kInside, here and below: the
  // span is inside the row (see Span), which is not aligned, and `known_plain` is true.
  template <bool kInside = false>
  __device__ __forceinline__ void load(const X* row, const X* end) {
    if constexpr (kVectorized) {
#pragma unroll
      for (int k = kRegisters; k < kChunks; ++k) {
        if (span_.has(k)) start_copy(shared_chunk(k), row + span_.column(k));
      }
#pragma unroll
      for (int k = 0; k < kRegisters; ++k) {
        const X* const source = row + span_.column(k);
        if constexpr (kRegisterUse == RegisterUse::kHigh) {
          registers_[k] = load_pack_if<X, kColumns>(source, span_.has(k));
        } else {
          registers_[k] = load_wide<X, kColumns>(source, span_.has(k));
        }
      }
    } else {
      if (!kInside && span_.lane < span_.tail()) tail_ = row[span_.tail_column()];
      if constexpr (kByElements) {
#pragma unroll
        for (int k = kRegisters; k < kChunks; ++k) {
          if (span_.has(k)) start_copy_by_elements(shared_chunk(k), row + span_.column(k));
        }
#pragma unroll
        for (int k = 0; k < kRegisters; ++k) {
          registers_[k] =
              load_unaligned<X, kColumns>(row + span_.column(k), span_.has(k) ? kColumns : 0);
        }
      } else if constexpr (kStages) {
        load_staged(row + span_.begin, end);
      } else {
        read_realigned<kInside>(registers_, row, span_.begin, chunks<kInside>(), end);
      }
    }
  }

  // Before anything is made of chunks that have been read.
  static __device__ __forceinline__ void wait() {
    if constexpr (kVectorized || kByElements) wait_for_copies();
  }

  // This lane's sums of the span.
  template <bool kInside = false>
  __device__ __forceinline__ ThreadSums<A> sums() const {
    ThreadSums<A> thread;
    add_to<kInside>(thread);
    return thread;
  }

  // The moments of the span, by differences, in every lane of the warp; none for a span without
  // columns. kAgain: after its sums.
  template <bool kInside = false, bool kAgain = false>
  __device__ __forceinline__ SetMoments<A> moments() const {
    A total = A(RowSpan::kSize), inverse = A(1.0 / RowSpan::kSize);
    if (!kInside && (!span_.whole() || (kOverhang && span_.tail() > 0))) {
      total = A(span_.chunks() * kColumns + span_.tail());
      inverse = span_.cols > 0 ? quotient(A(1), total) : A(0);
    }
    return moments<kInside, kAgain>(total, inverse);
  }

  // The same of as many columns as `total` says.
  template <bool kInside = false, bool kAgain = false>
  __device__ __forceinline__ SetMoments<A> moments(A total, A inverse_total) const {
    constexpr bool kForgets = kVectorized && kShared > 0;  // no register is to spare there
    ChunkMoments<A, kChunks, kColumns, kForgets> thread;
    add_to<kInside, kAgain>(thread);
    return merge_warp(thread, total, inverse_total);
  }

  // Writes y. A missing weight is one and a missing bias zero. `known_plain`: neither is missing,
  // and their chunks are aligned. kCentred: of a centred row.
  template <bool kInside = false, bool kCentred = false, class W>
  __device__ __forceinline__ void write(Y* row, const Standardizer<A>& standardizer,
                                        const W* weight, const W* bias, bool known_plain) {
    if constexpr (kRegisterUse == RegisterUse::kLow) {
#pragma unroll
      for (auto& chunk : registers_) forget_unpacked(chunk);
    }
    if constexpr (kInside || kRegisterUse == RegisterUse::kHigh) {
      if (kInside || known_plain) {
        const W* const weights = weight + span_.column(0);
        const W* const biases = bias + span_.column(0);
        write_with<kInside, kCentred>(
            row, standardizer,
            [&](int k, bool exists) {
              constexpr int kStep = kWarpSize * kColumns;
              return Affine<W>{load_pack_if<W, kColumns>(weights + k * kStep, exists),
                               load_pack_if<W, kColumns>(biases + k * kStep, exists)};
            },
            weight, bias);
        return;
      }
    }
    const bool plain = weight != nullptr && bias != nullptr &&
                       (kVectorized || (is_aligned(weight) && is_aligned(bias)));
    if (plain) {
      write_with<false, kCentred>(
          row, standardizer,
          [&](int k, bool exists) {
            const int column = span_.column(k);
            return Affine<W>{load_wide<W, kColumns>(weight + column, exists),
                             load_wide<W, kColumns>(bias + column, exists)};
          },
          weight, bias);
    } else {
      write_with<false, kCentred>(
          row, standardizer,
          [&](int k, bool exists) {
            const int column = span_.column(k);
            return Affine<W>{load_parameter(weight, column, exists, A(1)),
                             load_parameter(bias, column, exists, A(0))};
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
  X tail_;

  // Adds up what this lane has. kAgain: not by what has been unpacked before.
  template <bool kInside, bool kAgain = false, class Thread>
  __device__ __forceinline__ void add_to(Thread& thread) const {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (k == kRegisters) wait();
      Pack<X, kColumns> pack = chunk(k);
      if constexpr (kAgain) forget_unpacked(pack);
      thread.add_chunk(k, pack, kInside || span_.has(k));
    }
    if constexpr (!kVectorized && !kInside) {
      if (span_.lane < span_.tail()) thread.add(widen(tail_));
    }
  }

  // Whole chunks of the span.
  template <bool kInside>
  __device__ __forceinline__ int chunks() const {
    return kInside ? kChunks * kWarpSize : span_.chunks();
  }

  __device__ __forceinline__ uint4* shared_chunk(int k) const {
    return shared_ + (k - kRegisters) * kWarpSize;
  }

  __device__ __forceinline__ Pack<X, kColumns> chunk(int k) const {
    if (k < kRegisters) return registers_[k];
    return to_pack<X, kColumns>(load_granule(shared_chunk(k)));
  }

  // Of the span that begins at `begin`, by way of the stage and what lies before it.
  __device__ __forceinline__ void load_staged(const X* begin, const X* end) {
    const SpanStage<kChunks> all{shared_ - span_.lane};
    all.fetch(begin, span_.chunks() * kColumns, end);
    const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(begin) % kChunkBytes);
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
  }

  template <class W>
  static __device__ __forceinline__ bool is_aligned(const W* parameters) {
    return reinterpret_cast<uintptr_t>(parameters) % alignof(Pack<W, kColumns>) == 0;
  }

  template <class W>
  static __device__ __forceinline__ Pack<W, kColumns> load_parameter(const W* parameters,
                                                                     int column, bool exists,
                                                                     A absent) {
    if (kVectorized || parameters == nullptr || is_aligned(parameters)) {
      return load_wide<W, kColumns>(parameters + column, exists && parameters != nullptr, absent);
    }
    return load_unaligned<W, kColumns>(parameters + column, exists ? kColumns : 0);
  }

  // `affine` loads weight and bias of chunk k, if it exists.
  template <bool kInside, bool kCentred, class W, class Load>
  __device__ __forceinline__ void write_with(Y* row, const Standardizer<A>& standardizer,
                                             const Load& affine, const W* weight, const W* bias) {
    const auto y = [&](int k, bool exists) {
      const Affine<W> parameters = affine(k, exists);
      return normalize<Y, kCentred>(chunk(k), standardizer, parameters.weight, parameters.bias);
    };
    if constexpr (kVectorized && kRegisterUse == RegisterUse::kHigh) {
      constexpr int kPair = 2;
      static_assert(kChunks % kPair == 0 && sizeof(Y) <= sizeof(X));
#pragma unroll
      for (int first = 0; first < kChunks; first += kPair) {
        Affine<W> parameters[kPair];
#pragma unroll
        for (int j = 0; j < kPair; ++j) {
          parameters[j] = affine(first + j, span_.has(first + j));
        }
#pragma unroll
        for (int j = 0; j < kPair; ++j) {
          const int k = first + j;
          if (!span_.has(k)) continue;
          store_pack(row + span_.column(k),
                     normalize<Y, kCentred>(chunk(k), standardizer, parameters[j].weight,
                                            parameters[j].bias));
        }
      }
    } else if constexpr (kVectorized) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        Y* const target = row + span_.column(k);
        if constexpr (sizeof(Y) > sizeof(X)) {
          store_with_neighbour(target, y(k, span_.has(k)), span_.has(k), span_.neighbour_has(k));
        } else if (span_.has(k)) {
          store_pack(target, y(k, true));
        }
      }
    } else {
      // Before the chunks in registers: 16384 x 4095 bfloat16 took 78.7 us on an H200, 79.5 us
      // after.
      if (!kInside && span_.lane < span_.tail()) {
        const int column = span_.tail_column();
        const auto parameter = [&](const W* parameters, A absent) {
          return parameters == nullptr ? absent : A(widen(parameters[column]));
        };
        const A xhat = standardizer.template xhat<kCentred>(widen(tail_));
        const A value = fma(xhat, parameter(weight, A(1)), parameter(bias, A(0)));
        Pack<Y, 2> pair;
        pair.set_pair(0, value, value);
        row[column] = pair.element(0);
      }
      if constexpr (kByElements) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          if (!span_.has(k)) continue;
          const Pack<Y, kColumns> pack = y(k, true);
#pragma unroll
          for (int i = 0; i < kColumns; ++i) row[span_.column(k) + i] = pack.element(i);
        }
      } else if constexpr (kStages) {
        // Chunks of y that fit the stage together.
        constexpr int kGroup =
            sizeof(Y) > sizeof(X) ? kStaged * int{sizeof(X)} / int{sizeof(Y)} : kStaged;
#pragma unroll
        for (int first = 0; first < kChunks; first += kGroup) {
          const int left = span_.chunks() - first * kWarpSize;
          if (left <= 0) continue;
          stage_.open();
#pragma unroll
          for (int k = first; k < first + kGroup && k < kChunks; ++k) {
            Y* const place =
                stage_.template element<Y>(((k - first) * kWarpSize + span_.lane) * kColumns);
            if (span_.has(k)) store_pack(place, y(k, true));
          }
          stage_.store(row + span_.begin + first * kWarpSize * kColumns,
                       min(left, kGroup * kWarpSize) * kColumns);
        }
      } else {
        Granule granules[kChunks];
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          // (Under a condition one chunk's parameters would be loaded after the other's.)
          granules[k] = to_granule(y(k, kInside || span_.has(k)));
        }
        write_realigned(granules, row, span_.begin, chunks<kInside>());
      }
    }
  }
};

}  // namespace fastnorm::cuda
