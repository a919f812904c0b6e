// The backward of float64 rows.
#include "backward.cuh"

namespace fastnorm::cuda {

template cudaError_t backward_of<double>(const BackwardArgs&, const BackwardPlan&, void*,
                                         cudaStream_t);

}  // namespace fastnorm::cuda
