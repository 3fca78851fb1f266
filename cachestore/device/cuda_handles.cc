#include "cachestore/device/cuda_handles.h"

#include <fmt/format.h>

#include <chrono>
#include <thread>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"

namespace kvtier::cachestore {

absl::Status CudaStatus(const char* call, int error) {
  if (error == cudaSuccess) return absl::OkStatus();
  const auto of = static_cast<cudaError_t>(error);
  return Error(Reason::kDeviceLost, fmt::format("{} failed with {}: {}", call, cudaGetErrorName(of),
                                                cudaGetErrorString(of)));
}

// Most work is done within microseconds: who slept would wake too late.
absl::Status Await(const CudaEvent& event, absl::Duration deadline) {
  constexpr int kBusyPolls = 100;
  const auto until = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(deadline);
  for (int polls = 0;; ++polls) {
    const cudaError_t error = cudaEventQuery(event.get());
    if (error != cudaErrorNotReady) return CudaStatus("cudaEventQuery", error);
    if (std::chrono::steady_clock::now() >= until) {
      return Error(Reason::kDeviceLost, fmt::format("its work has not ended within {} s",
                                                    absl::ToDoubleSeconds(deadline)));
    }
    if (polls < kBusyPolls) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

absl::StatusOr<CudaStream> MakeCudaStream() {
  cudaStream_t stream = nullptr;
  KVT_RETURN_IF_ERROR(CudaStatus("cudaStreamCreateWithFlags",
                                 cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)));
  return CudaStream(stream);
}

absl::StatusOr<CudaEvent> MakeCudaEvent() {
  cudaEvent_t event = nullptr;
  KVT_RETURN_IF_ERROR(CudaStatus("cudaEventCreateWithFlags",
                                 cudaEventCreateWithFlags(&event, cudaEventDisableTiming)));
  return CudaEvent(event);
}

absl::StatusOr<DeviceMemory> AllocateOnDevice(std::int64_t bytes) {
  void* memory = nullptr;
  KVT_RETURN_IF_ERROR(
      CudaStatus("cudaMalloc", cudaMalloc(&memory, static_cast<std::size_t>(bytes))));
  return DeviceMemory(static_cast<std::byte*>(memory));
}

absl::StatusOr<PinnedMemory> AllocatePinned(std::int64_t bytes) {
  void* memory = nullptr;
  KVT_RETURN_IF_ERROR(
      CudaStatus("cudaHostAlloc",
                 cudaHostAlloc(&memory, static_cast<std::size_t>(bytes), cudaHostAllocDefault)));
  return PinnedMemory(static_cast<std::byte*>(memory));
}

}  // namespace kvtier::cachestore
