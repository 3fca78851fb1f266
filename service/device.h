#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "cachestore/device/device.h"

namespace kvtier::service {

// The device that --device names: "host", "cuda:N", or "auto", which is the first GPU, or, where
// there is none, host memory: that is logged, with the reason.
absl::StatusOr<std::unique_ptr<cachestore::Device>> OpenDevice(const std::string& name);

}  // namespace kvtier::service
