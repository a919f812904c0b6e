// The forward of float16 rows that end within a chunk.
#include "forward_elements.cuh"

namespace fastnorm::cuda {

template cudaError_t launch_elements(const ForwardParameters<Half, Half, Half>&, const ForwardPlan&,
                                     cudaStream_t);
template cudaError_t launch_elements(const ForwardParameters<Half, Half, float>&,
                                     const ForwardPlan&, cudaStream_t);

}  // namespace fastnorm::cuda
