// The backward of float32 rows.
#include "backward.cuh"

namespace fastnorm::cuda {

template cudaError_t backward_of<float>(const BackwardArgs&, const BackwardPlan&, void*,
                                        cudaStream_t);

}  // namespace fastnorm::cuda
