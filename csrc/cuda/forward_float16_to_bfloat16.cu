// The forward of float16 rows that are written in bfloat16.
#include "forward.cuh"

namespace fastnorm::cuda {

template cudaError_t forward_to<Half, BFloat16>(const ForwardArgs&, const ForwardPlan&, void*,
                                                cudaStream_t);

}  // namespace fastnorm::cuda
