// The backward of bfloat16 rows that end within a chunk.
#include "backward_elements.cuh"

namespace fastnorm::cuda {

template cudaError_t launch_backward_elements(const RingParameters<BFloat16>&,
                                              const FewRowsParameters<BFloat16>&,
                                              const BackwardPlan&, cudaStream_t);

}  // namespace fastnorm::cuda
