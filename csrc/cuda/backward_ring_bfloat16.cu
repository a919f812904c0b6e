// The backward of bfloat16 rows that stream through shared memory, and of few of them.
#include "backward_ring.cuh"
#include "few_rows.cuh"

namespace fastnorm::cuda {

template cudaError_t launch_few_rows(const FewRowsParameters<BFloat16>&, const BackwardPlan&,
                                     cudaStream_t);
template cudaError_t launch_ring<true>(const RingParameters<BFloat16>&, const BackwardPlan&,
                                       cudaStream_t);
template cudaError_t launch_ring<false>(const RingParameters<BFloat16>&, const BackwardPlan&,
                                        cudaStream_t);

cudaError_t count_clusters(DeviceProperties& properties) {
  return count_ring_clusters<BFloat16>(properties);
}

}  // namespace fastnorm::cuda
