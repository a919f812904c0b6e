// The forward of rows that a cluster of blocks holds.
#include "forward_ring.cuh"

namespace fastnorm::cuda {

template cudaError_t launch_forward_ring<float>(const ForwardArgs&, const ForwardPlan&, void*,
                                                cudaStream_t);
template cudaError_t launch_forward_ring<Half>(const ForwardArgs&, const ForwardPlan&, void*,
                                               cudaStream_t);
template cudaError_t launch_forward_ring<BFloat16>(const ForwardArgs&, const ForwardPlan&, void*,
                                                   cudaStream_t);

}  // namespace fastnorm::cuda
