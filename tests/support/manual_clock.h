#pragma once

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"
#include "cachestore/base/clock.h"

namespace kvtier::testing {

// Time that moves only when the test says so. Thread-safe.
class ManualClock final : public cachestore::Clock {
 public:
  absl::Time Now() const override {
    return absl::UnixEpoch() + absl::Nanoseconds(nanoseconds_.load(std::memory_order_relaxed));
  }
  void Advance(absl::Duration by) {
    nanoseconds_.fetch_add(absl::ToInt64Nanoseconds(by), std::memory_order_relaxed);
  }

 private:
  std::atomic<std::int64_t> nanoseconds_{0};
};

}  // namespace kvtier::testing
