// The forward of float64 rows.
#include "forward.cuh"

namespace fastnorm::cuda {

template cudaError_t forward_of<double>(const ForwardArgs&, const ForwardPlan&, void*,
                                        cudaStream_t);

}  // namespace fastnorm::cuda
