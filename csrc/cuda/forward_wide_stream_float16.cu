// The forward of wide float16 rows by blocks that stay.
#include "forward_wide_stream.cuh"

namespace fastnorm::cuda {

template cudaError_t launch_forward_wide<Half>(const ForwardArgs&, const ForwardPlan&,
                                               cudaStream_t);

}  // namespace fastnorm::cuda
