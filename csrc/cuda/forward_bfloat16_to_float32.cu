// The forward of bfloat16 rows that are written in float32.
#include "forward.cuh"

namespace fastnorm::cuda {

template cudaError_t forward_to<BFloat16, float>(const ForwardArgs&, const ForwardPlan&, void*,
                                                 cudaStream_t);

}  // namespace fastnorm::cuda
