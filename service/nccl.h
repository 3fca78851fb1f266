#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "cachestore/device/device.h"
#include "service/config/config.h"
#include "service/rpc/transports.h"
#include "transport/nccl.h"

namespace kvtier::service {

// Gives `transports` NCCL, and memory of the GPU that pages lie on. Null where there can be none,
// which `transports` then tells who asks for it; an error only where the memory can't be had.
absl::StatusOr<std::shared_ptr<transport::NcclRuntime>> SetUpNccl(const Config& config,
                                                                  cachestore::Device& device,
                                                                  Transports& transports);

}  // namespace kvtier::service
