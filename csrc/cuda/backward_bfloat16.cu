// The backward of bfloat16 rows.
#include "backward.cuh"

namespace fastnorm::cuda {

template cudaError_t backward_of<BFloat16>(const BackwardArgs&, const BackwardPlan&, void*,
                                           cudaStream_t);

cudaError_t count_large_clusters(int& count) { return count_ring_clusters<BFloat16>(count); }

}  // namespace fastnorm::cuda
