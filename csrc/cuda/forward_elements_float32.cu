// The forward of float32 rows that end within a chunk.
#include "forward_elements.cuh"

namespace fastnorm::cuda {

template cudaError_t launch_elements(const ForwardParameters<float, float, float>&,
                                     const ForwardPlan&, cudaStream_t);

}  // namespace fastnorm::cuda
