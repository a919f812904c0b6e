// Launching: grid, block and cluster of a plan, the error checked; and dtype tags turned to types.
#pragma once

#include "layer_norm_cuda.h"
#include "numeric.cuh"

namespace fastnorm::cuda {

// Dynamic shared memory that a kernel may have without asking: 48 KB less what it has besides.
constexpr int kDefaultSharedBytes = 44 * 1024;

// Launches and returns the launch's own error. A cluster_size of one is a plain launch.
template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, dim3 threads, int cluster_size,
                   int shared_bytes, cudaStream_t stream,
                   const std::common_type_t<Parameters>&... parameters) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = threads;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  if (shared_bytes > kDefaultSharedBytes) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attribute;
  if (cluster_size > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster_size);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, parameters...);
}

template <class T>
struct Type {
  using type = T;
};

// Calls visitor(Type<T>()) for T the 16- or 32-bit type that `dtype` names.
template <class Visitor>
cudaError_t visit_16_or_32_bit(DType dtype, const Visitor& visitor) {
  switch (dtype) {
    case DType::kFloat32:
      return visitor(Type<float>());
    case DType::kFloat16:
      return visitor(Type<Half>());
    case DType::kBFloat16:
      return visitor(Type<BFloat16>());
    case DType::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

// Calls visitor with the type of y or dy beside rows of X.
template <class X, class Visitor>
cudaError_t visit_other(DType dtype, const Visitor& visitor) {
  if constexpr (std::is_same_v<X, double>) {
    return visitor(Type<double>());
  } else {
    return visit_16_or_32_bit(dtype, visitor);
  }
}

// Calls visitor with the type of the parameters beside rows of X: X itself or float.
template <class X, class Visitor>
cudaError_t visit_parameter(DType dtype, const Visitor& visitor) {
  if constexpr (sizeof(X) == 2) {
    if (dtype == DType::kFloat32) return visitor(Type<float>());
  }
  return visitor(Type<X>());
}

}  // namespace fastnorm::cuda
