#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "cachestore/base/mutex.h"

namespace kvtier::cachestore {

enum class EvictionReason {
  kMemory,  // the budget was full, or nearly so
  kQuota,   // the namespace's quota was
  kIdle,    // nobody had used it for idle_ttl
};
inline constexpr std::size_t kEvictionReasons = 3;

// Since the start, by EvictionReason.
struct EvictionCount {
  std::int64_t evictions = 0;  // page columns, and ends of sequences behind their last one
  std::int64_t tokens = 0;     // that they held; once where sequences shared them
};
using EvictionCounts = std::array<EvictionCount, kEvictionReasons>;

// Thread-safe.
class EvictionCounter {
 public:
  void Add(EvictionReason reason, std::int64_t tokens) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    EvictionCount& count = counts_[static_cast<std::size_t>(reason)];
    ++count.evictions;
    count.tokens += tokens;
  }
  EvictionCounts counts() const ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return counts_;
  }

 private:
  mutable Mutex mutex_;
  EvictionCounts counts_ ABSL_GUARDED_BY(mutex_){};
};

// How many page columns were stored as a rung of the ladder, by its format. Thread-safe.
class LoweredCounter {
 public:
  void Add(const std::string& format, std::int64_t columns) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    counts_[format] += columns;
  }
  std::map<std::string, std::int64_t> counts() const ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return counts_;
  }

 private:
  mutable Mutex mutex_;
  std::map<std::string, std::int64_t> counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier::cachestore
