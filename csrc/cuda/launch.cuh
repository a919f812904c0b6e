// Launching: what a plan says of grid, block and cluster; and dtype tags turned to types.
#pragma once

#include <atomic>
#include <iterator>

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

// A launch: what it is to be is said first, then it is called with a kernel and its parameters, and
// returns its own error.
class Launch {
 public:
  Launch(dim3 blocks, dim3 threads, cudaStream_t stream) {
    config_.gridDim = blocks;
    config_.blockDim = threads;
    config_.stream = stream;
  }
  Launch(int64_t blocks, dim3 threads, cudaStream_t stream)
      : Launch(dim3(static_cast<unsigned>(blocks)), threads, stream) {}

  // Dynamic shared memory of a block.
  Launch& with_shared(int bytes) {
    config_.dynamicSmemBytes = static_cast<size_t>(bytes);
    return *this;
  }

  // Of so many blocks, if they are more than one. (As clusters of one an H200 starts small blocks
  // more slowly: 37409 x 1791 bfloat16 took 124 us so, 83 us without.)
  Launch& in_clusters(int size) {
    if (size > 1) {
      auto& cluster = add(cudaLaunchAttributeClusterDimension).clusterDim;
      cluster.x = static_cast<unsigned>(size);
      cluster.y = cluster.z = 1;
    }
    return *this;
  }

  // All blocks run at the same time, or none of them: they may wait for each other.
  Launch& together() {
    add(cudaLaunchAttributeCooperative).cooperative = 1;
    return *this;
  }

  // The kernel may start while the one before it in the stream still runs: it must wait for that
  // one itself (wait_for_previous_kernel). `possible`: whether the device can do so.
  Launch& overlapping(bool possible) {
    if (possible) {
      add(cudaLaunchAttributeProgrammaticStreamSerialization)
          .programmaticStreamSerializationAllowed = 1;
    }
    return *this;
  }

  template <class... Parameters>
  cudaError_t operator()(void (*kernel)(Parameters...),
                         const std::common_type_t<Parameters>&... parameters) {
    config_.attrs = attributes_;
    return cudaLaunchKernelEx(&config_, kernel, parameters...);
  }

 private:
  cudaLaunchConfig_t config_ = {};
  cudaLaunchAttribute attributes_[2];

  cudaLaunchAttributeValue& add(cudaLaunchAttributeID id) {
    cudaLaunchAttribute& attribute = attributes_[config_.numAttrs++];
    attribute.id = id;
    return attribute.val;
  }
};

// Of all that a multiprocessor can give to shared memory, in percent, what leaves room enough for
// an L1 cache through which copies into it pass (see copy_async): of float32, and of a float32 dy
// beside a 16-bit x, of which blocks of ten warps would have 28 KB of it else, for there is room
// for two of them. Of an elementwise sum on an H100 896 columns in five rows .855 so and .945, 2560
// in two .905 and .945, 5120 in one .89 and .93.
constexpr int kCachedShare = 72;

// Lets blocks of `kernel` have `bytes` of dynamic shared memory on the current device, and clusters
// more blocks than all devices offer. `prepared`: of this kernel, a bit for each device. `share`:
// of what a multiprocessor can give to shared memory, what it is to give, in percent, if the blocks
// do not need more; by default the driver makes room for as many blocks as there are threads for.
inline cudaError_t allow_blocks(const void* kernel, int bytes, bool large_clusters,
                                std::atomic<uint64_t>& prepared,
                                int share = cudaSharedmemCarveoutDefault) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (error != cudaSuccess || (prepared.load(std::memory_order_relaxed) & bit) != 0) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && large_clusters) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, share);
  }
  if (error == cudaSuccess) prepared.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

// How many blocks of a kernel a multiprocessor of the current device holds. What was found is kept,
// so that a launch need not ask the driver again.
inline cudaError_t blocks_per_multiprocessor(int& blocks, const void* kernel, int threads,
                                             int shared_bytes) {
  struct Known {
    const void* kernel = nullptr;
    int device = -1, threads = 0, shared_bytes = 0, blocks = 0;
  };
  thread_local Known known[256];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const uintptr_t mixed = reinterpret_cast<uintptr_t>(kernel) / 16 + threads + 31 * device;
  Known& here = known[mixed % std::size(known)];
  if (here.kernel != kernel || here.device != device || here.threads != threads ||
      here.shared_bytes != shared_bytes) {
    int found = 0;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, kernel, threads,
                                                          static_cast<size_t>(shared_bytes));
    if (error != cudaSuccess) return error;
    here = {kernel, device, threads, shared_bytes, found};
  }
  blocks = here.blocks;
  return cudaSuccess;
}

// Calls visitor(std::integral_constant<int, N>()) for that N of kFirst, kFirst + kStep, ..., kLast
// that `number` is.
template <int kFirst, int kLast, int kStep = 1, class Visitor>
cudaError_t visit_number(int number, const Visitor& visitor) {
  if (number == kFirst) return visitor(std::integral_constant<int, kFirst>());
  if constexpr (kFirst < kLast) {
    return visit_number<kFirst + kStep, kLast, kStep>(number, visitor);
  } else {
    return cudaErrorInvalidValue;
  }
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
