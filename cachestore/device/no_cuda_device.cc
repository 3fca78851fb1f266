// In place of cuda_device.cc where there is no CUDA compiler.
#include "cachestore/device/cuda_device.h"

namespace kvtier::cachestore {

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(const CudaOptions&) {
  return absl::FailedPreconditionError("this program was built without CUDA kernels");
}

}  // namespace kvtier::cachestore
