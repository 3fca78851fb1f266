#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "cachestore/arena.h"
#include "cachestore/device/device.h"
#include "cachestore/part.h"

namespace kvtier::cachestore {

// `from`, which is final, as `to` stores it: what it reads as, encoded anew into `memory` of
// to.layout.bytes. Null where that format can't hold one of its values, or it is damaged. `to` must
// outlive the part.
absl::StatusOr<std::shared_ptr<Part>> Requantize(const Part& from, const TensorModel& to,
                                                 Allocation memory, Device& device);

}  // namespace kvtier::cachestore
