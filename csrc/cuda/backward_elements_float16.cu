// The backward of float16 rows that end within a chunk.
#include "backward_elements.cuh"

namespace fastnorm::cuda {

template cudaError_t launch_backward_elements(const RingParameters<Half>&,
                                              const FewRowsParameters<Half>&, const BackwardPlan&,
                                              cudaStream_t);

}  // namespace fastnorm::cuda
