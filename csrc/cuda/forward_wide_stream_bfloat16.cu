// The forward of wide bfloat16 rows by blocks that stay.
#include "forward_wide_stream.cuh"

namespace fastnorm::cuda {

template cudaError_t launch_forward_wide<BFloat16>(const ForwardArgs&, const ForwardPlan&,
                                                   cudaStream_t);

}  // namespace fastnorm::cuda
