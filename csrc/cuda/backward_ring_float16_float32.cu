// The backward of float16 rows that stream through shared memory, of a float32 y.
#include "backward_ring.cuh"

namespace fastnorm::cuda {

template cudaError_t launch_ring<true>(const RingParameters<Half, float>&, const BackwardPlan&,
                                       cudaStream_t);
template cudaError_t launch_ring<false>(const RingParameters<Half, float>&, const BackwardPlan&,
                                        cudaStream_t);

}  // namespace fastnorm::cuda
