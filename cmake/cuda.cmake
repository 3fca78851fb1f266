# CUDA: kernels need its compiler, the code around them its headers and runtime library, transfers between GPUs NCCL's
# header. Sets KVTIER_CUDA_KERNELS, KVTIER_CUDA_HEADERS and KVTIER_NCCL_HEADERS, and says what there is.
set(KVTIER_CUDA AUTO CACHE STRING "AUTO: kernels where there is a CUDA compiler; ON: fail without; OFF: no CUDA at all")
set_property(CACHE KVTIER_CUDA PROPERTY STRINGS AUTO ON OFF)
set(KVTIER_CUDA_ARCHITECTURES 80-real 90-real 100-real 100-virtual CACHE STRING "GPUs to compile kernels for")

option(KVTIER_EMULATE_CUDA "Tests run on an emulated GPU; OFF: on a real one" ON)

set(KVTIER_CUDA_KERNELS OFF)
set(KVTIER_CUDA_HEADERS OFF)
set(KVTIER_NCCL_HEADERS OFF)
if(NOT KVTIER_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  # Asked for by name, CMake does not try which GPUs are there.
  set(CMAKE_CUDA_ARCHITECTURES ${KVTIER_CUDA_ARCHITECTURES})
  if(NOT KVTIER_SANITIZE)  # sanitizers see the kernels emulated
    check_language(CUDA)
  endif()
  if(CMAKE_CUDA_COMPILER AND NOT KVTIER_SANITIZE)
    enable_language(CUDA)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    set(KVTIER_CUDA_KERNELS ON)
  elseif(KVTIER_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KVTIER_CUDA is ON, and there is no CUDA compiler: set CMAKE_CUDA_COMPILER or put nvcc on PATH")
  endif()
  # CMake 3.25 sets a property of it whether it's there or not; CUDA 13 has none.
  if(NOT TARGET CUDA::nvToolsExt)
    add_library(CUDA::nvToolsExt INTERFACE IMPORTED)
  endif()
  find_package(CUDAToolkit QUIET)
  set(KVTIER_CUDA_HEADERS ${CUDAToolkit_FOUND})
  if(KVTIER_CUDA_KERNELS AND NOT CUDAToolkit_FOUND)
    message(STATUS "there is a CUDA compiler and no runtime library: no kernels")
    set(KVTIER_CUDA_KERNELS OFF)
  endif()
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS $ENV{NCCL_ROOT}/include ${CUDAToolkit_INCLUDE_DIRS})
  if(KVTIER_CUDA_HEADERS AND NCCL_INCLUDE_DIR)
    set(KVTIER_NCCL_HEADERS ON)
  endif()
endif()
if(KVTIER_CUDA_KERNELS)
  message(STATUS "CUDA ${CUDAToolkit_VERSION}: kernels for ${KVTIER_CUDA_ARCHITECTURES}")
elseif(KVTIER_CUDA_HEADERS)
  message(STATUS "CUDA ${CUDAToolkit_VERSION}: headers only; --device cuda will say so")
else()
  message(STATUS "no CUDA; --device cuda will say so")
endif()

# CMake 3.25 does not know how nvcc is asked for C++20: where it asks for C++17, it asks for that.
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA17_STANDARD_COMPILE_OPTION -std=c++20)
set(CMAKE_CUDA17_EXTENSION_COMPILE_OPTION -std=c++20)
set(kvtier_ptx_folder "${PROJECT_BINARY_DIR}/kernels/ptx")
# The codecs give the same bits as on the host: every operation rounds once, where it is written.
set(kvtier_cuda_flags -O3 -fmad=false -ftz=false -prec-div=true -prec-sqrt=true --expt-relaxed-constexpr
                      # A kernel that spills registers fails the build.
                      -Xptxas=--warn-on-spills -Werror=all-warnings)
