#pragma once

#include "absl/time/time.h"

namespace kvtier::cachestore {

// Where time comes from, so that tests can move it. Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() const = 0;
};

}  // namespace kvtier::cachestore
