// Asynchronous instructions: copies into shared memory, barriers in it that count bytes, stores to
// another block's, and launches that overlap. But for start_copy, of the forward, and what waits
// for its copies they are of compute capability 9.0: on older devices they do nothing, and plans do
// not use them there.
#pragma once

#include "numeric.cuh"
#include "shift.cuh"

namespace fastnorm::cuda {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Loads that the compiler neither merges nor moves: ptxas otherwise keeps what it has read from
// shared memory once in registers that it does not have.
__device__ __forceinline__ Granule load_shared(unsigned address) {
  Granule granule;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(granule.words[0]), "=r"(granule.words[1]), "=r"(granule.words[2]),
                 "=r"(granule.words[3])
               : "r"(address)
               : "memory");
  return granule;
}

__device__ __forceinline__ void store_shared(unsigned address, const Granule& granule) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(granule.words[0]),
               "r"(granule.words[1]), "r"(granule.words[2]), "r"(granule.words[3])
               : "memory");
}

// Copies `bytes` bytes from device memory to shared memory, an element of kSize bytes at a time.
template <int kSize>
__device__ __forceinline__ void copy_elements(unsigned target, const char* source, int bytes) {
#pragma unroll 1
  for (int at = 0; at < bytes; at += kSize) {
    if constexpr (kSize == 2) {
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(target + at),
                   "h"(*reinterpret_cast<const uint16_t*>(source + at))
                   : "memory");
    } else {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(target + at),
                   "r"(*reinterpret_cast<const uint32_t*>(source + at))
                   : "memory");
    }
  }
}

// The element of X at an address in shared memory.
template <class X>
__device__ __forceinline__ float load_element(unsigned address) {
  if constexpr (kIs16Bit<X>) {
    uint16_t bits;
    asm volatile("ld.volatile.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
    return widen(*reinterpret_cast<const X*>(&bits));
  } else {
    float value;
    asm volatile("ld.volatile.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
  }
}

__device__ __forceinline__ uint16_t load_bits16(unsigned address) {
  uint16_t bits;
  asm volatile("ld.volatile.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
  return bits;
}

template <class X>
__device__ __forceinline__ void put_element(unsigned address, X element) {
  if constexpr (kIs16Bit<X>) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address),
                 "h"(*reinterpret_cast<const uint16_t*>(&element))
                 : "memory");
  } else {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(element) : "memory");
  }
}

// Two elements of 16 bits that lie in a word of shared memory.
template <class X>
__device__ __forceinline__ Pack<X, 2> load_pair(unsigned address) {
  uint32_t bits;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(bits) : "r"(address) : "memory");
  Pack<X, 2> pair;
  pair.set_bits32(0, bits);
  return pair;
}

template <class X>
__device__ __forceinline__ void put_pair(unsigned address, const Pack<X, 2>& pair) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(pair.bits32(0)) : "memory");
}

// Copies an element of kSize bytes from shared memory to device memory.
template <int kSize>
__device__ __forceinline__ void store_element(char* target, unsigned source) {
  if constexpr (kSize == 2) {
    uint16_t bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(source) : "memory");
    *reinterpret_cast<uint16_t*>(target) = bits;
  } else {
    uint32_t bits;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(source) : "memory");
    *reinterpret_cast<uint32_t*>(target) = bits;
  }
}

// Copies 16 bytes to shared memory by way of the L1 cache; the thread that asked for them may read
// them after wait_for_copies.
__device__ __forceinline__ void start_copy(uint4* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
#else
  *shared = *static_cast<const uint4*>(global);
#endif
}

// Copies eight bytes likewise.
__device__ __forceinline__ void copy_8_bytes(unsigned target, const void* source) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(target), "l"(source) : "memory");
#endif
}

// The same as start_copy from a multiple of eight bytes on.
__device__ __forceinline__ void start_copy_by_elements(uint4* shared, const double* global) {
#if __CUDA_ARCH__ >= 800
  copy_8_bytes(shared_address(shared), global);
  copy_8_bytes(shared_address(shared) + sizeof(double), global + 1);
#else
  double* const elements = reinterpret_cast<double*>(shared);
  elements[0] = global[0];
  elements[1] = global[1];
#endif
}

__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Copies a granule from device memory to shared memory, by way of the L1 cache. Past it, half of
// the requests fetch a sector of 32 bytes twice where a row begins at its second half: 14616 x 4584
// bfloat16 took 119 us on an H200 so, 111 us by way of it, and aligned ones 1 to 3 % more. But what
// is under way needs room there: with 28 KB left of it beside shared memory, 16384 x 4096 float32
// took 234 us, past it 199 us, by way of 92 KB 198 us.
__device__ __forceinline__ void copy_async(unsigned target, const void* source) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
#endif
}

// The same, past the L1 cache if not kCached.
template <bool kCached>
__device__ __forceinline__ void copy_granule(unsigned target, const void* source) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kCached) {
    copy_async(target, source);
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
  }
#endif
}

// Closes a group of this thread's copies.
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of this thread's groups are still under way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// A barrier in shared memory: its phases end when `count` threads have arrived and the bytes that
// they announced have been stored.
__device__ __forceinline__ void init_barrier(unsigned barrier, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
#endif
}

// Makes barriers known to the other blocks of the cluster, before a barrier of all its threads.
__device__ __forceinline__ void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void arrive(unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(barrier)
               : "memory");
#endif
}

__device__ __forceinline__ void arrive_and_expect(unsigned barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;}" ::"r"(
          barrier),
      "r"(bytes)
      : "memory");
#endif
}

// Waits for the end of the barrier's phase of this parity. kCluster: other blocks store here. What
// they store is in shared memory, but an acquire at the scope of the cluster waits for all loads
// under way and empties the L1 cache (CCTL.IVALL). That is a brake, and one that the rings need: by
// a fence for shared memory alone, which is no instruction, 8192 x 16384 bfloat16 took 306 us
// backward on an H100 instead of 282 us, 4096 x 50257 533 us instead of 461 us.
template <bool kCluster>
__device__ __forceinline__ void wait_barrier(unsigned barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  int done = 0;
  while (!done) {
    if constexpr (kCluster) {
      asm volatile(
          "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
          "selp.b32 %0, 1, 0, p;}"
          : "=r"(done)
          : "r"(barrier), "r"(parity)
          : "memory");
    } else {
      asm volatile(
          "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
          "selp.b32 %0, 1, 0, p;}"
          : "=r"(done)
          : "r"(barrier), "r"(parity)
          : "memory");
    }
  }
#endif
}

// Whether the barrier's phase of this parity has ended.
__device__ __forceinline__ bool has_ended(unsigned barrier, int parity) {
  int done = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
#endif
  return done != 0;
}

// Meets the other warps of a group of `warps` of them.
__device__ __forceinline__ void meet_group(int group, int warps) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(warps * kWarpSize) : "memory");
}

// The last multiple that is no more, and the first that is no less.
template <int kMultiple>
__device__ __forceinline__ int round_down(int n) {
  return n & -kMultiple;
}
template <int kMultiple>
__device__ __forceinline__ int round_up(int n) {
  return round_down<kMultiple>(n + kMultiple - 1);
}

// Copies granules from device memory to shared memory; the barrier counts their bytes.
__device__ __forceinline__ void copy_bulk(unsigned target, const void* source, int bytes,
                                          unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
#endif
}

// Copies granules from shared memory, where all threads that wrote them have called
// publish_to_copies before a barrier of the block, to device memory.
__device__ __forceinline__ void store_bulk(void* target, unsigned source, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(source), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

__device__ __forceinline__ void publish_to_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Waits until what this thread stores by store_bulk has been read.
__device__ __forceinline__ void wait_bulk_reads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

// The address that `local`, of this block's shared memory, has in the block of rank `rank`.
__device__ __forceinline__ unsigned remote_address(unsigned local, int rank) {
  unsigned remote = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
#endif
  return remote;
}

__device__ __forceinline__ float2 load_float2(unsigned address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ float4 load_float4(unsigned address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_float4(unsigned address, const float4& value) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

// The same from an address that remote_address gave.
__device__ __forceinline__ float4 load_remote(unsigned address) {
  float4 value = make_float4(0, 0, 0, 0);
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
#endif
  return value;
}

// Stores a pair into another block's shared memory and counts its 8 bytes at a barrier there.
__device__ __forceinline__ void store_async(unsigned target, float first, float second,
                                            unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          target),
      "f"(first), "f"(second), "r"(barrier)
      : "memory");
#endif
}

// Lets the next kernel of the stream start where there is room for it, if it was launched to
// overlap with this one.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for the end of the kernel before, and for what it wrote.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace fastnorm::cuda
