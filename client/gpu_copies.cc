#include "client/gpu_copies.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "cachestore/base/status_macros.h"

namespace kvtier::client {
namespace {

constexpr int kBusyPolls = 100;

absl::Status Copy(std::byte* to, const std::byte* from, std::uint64_t bytes,
                  const GpuStream& stream) {
  return CudaStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream.get()),
                    "cudaMemcpyAsync");
}

// Blocks of a table: a chunk has whole ones, but for the read's last, which is packed as short as
// its tokens.
absl::Status ScatterBlocks(const GpuRows& rows, const ReadGeometry& geometry, const GpuTensor& to,
                           const GpuStream& stream) {
  const std::uint64_t row = geometry.vector_bytes, block = geometry.block_tokens;
  const std::uint64_t end = rows.first + rows.count;
  for (std::uint64_t token = rows.first; token < end;) {
    const std::uint64_t in_block = token % block;
    const std::uint64_t tokens = std::min(block - in_block, end - token);
    const std::byte* from = rows.data + (token - rows.first) * geometry.heads * row;
    std::byte* at =
        to.data + static_cast<std::int64_t>(to.block_ids[token / block]) * to.block_stride;
    if (geometry.layout == v1::LAYOUT_HND && tokens < block) {
      for (std::uint64_t head = 0; head < geometry.heads; ++head) {
        KVT_RETURN_IF_ERROR(Copy(at + (head * block + in_block) * row, from + head * tokens * row,
                                 tokens * row, stream));
      }
    } else {
      KVT_RETURN_IF_ERROR(
          Copy(at + in_block * geometry.heads * row, from, tokens * geometry.heads * row, stream));
    }
    token += tokens;
  }
  return absl::OkStatus();
}

template <class Handle, class F>
absl::StatusOr<Handle> Make(const char* what, F make) {
  typename Handle::pointer made = nullptr;
  KVT_RETURN_IF_ERROR(CudaStatus(make(&made), what));
  return Handle(made);
}

template <class Handle, class F>
absl::StatusOr<Handle> Allocate(const char* what, F allocate) {
  void* memory = nullptr;
  KVT_RETURN_IF_ERROR(CudaStatus(allocate(&memory), what));
  return Handle(static_cast<std::byte*>(memory));
}

}  // namespace

absl::Status CudaStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(fmt::format("{}: CUDA says {}", what, cudaGetErrorString(error)));
}

OnGpu::OnGpu(int device) {
  status_ = CudaStatus(cudaGetDevice(&before_), "cudaGetDevice");
  status_.Update(CudaStatus(cudaSetDevice(device), "cudaSetDevice"));
}

OnGpu::~OnGpu() { cudaSetDevice(before_); }

absl::StatusOr<GpuStream> MakeGpuStream() {
  return Make<GpuStream>("cudaStreamCreate", [](cudaStream_t* made) {
    return cudaStreamCreateWithFlags(made, cudaStreamNonBlocking);
  });
}

absl::StatusOr<GpuEvent> MakeGpuEvent() {
  return Make<GpuEvent>("cudaEventCreate", [](cudaEvent_t* made) {
    return cudaEventCreateWithFlags(made, cudaEventDisableTiming);
  });
}

absl::StatusOr<GpuMemory> AllocateOnGpu(std::int64_t bytes) {
  return Allocate<GpuMemory>("cudaMalloc", [bytes](void** memory) {
    return cudaMalloc(memory, static_cast<std::size_t>(bytes));
  });
}

absl::StatusOr<PinnedMemory> AllocatePinned(std::int64_t bytes) {
  return Allocate<PinnedMemory>("cudaHostAlloc", [bytes](void** memory) {
    return cudaHostAlloc(memory, static_cast<std::size_t>(bytes), cudaHostAllocDefault);
  });
}

absl::Status Drain(const GpuStream& stream, const GpuEvent& event, absl::Duration deadline) {
  KVT_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(event.get(), stream.get()), "cudaEventRecord"));
  const auto until = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(deadline);
  for (int polls = 0;; ++polls) {
    const cudaError_t state = cudaEventQuery(event.get());
    if (state != cudaErrorNotReady) return CudaStatus(state, "copies on the GPU");
    if (std::chrono::steady_clock::now() > until) {
      return absl::DeadlineExceededError(fmt::format("copies on the GPU have not ended within {} s",
                                                     absl::ToDoubleSeconds(deadline)));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(polls < kBusyPolls ? 10 : 200));
  }
}

absl::Status Scatter(const GpuRows& rows, const ReadGeometry& geometry, const GpuTensor& to,
                     const GpuStream& stream) {
  if (geometry.heads * geometry.vector_bytes == 0) return absl::OkStatus();
  if (!to.block_ids.empty()) return ScatterBlocks(rows, geometry, to, stream);
  return ForEachRun(geometry, rows.first, rows.count, [&](const ByteRun& run) {
    return Copy(to.data + run.layer_offset, rows.data + run.chunk_offset, run.size, stream);
  });
}

}  // namespace kvtier::client
