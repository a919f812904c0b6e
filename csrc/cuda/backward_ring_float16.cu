// The backward of float16 rows that stream through shared memory, and of few of them.
#include "backward_ring.cuh"
#include "few_rows.cuh"

namespace fastnorm::cuda {

template cudaError_t launch_few_rows(const FewRowsParameters<Half>&, const BackwardPlan&,
                                     cudaStream_t);
template cudaError_t launch_ring<true>(const RingParameters<Half>&, const BackwardPlan&,
                                       cudaStream_t);
template cudaError_t launch_ring<false>(const RingParameters<Half>&, const BackwardPlan&,
                                        cudaStream_t);

}  // namespace fastnorm::cuda
