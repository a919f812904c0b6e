// What a lane of the backward's ring does with a row: its part of the row's two sums, then dx, dw
// and db of its columns, which it reads from shared memory both times.
#pragma once

#include "partial_sums.cuh"
#include "ring_lane.cuh"

namespace fastnorm::cuda {

// What rows have added up to. (As members of RingRow the compiler would keep these arrays, and all
// else there, in memory until loops are unrolled, and would not unroll some.)
template <class Kind>
struct RingSums {
  float dw[Kind::kChunks][Kind::kColumns] = {}, db[Kind::kChunks][Kind::kColumns] = {};
  TailColumn tail;
};

template <class Kind>
class RingRow {
 public:
  using X = typename Kind::X;
  using DY = typename Kind::DY;
  using Parameters = typename Kind::Parameters;
  using Weight = RingWeight<X, Kind::kChunks>;
  static constexpr int kChunks = Kind::kChunks, kColumns = Kind::kColumns;
  static constexpr bool kShort = Kind::kShort, kVectorized = Kind::kVectorized;

  __device__ __forceinline__ RingRow(const Parameters& p, const RingPlace<Kind>& at,
                                     const RingSlots<Kind>& slots, const Weight& weight,
                                     RingSums<Kind>& all)
      : p_(p), at_(at), slots_(slots), weight_(weight), all_(all) {
    if (Kind::kTail && at.has_tail()) {
      all_.tail.weight =
          load_weight<X>(p.weight, p.weight_dtype, at.begin + Kind::kWarpColumns + at.lane);
    }
    x_low_ = low_of(at.x);
    dy_low_ = low_of(at.dy);
    finished_x_low_ = x_low_;
    finished_dy_low_ = dy_low_;
    tail_place_ = Kind::kWarpColumns * Kind::kSize - at.lane * (kChunkBytes - Kind::kSize);
    cut_ = Kind::kStays ? at.run < Kind::kWarpColumns : at.left(kChunks - 1) < kColumns;
    row_ = at.first;
    dx_ = reinterpret_cast<char*>(p.dx + at.first * p.cols + at.begin);
    dx_low_ = low_of(dx_);
    dx_ = detach<Kind::kDetaches>(dx_ + at.lane * kChunkBytes);
  }

  // The sums of (x - mean) * dy * weight and of dy * weight over this lane's columns of the next
  // row. `amid`: what is done before the arithmetic.
  template <class Amid>
  __device__ __forceinline__ Sums<float> sum(unsigned slot, float mean, const Amid& amid) {
    if constexpr (Kind::kShares) __syncwarp();  // the lanes' copies have arrived
    if constexpr (kVectorized) {
      amid();
      return sum_chunks<X>([&](int k) { return slots_.load_x(slot, k); },
                           [&](int k) { return slots_.load_dy(slot, k); }, weight_, mean);
    } else {
      UnalignedChunks<X, X, kTogether> x_chunks;
      UnalignedChunks<X, DY, kTogether> dy_chunks;
      float tail_x = 0, tail_dy = 0;
      if constexpr (Kind::kTail) {
        tail_x = load_tail_x(slot, x_low_);
        tail_dy = load_tail_dy(slot, dy_low_);
      }
      Sums<float> sums = sum_chunks<X>(
          [&](int k) {
            if (k % kTogether == 0) align(slot, k, x_chunks, dy_chunks);
            if (k == 0) amid();
            return x_chunks.chunk(k % kTogether);
          },
          [&](int k) { return dy_chunks.chunk(k % kTogether); }, weight_, mean);
      if (Kind::kTail && at_.has_tail()) sums.merge(all_.tail.sums(tail_x, tail_dy, mean));
      x_low_ += static_cast<unsigned>(p_.x_step);
      dy_low_ += static_cast<unsigned>(p_.dy_step);
      return sums;
    }
  }

  // dx, and dw and db with what this row adds. `amid`: what is done when the first chunk has been
  // worked out.
  template <class Amid>
  __device__ __forceinline__ void finish(unsigned slot, float mean, float rstd,
                                         const Sums<float>& sums, const Amid& amid) {
    const RowGradient gradient(mean, rstd, sums, p_.inverse_cols);
    const bool active = !kShort || row_ < p_.rows;
    // Where dx is aligned, as a new tensor is beside views of others, it takes no detour: 16384 x
    // 8192 bfloat16, x and dy one element off, took 252 us on an H200 with it, 232 us so. (A grid
    // has no registers for the choice.)
    const int shifted = dx_low_ % kChunkBytes;
    const bool straight = kVectorized || (!Kind::kGrid && shifted == 0 && at_.run % kColumns == 0);
    [[maybe_unused]] float tail_x, tail_dy;
    if constexpr (Kind::kTail) {
      tail_x = load_tail_x(slot, finished_x_low_);
      tail_dy = load_tail_dy(slot, finished_dy_low_);
    }
    finished_x_low_ += static_cast<unsigned>(p_.x_step);
    finished_dy_low_ += static_cast<unsigned>(p_.dy_step);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      Chunk x = {};
      Pack<DY, kColumns> dy = {};
      if (kVectorized || active) {  // or an idle lane would read what others have put there
        x = slots_.load_x(slot, k);
        dy = slots_.load_dy(slot, k);
      }
      const Chunk out = finish_chunk(k, x, dy, gradient);
      if (k == 0) amid();
      if (Kind::kTail && k == 0 && at_.has_tail()) {
        *reinterpret_cast<X*>(dx_ + tail_place_) =
            narrow<X>(all_.tail.finish(tail_x, tail_dy, gradient));
      }
      if (straight) {
        if (active && at_.left(k) > 0) {
          store_wide(reinterpret_cast<X*>(dx_ + k * at_.lanes * kChunkBytes), out);
        }
      } else if (active) {
        store_shared(slot + k * slots_.chunk_step, to_granule(out));  // in the place of x
      }
    }
    if constexpr (!kVectorized) {
      __syncwarp();
      if (!straight && active && at_.run > 0) write_shifted(slot, shifted);
    }
    if constexpr (Kind::kShares) __syncwarp();  // before the slot is filled again
    dx_ += p_.dx_step;
    dx_low_ += static_cast<unsigned>(p_.dx_step);
    row_ += at_.stride;
  }

  // Leaves dw and db as a row of partial sums, and begins anew.
  __device__ __forceinline__ void leave_sums(int64_t partial) {
    leave_sums_of(all_.dw, p_.dw_partials, partial);
    leave_sums_of(all_.db, p_.db_partials, partial);
  }

 private:
  using Chunk = Pack<X, kColumns>;
  // Chunks of an unaligned run that are shifted together: two, where there are registers for them.
  static constexpr int kTogether =
      kChunks % 2 == 0 && (Kind::kDySize == 2 || Kind::kSpan == RingSpan::kBlock) ? 2 : 1;

  const Parameters& p_;
  const RingPlace<Kind>& at_;
  const RingSlots<Kind>& slots_;
  const Weight& weight_;
  RingSums<Kind>& all_;
  // Of the run in the row summed next, and in the one finished next. (Of the run, not of the lane:
  // the same in the warp.)
  unsigned x_low_, dy_low_, finished_x_low_, finished_dy_low_;
  int tail_place_;  // from a lane's first chunk to its column behind them all
  bool cut_;        // a chunk of this lane, or with kStays of its warp, ends beyond the run
  int64_t row_;     // that is finished next
  char* dx_;        // its first chunk of this lane
  unsigned dx_low_;

  static __device__ __forceinline__ unsigned low_of(const void* place) {
    return static_cast<unsigned>(reinterpret_cast<uintptr_t>(place));
  }
  __device__ __forceinline__ float load_tail_x(unsigned slot, unsigned low) const {
    return load_element<X>(slot + tail_place_ + low % kChunkBytes);
  }
  __device__ __forceinline__ float load_tail_dy(unsigned slot, unsigned low) const {
    return load_element<X>(slot + slots_.dy_place + tail_place_ + low % kChunkBytes);
  }

  // Moves chunks k, k + 1, ... into place, in registers and in shared memory.
  __device__ __forceinline__ void align(unsigned slot, int k,
                                        UnalignedChunks<X, X, kTogether>& x_chunks,
                                        UnalignedChunks<X, DY, kTogether>& dy_chunks) const {
    const unsigned x_place = slot + k * slots_.chunk_step;
    const unsigned place = slot + slots_.dy_place + k * slots_.dy_chunk_step;
    x_chunks.load(x_place, slots_.chunk_step);
    dy_chunks.load(place, slots_.dy_chunk_step);
    __syncwarp();  // the lane before has read this one's
    // By one branch for both where they begin at the same place: 65536 x 2047 bfloat16 took 238 us
    // on an H200 by one for each, with more instructions in copies and stores, 221 us so.
    const int x_offset = x_low_ % kChunkBytes, dy_offset = dy_low_ % kChunkBytes;
    if (!kShort && x_offset == dy_offset) {
      with_offset(x_offset, [&](auto word, int bits) {
        x_chunks.template align<decltype(word)::value>(bits);
        dy_chunks.template align<decltype(word)::value>(bits);
      });
    } else {
      with_offset(x_offset, [&](auto word, int bits) {
        x_chunks.template align<decltype(word)::value>(bits);
      });
      with_offset(dy_offset, [&](auto word, int bits) {
        dy_chunks.template align<decltype(word)::value>(bits);
      });
    }
    if (cut_) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        // The other warps of the row wait for this one, its last.
        if (Kind::kStays && at_.run >= (k + j + 1) * kWarpSize * kColumns) continue;
        int left = at_.left(k + j);
        // Or masks for every chunk would be kept from row to row.
        asm volatile("" : "+r"(left));
        x_chunks.truncate(j, left);
        dy_chunks.truncate(j, left);
      }
    }
    if (!kShort || row_ < p_.rows) {
      x_chunks.store(x_place, slots_.chunk_step);
      dy_chunks.store(place, slots_.dy_chunk_step);
    }
  }

  // dx of chunk k.
  __device__ __forceinline__ Chunk finish_chunk(int k, const Chunk& x, const Pack<DY, kColumns>& dy,
                                                const RowGradient& gradient) {
    Chunk out;
#pragma unroll
    for (int i = 0; i < kColumns; i += 2) {
      float values[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float centred = x.template get<float>(i + j) - gradient.mean;
        const float g = dy.template get<float>(i + j);
        const float scaled = g * gradient.rstd;
        all_.dw[k][i + j] = fma(scaled, centred, all_.dw[k][i + j]);
        all_.db[k][i + j] += g;
        values[j] = gradient.dx(centred, scaled, weight_.values[k][i + j]);
      }
      out.set_pair(i, values[0], values[1]);
    }
    return out;
  }

  // Writes dx, which lies in the place of x, `shifted` bytes further into granules of device
  // memory.
  __device__ __forceinline__ void write_shifted(unsigned slot, int shifted) const {
    const int lane = at_.lane, lanes = at_.lanes;
    const int run_bytes = at_.run * Kind::kSize;
    // Granule j of device memory has the last bytes of chunk j - 1 and the first of chunk j.
    Granule before[kChunks], granules[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const unsigned place = slot + k * slots_.chunk_step;
      granules[k] = load_shared(place);
      before[k] = load_shared(k == 0 && lane == 0 ? place : place - kChunkBytes);
    }
    with_offset(kChunkBytes - shifted, [&](auto word, int bits) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        granules[k] = shift<decltype(word)::value>(before[k], granules[k], bits);
      }
    });
    char* const target = reinterpret_cast<char*>(granule_of(dx_));
    // The run's first granule, and what lies behind its last chunk, other runs have a part of.
    const int end = kShort || at_.run % kColumns != 0 ? run_bytes + shifted : run_bytes;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const bool whole = (k * lanes + lane + 1) * kChunkBytes <= end;
      if (whole && (k > 0 || lane > 0 || shifted == 0)) {
        const Granule& granule = granules[k];
        *reinterpret_cast<uint4*>(target + k * lanes * kChunkBytes) =
            make_uint4(granule.words[0], granule.words[1], granule.words[2], granule.words[3]);
      }
    }
    // The elements before the first whole granule, counted from the run's begin, and those after
    // the last one, from its end.
    const int first_bytes = kChunkBytes - shifted;
    const int last_bytes = (run_bytes + shifted) % kChunkBytes;
    const auto store = [&](int at, bool exists) {
      const int from_here = at - lane * kChunkBytes;
      if (exists) store_element<Kind::kSize>(dx_ + from_here, slot + from_here);
    };
    if constexpr (kShort) {
      for (int e = lane; e < kColumns; e += lanes) {
        store(e * Kind::kSize, e * Kind::kSize < min(first_bytes, run_bytes));
        store((at_.run - 1 - e) * Kind::kSize, e * Kind::kSize < min(last_bytes, run_bytes));
      }
    } else if (lane < 2 * kColumns) {
      const bool behind = lane >= kColumns;
      const int e = lane % kColumns;
      store((behind ? at_.run - 1 - e : e) * Kind::kSize,
            e * Kind::kSize < min(behind ? last_bytes : first_bytes, run_bytes));
    }
  }

  __device__ __forceinline__ void leave_sums_of(float (&sums)[kChunks][kColumns], float* target,
                                                int64_t partial) const {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int place = at_.column(k);
#pragma unroll
      for (int i = 0; i < kColumns; i += 4) {
        store_some<kVectorized>(target + partial * p_.cols + at_.begin + place + i,
                                four_of(sums[k], i), at_.run - place - i);
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[k][i + j] = 0;
      }
    }
  }
};

}  // namespace fastnorm::cuda
