# Looks at the torch that find_package(Torch) would find, and sets FASTNORM_TORCH_PROBLEM to what
# keeps CMake from using it, or to nothing. Torch's own package stops a CUDA build of torch without a
# complete CUDA toolkit with a message about Caffe2. Included by CMakeLists.txt and by
# fastnormConfig.cmake.

set(FASTNORM_TORCH_PROBLEM "")

if(NOT TARGET torch)
  unset(_fastnorm_torch CACHE)
  find_path(
    _fastnorm_torch TorchConfig.cmake
    HINTS ${Torch_DIR} ${Torch_ROOT} $ENV{Torch_DIR} $ENV{Torch_ROOT} ${CMAKE_PREFIX_PATH}
          ENV CMAKE_PREFIX_PATH
    PATH_SUFFIXES share/cmake/Torch Torch)
  if(_fastnorm_torch AND EXISTS "${_fastnorm_torch}/../../../lib/libtorch_cuda.so")
    get_filename_component(_fastnorm_torch_root "${_fastnorm_torch}/../../.." ABSOLUTE)
    find_package(CUDAToolkit QUIET)
    set(_fastnorm_missing "")
    foreach(_fastnorm_library cudart cublas cublasLt cufft curand nvrtc cuda_driver)
      if(NOT TARGET CUDA::${_fastnorm_library})
        list(APPEND _fastnorm_missing ${_fastnorm_library})
      endif()
    endforeach()
    if(_fastnorm_missing)
      if(CUDAToolkit_FOUND)
        list(JOIN _fastnorm_missing ", " _fastnorm_missing)
        string(CONCAT _fastnorm_missing "the one in ${CUDAToolkit_BIN_DIR} "
                      "(${CUDAToolkit_VERSION}) lacks ${_fastnorm_missing}")
      else()
        set(_fastnorm_missing "none was found")
      endif()
      string(
        CONCAT
          FASTNORM_TORCH_PROBLEM
          "the torch in ${_fastnorm_torch_root} is a CUDA build, whose CMake package needs a complete "
          "CUDA toolkit, and ${_fastnorm_missing}.\n"
          "Install the CUDA toolkit that this torch was built with and name its root in "
          "CUDAToolkit_ROOT and in CUDA_PATH, or use a CPU build of torch "
          "(https://pytorch.org/get-started).")
    endif()
  endif()
  unset(_fastnorm_torch CACHE)
endif()
