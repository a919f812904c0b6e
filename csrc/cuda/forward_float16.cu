// The forward of float16 rows.
#include "forward.cuh"

namespace fastnorm::cuda {

template cudaError_t forward_of<Half>(const ForwardArgs&, const ForwardPlan&, void*, cudaStream_t);

}  // namespace fastnorm::cuda
