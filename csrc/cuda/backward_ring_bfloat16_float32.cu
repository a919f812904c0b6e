// The backward of bfloat16 rows that stream through shared memory, of a float32 y.
#include "backward_ring.cuh"

namespace fastnorm::cuda {

template cudaError_t launch_ring<true>(const RingParameters<BFloat16, float>&, const BackwardPlan&,
                                       cudaStream_t);
template cudaError_t launch_ring<false>(const RingParameters<BFloat16, float>&, const BackwardPlan&,
                                        cudaStream_t);

}  // namespace fastnorm::cuda
