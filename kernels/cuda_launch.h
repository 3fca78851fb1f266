#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <tuple>

// How every kernel is launched where nvcc reads it; the emulation has another of that name.
#if defined(__CUDACC__)
namespace kvtier::kernels {

template <class... Parameters, class... Arguments>
int Launch(void (*kernel)(Parameters...), std::int64_t blocks, int threads, cudaStream_t stream,
           Arguments... arguments) {
  std::tuple<Parameters...> parameters(arguments...);
  return std::apply(
      [&](auto&... of) {
        void* pointers[] = {&of...};
        // Unlike <<<>>>, it says of this launch how it went, not of what failed before.
        return cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                                dim3(static_cast<unsigned>(blocks)),
                                dim3(static_cast<unsigned>(threads)), pointers, 0, stream);
      },
      parameters);
}

}  // namespace kvtier::kernels
#endif
