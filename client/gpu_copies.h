#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/read_check.h"

// What a worker's end does with its GPU, in CUDA's terms.
namespace kvtier::client {

// INTERNAL, naming the call, unless it went well.
absl::Status CudaStatus(cudaError_t error, const char* what);

template <auto kFree>
struct FreeCuda {
  template <class T>
  void operator()(T* handle) const {
    kFree(handle);
  }
};
using GpuStream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, FreeCuda<cudaStreamDestroy>>;
using GpuEvent = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, FreeCuda<cudaEventDestroy>>;
using GpuMemory = std::unique_ptr<std::byte, FreeCuda<cudaFree>>;
using PinnedMemory = std::unique_ptr<std::byte, FreeCuda<cudaFreeHost>>;

// The thread's device while this lives: what is made, is made there. Engines have their own.
class OnGpu {
 public:
  explicit OnGpu(int device);
  ~OnGpu();
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

  const absl::Status& status() const { return status_; }

 private:
  int before_ = 0;
  absl::Status status_;
};

absl::StatusOr<GpuStream> MakeGpuStream();
absl::StatusOr<GpuEvent> MakeGpuEvent();
absl::StatusOr<GpuMemory> AllocateOnGpu(std::int64_t bytes);
absl::StatusOr<PinnedMemory> AllocatePinned(std::int64_t bytes);

// Until all that is on the stream now is done. DEADLINE_EXCEEDED where that takes longer; CUDA's
// own waits have no deadline.
absl::Status Drain(const GpuStream& stream, const GpuEvent& event, absl::Duration deadline);

// Where K or V of a layer of one sequence goes: densely, or block i of the read at
// data + block_ids[i] * block_stride, each as large as request.block_tokens say.
struct GpuTensor {
  std::byte* data = nullptr;
  std::span<const std::uint32_t> block_ids = {};
  std::int64_t block_stride = 0;  // bytes
};

// K or V of one chunk: `count` tokens from `first` (of the layer's, or, of blocks, the read's) on.
struct GpuRows {
  const std::byte* data = nullptr;
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};
// Puts on the stream what takes them from where they lie together to where they go.
absl::Status Scatter(const GpuRows& rows, const ReadGeometry& geometry, const GpuTensor& to,
                     const GpuStream& stream);

}  // namespace kvtier::client
