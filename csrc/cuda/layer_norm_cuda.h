// The CUDA kernels' interface: no ATen, no allocation, no decision. Every function launches on the
// current device and returns the first error of its launches.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "../layer_norm_args.h"
#include "plan.h"

namespace fastnorm::cuda {

// The properties of a device that plans depend on; asked for once per device.
cudaError_t device_properties(int device, DeviceProperties& properties);

// The architectures that the kernels were compiled for, such as 900.
std::vector<int> compiled_architectures();

// Whether every tensor's rows start where 16-byte chunks of x and the matching pieces of the other
// tensors can be moved whole.
bool is_aligned(const ForwardArgs& args);
bool is_aligned(const BackwardArgs& args);

// Whether rows can be copied as they lie in memory: see ForwardProblem and BackwardProblem.
bool is_contiguous(const ForwardArgs& args);
bool is_contiguous(const BackwardArgs& args);

// Where weight and bias are both given they must have one dtype. `workspace` holds
// plan.workspace_bytes, aligned to 16, and needs no initial value.
cudaError_t forward(const ForwardArgs& args, const ForwardPlan& plan, void* workspace,
                    cudaStream_t stream);
cudaError_t backward(const BackwardArgs& args, const BackwardPlan& plan, void* workspace,
                     cudaStream_t stream);

}  // namespace fastnorm::cuda
