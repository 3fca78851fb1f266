#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

// What CUDA's runtime hands out, given back by itself, and its errors as statuses.
namespace kvtier::cachestore {

// UNAVAILABLE, naming the call and what it said, unless it went well. `error`: a cudaError_t.
absl::Status CudaStatus(const char* call, int error);

template <auto kFree>
struct CudaFree {
  template <class T>
  void operator()(T* handle) const {
    kFree(handle);
  }
};
using CudaStream =
    std::unique_ptr<std::remove_pointer_t<cudaStream_t>, CudaFree<cudaStreamDestroy>>;
using CudaEvent = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, CudaFree<cudaEventDestroy>>;
using DeviceMemory = std::unique_ptr<std::byte, CudaFree<cudaFree>>;
using PinnedMemory = std::unique_ptr<std::byte, CudaFree<cudaFreeHost>>;

// Until what was before the event is done; DEVICE_LOST when that takes longer. CUDA's own waits
// have no deadline.
absl::Status Await(const CudaEvent& event, absl::Duration deadline);

absl::StatusOr<CudaStream> MakeCudaStream();
absl::StatusOr<CudaEvent> MakeCudaEvent();
absl::StatusOr<DeviceMemory> AllocateOnDevice(std::int64_t bytes);
absl::StatusOr<PinnedMemory> AllocatePinned(std::int64_t bytes);

}  // namespace kvtier::cachestore
