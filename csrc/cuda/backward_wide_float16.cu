// The backward of wide float16 rows that end within a chunk.
#include "backward_wide.cuh"

namespace fastnorm::cuda {

template cudaError_t launch_backward_wide(const RingParameters<Half>&, const BackwardPlan&,
                                          cudaStream_t);

}  // namespace fastnorm::cuda
