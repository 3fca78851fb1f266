#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// How every kernel is launched: <<<>>> where nvcc reads it, and what stands for it elsewhere.
#if defined(__CUDACC__)
namespace kvtier::kernels {

template <class... Parameters, class... Arguments>
int Launch(void (*kernel)(Parameters...), std::int64_t blocks, int threads, cudaStream_t stream,
           Arguments... arguments) {
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, stream>>>(
      arguments...);
  return cudaGetLastError();
}

}  // namespace kvtier::kernels
#endif
