#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cachestore/device/device.h"

namespace kvtier::cachestore {

struct CudaOptions {
  int index = 0;
  // Between host and device, beside what is reserved: as much device memory as pinned host memory.
  // Calls of as many threads run at once.
  int staging_slots = 4;
  std::int64_t staging_bytes = 16 << 20;  // of a slot
  // How long work may take until the device counts as lost.
  absl::Duration deadline = absl::Seconds(30);
};

// Pages in the memory of GPU `index`, codecs as kernels there. Thread-safe. FAILED_PRECONDITION
// where there is no such device: no driver, no GPU, or a program built without kernels.
absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(const CudaOptions& options);

}  // namespace kvtier::cachestore
