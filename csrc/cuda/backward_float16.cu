// The backward of float16 rows.
#include "backward.cuh"

namespace fastnorm::cuda {

template cudaError_t backward_of<Half>(const BackwardArgs&, const BackwardPlan&, void*,
                                       cudaStream_t);

}  // namespace fastnorm::cuda
