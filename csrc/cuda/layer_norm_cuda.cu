// The entry points of the CUDA kernels: device properties, alignment, and the dtype of x.
#include <algorithm>
#include <array>
#include <atomic>

#include "backward.cuh"
#include "forward.cuh"
#include "layer_norm_cuda.h"

namespace fastnorm::cuda {
namespace {

constexpr int kMaxDevices = 128;
constexpr int kClusters = 90;  // the least capability that has them

// Whether `elements` of `dtype` from `data` on, and from every row `row_stride` further, start at a
// multiple of the access they are moved by.
bool is_aligned(const void* data, DType dtype, int64_t row_stride, int64_t elements) {
  const int64_t access = std::min<int64_t>(kChunkBytes, elements * size_in_bytes(dtype));
  return reinterpret_cast<uintptr_t>(data) % access == 0 &&
         row_stride * size_in_bytes(dtype) % access == 0;
}

// The capability that kernels may be planned for: without code for 9.0 or later, as in a build for
// 8.0 whose PTX a newer device compiles, there are no clusters.
int usable_capability(int capability) {
  const std::vector<int> architectures = compiled_architectures();
  const bool compiled =
      std::any_of(architectures.begin(), architectures.end(), [&](int architecture) {
        return architecture / 10 >= kClusters && architecture / 10 <= capability;
      });
  return compiled ? capability : std::min(capability, kClusters - 1);
}

}  // namespace

cudaError_t device_properties(int device, DeviceProperties& properties) {
  // Packed into one word, so that threads may race to fill it: all write the same.
  static std::array<std::atomic<int64_t>, kMaxDevices> cache = {};
  const bool cacheable = device >= 0 && device < kMaxDevices;
  int64_t packed = cacheable ? cache[device].load(std::memory_order_relaxed) : 0;
  if (packed == 0) {
    int sm_count = 0, major = 0, minor = 0;
    cudaError_t error = cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    }
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    }
    if (error != cudaSuccess) return error;
    const int capability = usable_capability(major * 10 + minor);
    int large_clusters = 0;
    if (capability >= kClusters) {
      error = count_large_clusters(large_clusters);
      if (error != cudaSuccess) return error;
    }
    packed = (int64_t{sm_count} << 32) | (int64_t{large_clusters} << 16) | capability;
    if (cacheable) cache[device].store(packed, std::memory_order_relaxed);
  }
  properties.sm_count = static_cast<int>(packed >> 32);
  properties.large_clusters = static_cast<int>(packed >> 16 & 0xffff);
  properties.compute_capability = static_cast<int>(packed & 0xffff);
  return cudaSuccess;
}

std::vector<int> compiled_architectures() { return {__CUDA_ARCH_LIST__}; }

bool is_aligned(const ForwardArgs& args) {
  const int64_t chunk = kChunkBytes / size_in_bytes(args.x_dtype);
  return is_aligned(args.x, args.x_dtype, args.x_row_stride, chunk) &&
         is_aligned(args.y, args.y_dtype, args.cols, chunk) &&
         is_aligned(args.weight, args.weight_dtype, 0, chunk) &&
         is_aligned(args.bias, args.bias_dtype, 0, chunk);
}

bool is_aligned(const BackwardArgs& args) {
  const int64_t chunk = kChunkBytes / size_in_bytes(args.x_dtype);
  return is_aligned(args.x, args.x_dtype, args.x_row_stride, chunk) &&
         is_aligned(args.dy, args.dy_dtype, args.dy_row_stride, chunk) &&
         is_aligned(args.dx, args.x_dtype, args.cols, chunk) &&
         is_aligned(args.weight, args.weight_dtype, 0, chunk);
}

cudaError_t forward(const ForwardArgs& args, const ForwardPlan& plan, void* workspace,
                    cudaStream_t stream) {
  switch (args.x_dtype) {
    case DType::kFloat32:
      return forward_of<float>(args, plan, workspace, stream);
    case DType::kFloat16:
      return forward_of<Half>(args, plan, workspace, stream);
    case DType::kBFloat16:
      return forward_of<BFloat16>(args, plan, workspace, stream);
    case DType::kFloat64:
      return forward_of<double>(args, plan, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t backward(const BackwardArgs& args, const BackwardPlan& plan, void* workspace,
                     cudaStream_t stream) {
  switch (args.x_dtype) {
    case DType::kFloat32:
      return backward_of<float>(args, plan, workspace, stream);
    case DType::kFloat16:
      return backward_of<Half>(args, plan, workspace, stream);
    case DType::kBFloat16:
      return backward_of<BFloat16>(args, plan, workspace, stream);
    case DType::kFloat64:
      return backward_of<double>(args, plan, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fastnorm::cuda
