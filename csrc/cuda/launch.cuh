// Launching: grid, block and cluster of a plan, the error checked; and dtype tags turned to types.
#pragma once

#include <atomic>

#include "layer_norm_cuda.h"
#include "numeric.cuh"

namespace fastnorm::cuda {

// Whether the architecture that is compiled for has the shared memory and the barriers of the
// kernels that stream rows, and of those that add in their order. Elsewhere no plan has them, and
// they are left empty: a library of all architectures would be too large otherwise.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
constexpr bool kStreams = false;
#else
constexpr bool kStreams = true;
#endif

// `shared_bytes`: dynamic shared memory of a block.
inline cudaLaunchConfig_t launch_config(int64_t blocks, dim3 threads, int shared_bytes,
                                        cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = threads;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  return config;
}

// Launches and returns the launch's own error. A cluster_size of one is a plain launch.
template <class... Parameters>
cudaError_t launch_dynamic(void (*kernel)(Parameters...), int64_t blocks, dim3 threads,
                           int cluster_size, int shared_bytes, cudaStream_t stream,
                           const std::common_type_t<Parameters>&... parameters) {
  cudaLaunchConfig_t config = launch_config(blocks, threads, shared_bytes, stream);
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

// Launches blocks that run all at the same time, or none of them, and may therefore wait for each
// other.
template <class... Parameters>
cudaError_t launch_together(void (*kernel)(Parameters...), int64_t blocks, dim3 threads,
                            int shared_bytes, cudaStream_t stream,
                            const std::common_type_t<Parameters>&... parameters) {
  cudaLaunchConfig_t config = launch_config(blocks, threads, shared_bytes, stream);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, parameters...);
}

template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, dim3 threads, int cluster_size,
                   cudaStream_t stream, const std::common_type_t<Parameters>&... parameters) {
  return launch_dynamic(kernel, blocks, threads, cluster_size, 0, stream, parameters...);
}

// Launches a kernel that may start while the one before it in the stream still runs: it must wait
// for that one itself (wait_for_previous_kernel). `overlap`: whether the device can do so.
template <class... Parameters>
cudaError_t launch_overlapping(bool overlap, void (*kernel)(Parameters...), dim3 blocks,
                               dim3 threads, cudaStream_t stream,
                               const std::common_type_t<Parameters>&... parameters) {
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  if (overlap) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, parameters...);
}

// Lets blocks of `kernel` have `bytes` of dynamic shared memory on the current device, and clusters
// more blocks than all devices offer. `prepared`: of this kernel, a bit for each device.
inline cudaError_t allow_blocks(const void* kernel, int bytes, bool large_clusters,
                                std::atomic<uint64_t>& prepared) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (error != cudaSuccess || (prepared.load(std::memory_order_relaxed) & bit) != 0) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && large_clusters) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error == cudaSuccess) prepared.fetch_or(bit, std::memory_order_relaxed);
  return error;
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
