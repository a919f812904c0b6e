// The forward of one dtype of x and y: launches the kernel that a plan names, with the lanes and
// chunks that it is compiled for.
#pragma once

#include <algorithm>
#include <limits>

#include "forward_bulk_rows.cuh"
#include "forward_rows.cuh"
#include "forward_segments.cuh"

namespace fastnorm::cuda {

// The lanes of a row of a warp or less, times ten, and the chunks of a lane.
inline int shape_of(const ForwardPlan& plan) {
  return plan.threads_per_row * 10 + plan.chunks_per_thread;
}

// Launches the kernel for such rows.
template <bool kVectorized, class X, class Y, class W, class LaunchRows>
cudaError_t launch_short_rows(const ForwardPlan& plan, const LaunchRows& launch_rows) {
  const int shape = shape_of(plan);
  if constexpr (kAnyChunks<X, Y>) {
    if constexpr (kIs16Bit<X>) {  // gathered where they are aligned
      switch (shape) {
        case 13:
          return launch_rows(forward_short_rows<X, Y, W, 1, 3, kVectorized, kVectorized>);
        case 15:
          return launch_rows(forward_short_rows<X, Y, W, 1, 5, kVectorized, kVectorized>);
        case 24:
          return launch_rows(forward_short_rows<X, Y, W, 2, 4, kVectorized, kVectorized>);
        case 25:
          return launch_rows(forward_short_rows<X, Y, W, 2, 5, kVectorized, kVectorized>);
      }
    }
    if constexpr (kVectorized) {
      if (plan.gathers && shape == 44) {
        return launch_rows(forward_short_rows<X, Y, W, 4, 4, true, true>);
      }
      if (plan.gathers && shape == 45) {
        return launch_rows(forward_short_rows<X, Y, W, 4, 5, true, true>);
      }
    }
    switch (shape) {
      case 21:
        return launch_rows(forward_short_rows<X, Y, W, 2, 1, kVectorized>);
      case 43:
        return launch_rows(forward_short_rows<X, Y, W, 4, 3, kVectorized>);
      case 45:
        return launch_rows(forward_short_rows<X, Y, W, 4, 5, kVectorized>);
      case 83:
        return launch_rows(forward_short_rows<X, Y, W, 8, 3, kVectorized>);
      case 85:
        return launch_rows(forward_short_rows<X, Y, W, 8, 5, kVectorized>);
      case 105:
        if constexpr (kOneType<X, Y, W>) {
          return launch_rows(forward_short_rows<X, Y, W, 10, 5, kVectorized>);
        }
        break;
      case 163:
        return launch_rows(forward_short_rows<X, Y, W, 16, 3, kVectorized>);
      case 165:
        return launch_rows(forward_short_rows<X, Y, W, 16, 5, kVectorized>);
    }
  }
  switch (shape) {
    case 11:
      return launch_rows(forward_short_rows<X, Y, W, 1, 1, kVectorized>);
    case 22:
      return launch_rows(forward_short_rows<X, Y, W, 2, 2, kVectorized>);
    case 42:
      return launch_rows(forward_short_rows<X, Y, W, 4, 2, kVectorized>);
    case 44:
      return launch_rows(forward_short_rows<X, Y, W, 4, 4, kVectorized>);
    case 84:
      return launch_rows(forward_short_rows<X, Y, W, 8, 4, kVectorized>);
    case 164:
      return launch_rows(forward_short_rows<X, Y, W, 16, 4, kVectorized>);
    case 323:
      return launch_rows(forward_short_rows<X, Y, W, 32, 3, kVectorized>);
    case 324:
      return launch_rows(forward_short_rows<X, Y, W, 32, 4, kVectorized>);
  }
  // Two chunks of whole ones are in a lane each.
  if constexpr (!kVectorized || !kAnyChunks<X, Y>) {
    if (shape == 12) return launch_rows(forward_short_rows<X, Y, W, 1, 2, kVectorized>);
  }
  if constexpr (!kVectorized) {
    switch (shape) {
      case 82:
        return launch_rows(forward_short_rows<X, Y, W, 8, 2, false>);
      case 162:
        return launch_rows(forward_short_rows<X, Y, W, 16, 2, false>);
      case 322:
        return launch_rows(forward_short_rows<X, Y, W, 32, 2, false>);
    }
  }
  return cudaErrorInvalidValue;
}

// Whether rows in registers may have more than 512 threads (see most_row_threads in
// plan_forward.cpp).
template <class X, class Y, class W>
constexpr bool kHasWideBlocks = kOneType<X, Y, W> && !std::is_same_v<X, double>;

// Launches the kernel for rows with kRegisterChunks chunks in each thread's registers.
//
// With 40 registers, three blocks of 512 threads find a place on an SM. Of 268 MB on an H200, with
// two of them and so: aligned bfloat16 12544 columns 147.0 and 132.7 us, 14336 140.5 and 134.1 us,
// 16384 136.0 and 134.4 us; with float32 parameters 12288 144.4 and 138.3 us, 16384 153.2 and 143.3
// us, but 8192 135.0 and 136.4 us.
//
// Long 16-bit rows that are not aligned have code of their own for warps inside a row, and x
// unpacked anew for y, without which that spills 100 to 300 bytes of 40 registers (so 16). Of a
// copy on an H200, 268 MB, before and so: bfloat16 8191 columns .925 and .927, 10001 .873 and .905,
// 12289 .901 and .937, 14001 .860 and .894, 16385 .866 and .903; float16 7501 .833 and .894, 8191
// .879 and .949, 10001 .808 and .923, 12289 .881 and .949, 14001 .798 and .902, 16385 .824 and .909
// (on an H100 14001 .84 and .98). Shorter ones lose by it: 3001 .92 and .83, 5001 .92 and .88.
//
// More than 512 threads have 40 registers in any case, for two blocks on an SM. Of a copy on an
// H100, with eight chunks in each of half as many threads, in the ring if aligned, and so: bfloat16
// 16392 columns .93 and .98, 18432 .94 and .99, 24576 .95 and .985, 18001 .88 and .95, 22001 .895
// and .95, 24577 .845 and .94; float16 20001 .88 and .955; float32 8200 .95 and .99, 12288 .955 and
// .99, 8201 .94 and 1.00, 12289 .885 and .99. (On an H200, in two runs, float32 12288 .934 and
// .987.) A thousand threads with 32 registers: bfloat16 28160 .96 and .83, float32 16384 .96 and
// .915.
template <bool kVectorized, class X, class Y, class W, class LaunchRows>
cudaError_t launch_register_rows(const ForwardPlan& plan, const LaunchRows& launch_rows) {
  const int threads = plan.threads_per_row;
  constexpr int kChunks = kRegisterChunks;
  constexpr bool kWideY = sizeof(Y) > sizeof(X);
  constexpr bool kFew = kFewRegisters<X, W>;
  if constexpr (kHasWideBlocks<X, Y, W>) {
    if (threads > kMaxThreadsPerRow) {
      constexpr RegisterUse kUse = kIs16Bit<X> ? RegisterUse::kLow : RegisterUse::kMedium;
      return launch_rows(
          forward_rows<X, Y, W, kMaxRowThreads, 2, kChunks, 0, false, kVectorized, kUse>);
    }
  }
  if constexpr (kVectorized && kIs16Bit<X> && !kWideY) {
    if (threads > (kFew ? 384 : 256)) {
      return launch_rows(forward_rows<X, Y, W, 512, 3, kChunks, 0, false, true, RegisterUse::kLow>);
    }
    if constexpr (kFew) {
      // 131072 x 1600, with a fifth of 64 threads idle, reached .92 of a copy with 64 registers and
      // .98 with 56; these 48 were not measured there.
      if (threads > 256 || plan.more_warps) {
        return launch_rows(
            forward_rows<X, Y, W, 384, 3, kChunks, 0, false, true, RegisterUse::kLow>);
      }
    }
    constexpr RegisterUse kUse = kFew ? RegisterUse::kHigh : RegisterUse::kLow;
    return launch_rows(forward_rows<X, Y, W, 512, 2, kChunks, 0, false, true, kUse>);
  } else if constexpr (!kVectorized && kFew) {
    if constexpr (kIs16Bit<X> && !kWideY) {
      constexpr int kShort = 192;
      if (threads > kShort) {
        return launch_rows(
            forward_rows<X, Y, W, 512, 3, kChunks, 0, false, false, RegisterUse::kLow>);
      }
      // Short ones are as well off in 56 registers, and bfloat16 with parameters read with less
      // ado: of 268 MB on an H200 2601 columns .80 -> .82 of a copy, 4095 .91 -> .925. (Float16
      // spills.)
      constexpr RegisterUse kUse = std::is_same_v<X, BFloat16> && kOneType<X, Y, W>
                                       ? RegisterUse::kHigh
                                       : RegisterUse::kMedium;
      return launch_rows(forward_rows<X, Y, W, 384, 3, kChunks, 0, false, false, kUse>);
    } else {
      if constexpr (kWideY) {
        if (threads <= 384) {
          return launch_rows(forward_rows<X, Y, W, 384, 3, kChunks, 0, false, false>);
        }
      }
      return launch_rows(forward_rows<X, Y, W, 512, 3, kChunks, 0, false, false>);
    }
  } else {
    constexpr int kNarrowBlocks = kVectorized && kFew && !kWideY ? 3 : 2;
    constexpr int kWideBlocks = kVectorized || kMovesByElements<X> ? 2 : 1;
    const auto narrow = forward_rows<X, Y, W, 384, kNarrowBlocks, kChunks, 0, false, kVectorized>;
    if (threads <= 384) return launch_rows(narrow);
    const auto wide = forward_rows<X, Y, W, 512, kWideBlocks, kChunks, 0, false, kVectorized>;
    return launch_rows(wide);
  }
}

template <bool kVectorized, class X, class Y, class W>
cudaError_t launch_forward(const ForwardParameters<X, Y, W>& p, const ForwardPlan& plan,
                           cudaStream_t stream) {
  const dim3 threads = plan.in_bulk ? dim3(kBulkRowThreads)
                       : plan.kernel == Kernel::kShortRows
                           ? dim3(kWarpSize, kShortRowThreads / kWarpSize)
                           : dim3(plan.threads_per_row, plan.rows_per_block / plan.rows_per_thread);
  const auto launch_rows = [&](auto kernel) {
    // More shared memory than 48 KB, the kernel's own included, has to be asked for.
    constexpr int kFreeBytes = 44 * 1024;
    if (plan.shared_bytes > kFreeBytes) {
      const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
      if (error != cudaSuccess) return error;
    }
    return launch_in_turns(kernel, threads, p, plan, stream);
  };
  // Blocks of 512 threads with kForwardChunks each that an SM holds at the least: fewer where more
  // registers are needed.
  constexpr bool kNarrow = kEarlyParameters<X, W> && sizeof(Y) <= sizeof(X);
  constexpr bool kFew = kFewRegisters<X, W>;
  constexpr bool kStages = !kVectorized && !kMovesByElements<X>;
  constexpr int kBlocks = !kStages ? (kNarrow ? 3 : 2) : (kFew ? 2 : 1);
  // In clusters three of float64 spill: 4096 x 16384 345 us on an H200 so, 335 us of two.
  constexpr int kClusterBlocks = std::is_same_v<X, double> ? std::min(kBlocks, 2) : kBlocks;
  // Whether there are rows of three, four and seven chunks in a lane of one warp.
  constexpr bool kAny = kIs16Bit<X> && kOneType<X, Y, W>;
  constexpr int kShared = forward_shared_chunks(kForwardChunks, !kStages);
  switch (plan.kernel) {
    case Kernel::kShortRows:
      if constexpr (kVectorized && kAnyChunks<X, Y>) {
        if (plan.in_bulk) return launch_bulk_rows<X, W>(shape_of(plan), launch_rows);
      }
      return launch_short_rows<kVectorized, X, Y, W>(plan, launch_rows);
    case Kernel::kRows:
      if (plan.rows_per_block > 1) {  // in a warp each
        switch (plan.chunks_per_thread) {
          case 5:
            return launch_rows(forward_warp_rows<X, Y, W, 5, kVectorized>);
          case 6:
            return launch_rows(forward_warp_rows<X, Y, W, 6, kVectorized>);
        }
        if constexpr (!kVectorized || kAny) {
          if (plan.chunks_per_thread == 4) {
            return launch_rows(forward_warp_rows<X, Y, W, 4, kVectorized>);
          }
        }
        if constexpr (kVectorized && kAny) {
          if (plan.chunks_per_thread == 3) return launch_rows(forward_warp_rows<X, Y, W, 3, true>);
        }
        if constexpr (kAny) return launch_rows(forward_warp_rows<X, Y, W, 7, kVectorized>);
        return cudaErrorInvalidValue;
      }
      if (plan.chunks_per_thread == 5) {
        // (Not aligned, 80 registers would spill.)
        constexpr int kFiveBlocks = kVectorized ? kWarpBlocks<X, Y, W, 5, true> / 2 : kFew ? 5 : 4;
        return launch_rows(forward_rows<X, Y, W, 128, kFiveBlocks, 5, 0, false, kVectorized>);
      }
      if constexpr (kAny) {
        if (plan.chunks_per_thread == 7) {
          constexpr int kSevenBlocks = kVectorized ? 8 : 4;
          return launch_rows(forward_rows<X, Y, W, 128, kSevenBlocks, 7, 0, false, kVectorized>);
        }
      }
      if (plan.chunks_per_thread == kRegisterChunks) {
        return launch_register_rows<kVectorized, X, Y, W>(plan, launch_rows);
      }
      return launch_rows(forward_rows<X, Y, W, 512, kBlocks, 8, kShared, false, kVectorized>);
    case Kernel::kCluster:
      return launch_rows(forward_rows<X, Y, W, 512, kClusterBlocks, 8, kShared, true, kVectorized>);
    case Kernel::kSplit: {
      Launch launch(plan.blocks, threads, stream);
      launch.with_shared(plan.shared_bytes);
      const cudaError_t error = launch(forward_segment_moments<X, Y, W, kVectorized>, p);
      if (error != cudaSuccess) return error;
      return launch(forward_segment_apply<X, Y, W, kVectorized>, p);
    }
    case Kernel::kElements:
      if constexpr (std::is_same_v<X, Y> && !std::is_same_v<X, double>) {
        return launch_elements<X, W>(p, plan, stream);
      }
      break;
    case Kernel::kFewRows:
    case Kernel::kRing:
      break;
  }
  return cudaErrorInvalidValue;
}

// Rows of X to rows of Y: finds the type of the parameters, and launches.
template <class X, class Y>
cudaError_t forward_to(const ForwardArgs& args, const ForwardPlan& plan, void* workspace,
                       cudaStream_t stream) {
  using A = Accumulator<X>;
  const DType parameter_dtype = args.weight != nullptr ? args.weight_dtype : args.bias_dtype;
  return visit_parameter<X>(parameter_dtype, [&](auto parameter_type) {
    using W = typename decltype(parameter_type)::type;
    ForwardParameters<X, Y, W> p;
    static_assert(sizeof(p) <= 128 || sizeof(A) == 8);
    p.rows = args.rows;
    p.cols = args.cols;
    p.eps = static_cast<A>(args.eps);
    p.inverse_cols = static_cast<A>(1.0 / static_cast<double>(args.cols));
    if (args.cols == 0) {  // the mean of no columns is zero, their variance not a number
      p.inverse_cols = 0;
      p.eps = std::numeric_limits<A>::quiet_NaN();
    }
    p.x = static_cast<const X*>(args.x);
    p.x_row_stride = args.x_row_stride;
    p.x_end = p.x + std::max<int64_t>(0, (args.rows - 1) * args.x_row_stride) + args.cols;
    p.weight = static_cast<const W*>(args.weight);
    p.bias = static_cast<const W*>(args.bias);
    const auto is_plain = [](const W* parameters) {
      return parameters != nullptr &&
             reinterpret_cast<uintptr_t>(parameters) % alignof(Pack<W, kChunkColumns<X>>) == 0;
    };
    p.plain = is_plain(p.weight) && is_plain(p.bias);
    p.y = static_cast<Y*>(args.y);
    p.mean = static_cast<A*>(args.mean);
    p.rstd = static_cast<A*>(args.rstd);
    p.segment_moments = static_cast<SetMoments<A>*>(workspace);
    p.segments = static_cast<int>(plan.segments);
    p.cluster_size = plan.cluster_size;
    return plan.vectorized ? launch_forward<true>(p, plan, stream)
                           : launch_forward<false>(p, plan, stream);
  });
}

// 16-bit rows that are written in another dtype, two thirds of what there is to compile for them,
// have sources of their own.
extern template cudaError_t forward_to<Half, float>(const ForwardArgs&, const ForwardPlan&, void*,
                                                    cudaStream_t);
extern template cudaError_t forward_to<Half, BFloat16>(const ForwardArgs&, const ForwardPlan&,
                                                       void*, cudaStream_t);
extern template cudaError_t forward_to<BFloat16, float>(const ForwardArgs&, const ForwardPlan&,
                                                        void*, cudaStream_t);
extern template cudaError_t forward_to<BFloat16, Half>(const ForwardArgs&, const ForwardPlan&,
                                                       void*, cudaStream_t);

// Rows of X: finds the type of y.
template <class X>
cudaError_t forward_of(const ForwardArgs& args, const ForwardPlan& plan, void* workspace,
                       cudaStream_t stream) {
  if constexpr (!std::is_same_v<X, double>) {
    if (plan.kernel == Kernel::kRing) return launch_forward_ring<X>(args, plan, workspace, stream);
    if (plan.bulk_stages > 0) return launch_forward_wide<X>(args, plan, stream);
  }
  return visit_other<X>(args.y_dtype, [&](auto y_type) {
    return forward_to<X, typename decltype(y_type)::type>(args, plan, workspace, stream);
  });
}

// One instantiation file per dtype of x.
extern template cudaError_t forward_of<float>(const ForwardArgs&, const ForwardPlan&, void*,
                                              cudaStream_t);
extern template cudaError_t forward_of<Half>(const ForwardArgs&, const ForwardPlan&, void*,
                                             cudaStream_t);
extern template cudaError_t forward_of<BFloat16>(const ForwardArgs&, const ForwardPlan&, void*,
                                                 cudaStream_t);
extern template cudaError_t forward_of<double>(const ForwardArgs&, const ForwardPlan&, void*,
                                               cudaStream_t);

}  // namespace fastnorm::cuda
