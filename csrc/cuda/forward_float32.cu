// The forward of float32 rows.
#include "forward.cuh"

namespace fastnorm::cuda {

template cudaError_t forward_of<float>(const ForwardArgs&, const ForwardPlan&, void*, cudaStream_t);

}  // namespace fastnorm::cuda
