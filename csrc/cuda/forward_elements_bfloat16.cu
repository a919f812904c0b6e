// The forward of bfloat16 rows that end within a chunk.
#include "forward_elements.cuh"

namespace fastnorm::cuda {

template cudaError_t launch_elements(const ForwardParameters<BFloat16, BFloat16, BFloat16>&,
                                     const ForwardPlan&, cudaStream_t);
template cudaError_t launch_elements(const ForwardParameters<BFloat16, BFloat16, float>&,
                                     const ForwardPlan&, cudaStream_t);

}  // namespace fastnorm::cuda
