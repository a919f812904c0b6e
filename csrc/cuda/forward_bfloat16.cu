// The forward of bfloat16 rows.
#include "forward.cuh"

namespace fastnorm::cuda {

template cudaError_t forward_of<BFloat16>(const ForwardArgs&, const ForwardPlan&, void*,
                                          cudaStream_t);

}  // namespace fastnorm::cuda
