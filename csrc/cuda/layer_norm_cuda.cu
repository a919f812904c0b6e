// The entry points of the CUDA kernels: device properties, alignment, and the dtype of x.
#include <algorithm>
#include <array>
#include <atomic>
#include <initializer_list>
#include <mutex>

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

// Whether all of them start at multiples of 16 bytes, whatever their dtypes.
bool start_granules(std::initializer_list<const void*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % kChunkBytes == 0;
  });
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

// GB/s: two transfers in a clock.
int memory_bandwidth(int device) {
  int kilohertz = 0, bits = 0;
  if (cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return static_cast<int>(int64_t{kilohertz} * 2 * (bits / 8) / 1'000'000);
}

}  // namespace

cudaError_t device_properties(int device, DeviceProperties& properties) {
  static std::array<std::atomic<bool>, kMaxDevices> known = {};
  static std::array<DeviceProperties, kMaxDevices> cache;
  static std::mutex filling;
  const bool cacheable = device >= 0 && device < kMaxDevices;
  if (cacheable && known[device].load(std::memory_order_acquire)) {
    properties = cache[device];
    return cudaSuccess;
  }
  int major = 0, minor = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&properties.sm_count, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  if (error != cudaSuccess) return error;
  properties.compute_capability = usable_capability(major * 10 + minor);
  properties.memory_bandwidth = memory_bandwidth(device);
  if (properties.compute_capability >= kClusters) error = count_clusters(properties);
  if (error != cudaSuccess) return error;
  if (cacheable) {
    const std::lock_guard<std::mutex> lock(filling);
    if (!known[device].load(std::memory_order_relaxed)) {
      cache[device] = properties;
      known[device].store(true, std::memory_order_release);
    }
  }
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

bool is_contiguous(const ForwardArgs& args) {
  return args.x_row_stride == args.cols && start_granules({args.x, args.y});
}

bool is_contiguous(const BackwardArgs& args) {
  return args.x_row_stride == args.cols && args.dy_row_stride == args.cols &&
         start_granules({args.x, args.dy, args.dx, args.mean, args.rstd});
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
