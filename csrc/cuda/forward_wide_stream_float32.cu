// The forward of wide float32 rows by blocks that stay.
#include "forward_wide_stream.cuh"

namespace fastnorm::cuda {

template cudaError_t launch_forward_wide<float>(const ForwardArgs&, const ForwardPlan&,
                                                cudaStream_t);

}  // namespace fastnorm::cuda
