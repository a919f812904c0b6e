// The backward of float32 rows that end within a chunk.
#include "backward_elements.cuh"

namespace fastnorm::cuda {

template cudaError_t launch_backward_elements(const RingParameters<float>&,
                                              const FewRowsParameters<float>&, const BackwardPlan&,
                                              cudaStream_t);

}  // namespace fastnorm::cuda
