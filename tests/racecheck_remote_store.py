"""What racecheck reports although it is right, alone: see docs/reliability.md.

    compute-sanitizer --tool racecheck --num-cuda-barriers 128 --racecheck-report hazard \\
        --print-limit 20 python tests/racecheck_remote_store.py

Threads copy into shared memory with cp.async, wait for all their copies, and meet those of the
cluster at its barrier; then each writes into the other block what its own copies added up to, where
that one's first copies had gone. compute-sanitizer 2025.3.1 calls this "invalid memcpy_async
synchronization". The sums are checked.
"""

from __future__ import annotations

import torch

BLOCKS, THREADS, LAUNCHES = 132, 128, 10
SOURCE = r"""
#define SLOTS 4
#define THREADS 128
extern "C" __global__ void __cluster_dims__(2, 1, 1)
    remote_store(float* out, const float4* in, int rows, unsigned salt) {
  __shared__ float4 ring[SLOTS * THREADS];
  const unsigned own = (unsigned)__cvta_generic_to_shared(ring) + threadIdx.x * 16;
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const auto slot = [&](int row) { return own + row % SLOTS * THREADS * 16; };
  const auto copy = [&](int row) {
    if (row < rows) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 16;"
                   :
                   : "r"(slot(row)), "l"(in + (blockIdx.x * rows + row) * THREADS + threadIdx.x)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  for (int row = 0; row < SLOTS; ++row) copy(row);
  float sum = 0;
  for (int row = 0; row < rows; ++row) {
    asm volatile("cp.async.wait_group 3;" ::: "memory");  // SLOTS - 1 are under way
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(slot(row))
                 : "memory");
    sum += v.x + v.y + v.z + v.w;
    copy(row + SLOTS);
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  // Blocks come to the barrier at different times.
  const unsigned pause = ((blockIdx.x * 2654435761u + salt) >> 20) % 4096u, begin = clock();
  while ((unsigned)clock() - begin < pause) {
  }
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  unsigned other;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(own), "r"(rank ^ 1));
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %1, %1, %1};" ::"r"(other), "f"(sum)
               : "memory");
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  float got;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(got) : "r"(own) : "memory");
  out[blockIdx.x * THREADS + threadIdx.x] = got;
}
"""


def main() -> None:
    kernel = torch.cuda._compile_kernel(SOURCE, "remote_store")
    for rows in (1, 4, 7, 10, 13):
        ones = torch.ones(BLOCKS * rows * THREADS * 4, device="cuda")
        for launch in range(LAUNCHES):
            out = torch.empty(BLOCKS * THREADS, device="cuda")
            kernel(
                grid=(BLOCKS, 1, 1), block=(THREADS, 1, 1), args=[out, ones, rows, launch * 7919]
            )
            assert (out == 4 * rows).all()
    print(f"{5 * LAUNCHES} launches, every sum right")


if __name__ == "__main__":
    main()
