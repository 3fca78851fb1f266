#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

// A substitute for CUDA's runtime, on host memory, for tests: linked in its place. Streams are
// threads, so that what product code does not wait for is really still to come. Device memory is
// what cudaMalloc gave, and is told from host memory: copies in the wrong direction are errors.
// FAKE_CUDA_DEVICES (1) and FAKE_CUDA_MEMORY (bytes, 4 GiB) set what there is;
// FAKE_CUDA_FAULT=FUNCTION:CALLS:ERROR what Inject is told at the start.
namespace kvtier::cuda_double {

// Work of a kernel's launch. On the null stream it is counted, and runs, too.
cudaError_t Enqueue(cudaStream_t stream, std::function<void()> work);

// The call of `function` after `calls` more fails with `error`, which stays for good, as on a
// device, unless it is one that says only that the call was refused. No call: hangs the streams
// instead, whose work is never done.
void Inject(const std::string& function, int calls, cudaError_t error);
void HangStreams(bool hang);
// Forgets faults and errors.
void Reset();

struct Counters {
  std::size_t device_bytes = 0;  // allocated now
  std::size_t allocations = 0;   // device's and pinned, now
  std::int64_t launches = 0;
  std::int64_t copied_bytes = 0;
  std::int64_t pageable_copies = 0;  // asynchronous, from or to memory that isn't pinned
  std::int64_t null_stream_uses = 0;
};
Counters Count();

}  // namespace kvtier::cuda_double
