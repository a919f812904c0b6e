// The backward of bfloat16 rows.
#include "backward.cuh"

namespace fastnorm::cuda {

template cudaError_t backward_of<BFloat16>(const BackwardArgs&, const BackwardPlan&, void*,
                                           cudaStream_t);

}  // namespace fastnorm::cuda
