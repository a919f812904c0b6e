// How the kernels of the forward that read a row once begin: weight and bias are sent for, and the
// first blocks start in turns.
#pragma once

#include "async.cuh"
#include "forward_parameters.cuh"
#include "launch.cuh"

namespace fastnorm::cuda {

// Not rows of float64: 16384 x 4096 of them took 331 us on an H200 with all of this, 264 us
// without.
template <class X>
constexpr bool kTakesTurns = sizeof(X) < sizeof(double);

// Asks the L2 cache for the granules that lie within `count` elements.
template <class T>
__device__ __forceinline__ void send_for(const T* elements, int64_t count) {
#if __CUDA_ARCH__ >= 900
  const auto begin = (reinterpret_cast<uintptr_t>(elements) + kChunkBytes - 1) / kChunkBytes;
  const auto end = reinterpret_cast<uintptr_t>(elements + count) / kChunkBytes;
  if (elements != nullptr && begin < end) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin * kChunkBytes),
                 "r"(static_cast<unsigned>((end - begin) * kChunkBytes))
                 : "memory");
  }
#endif
}

// Asks the L2 cache for weight and bias, once for all blocks. They are needed late, and then by
// all.
template <class X, class Y, class W>
__device__ __forceinline__ void send_for_parameters(const ForwardParameters<X, Y, W>& p) {
  if (blockIdx.x == 0 && threadIdx.x == 0 && threadIdx.y == 0) {
    send_for(p.weight, p.cols);
    send_for(p.bias, p.cols);
  }
}

// The first thing that a block does, before it reads or writes any tensor. 16384 x 8192 bfloat16
// took 132.8 us on an H200 when nobody had sent for weight and bias, 132.5 us so, 16384 x 1024 23.1
// and 22.3 us. Where all blocks find a place at once, this would only delay the first one (in a
// CUDA graph 1 x 1024 1.34 us and, not sent for, 1.25, 512 x 8192 4.26 and 4.10): see
// send_for_late_parameters.
template <class X, class Y, class W>
__device__ __forceinline__ void start_block(const ForwardParameters<X, Y, W>& p) {
  if constexpr (!kTakesTurns<X>) return;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (blockIdx.x < p.first.blocks) {
    send_for_parameters(p);
    const unsigned cycles = blockIdx.x / p.first.turn * p.first.cycles;
    const unsigned begin = clock();
    while (static_cast<unsigned>(clock()) - begin < cycles) {
    }
  }
}

// What a block does when it has asked for its rows, but asks for weight and bias only once their
// moments are there.
template <class X, class Y, class W>
__device__ __forceinline__ void send_for_late_parameters(const ForwardParameters<X, Y, W>& p) {
  if (kTakesTurns<X> && p.first.blocks == 0) send_for_parameters(p);
}

// The same of a block whose x comes by a bulk copy, for which the barrier is.
template <class Parameters>
__device__ __forceinline__ void start_bulk_block(const Parameters& p, unsigned barrier) {
  if (threadIdx.x == 0) {
    init_barrier(barrier, 1);
    publish_barriers();
  }
  __syncwarp();  // racecheck takes the lanes of the warp for one another here
  start_block(p);
}

// Of kRows rows, each time anew, or what follows from it would stay in registers.
template <int kRows>
__device__ __forceinline__ int64_t first_row_of_block() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return int64_t{block} * kRows;
}

// Launches a kernel whose blocks begin so. Those that find a place at once take turns, for else
// they ask for their rows at once, get them late and all at the same time, and then write while
// nobody reads. In turns, as far apart as the memory takes to deliver what a turn asks for, they
// are from the start what later ones become: 4096 x 1024 bfloat16 took 9.95 us on an H200 at once,
// 9.4 us so (a copy 8.8), 2048 x 4096 14.6 and 14.2 us (13.1), 16384 x 1024 22.3 and 21.9 us
// (20.9). Its memory delivers a granule per cycle and multiprocessor; half as much again between
// turns is as good from memory, but slower from the L2 cache.
template <class X, class Y, class W>
cudaError_t launch_in_turns(void (*kernel)(const ForwardParameters<X, Y, W>), dim3 threads,
                            ForwardParameters<X, Y, W> p, const ForwardPlan& plan,
                            cudaStream_t stream) {
  if (plan.cluster_size > 1) {
    p.first.blocks = 1;  // no turns
  } else if (kTakesTurns<X>) {
    int resident = 0;
    const cudaError_t error =
        blocks_per_multiprocessor(resident, reinterpret_cast<const void*>(kernel),
                                  static_cast<int>(threads.x * threads.y), plan.shared_bytes);
    if (error != cudaSuccess) return error;
    // Where all find a place, none is to wait.
    if (plan.blocks > int64_t{resident} * plan.sm_count) p.first.blocks = resident * plan.sm_count;
    p.first.turn = plan.sm_count;
    p.first.cycles =
        static_cast<int>(plan.rows_per_block * p.cols * int64_t{sizeof(X)} / kChunkBytes);
  }
  return Launch(plan.blocks, threads, stream)
      .with_shared(plan.shared_bytes)
      .in_clusters(plan.cluster_size)
      .overlapping(kTakesTurns<X> && plan.overlap_launches)(kernel, p);
}

}  // namespace fastnorm::cuda
