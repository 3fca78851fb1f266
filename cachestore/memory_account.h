#pragma once

#include "absl/base/thread_annotations.h"
#include "cachestore/base/mutex.h"
#include "cachestore/model/memory_parts.h"

namespace kvtier::cachestore {

// What of the budget somebody has, a model say, and what for. Thread-safe.
class MemoryAccount {
 public:
  void Add(const MemoryHeld& delta) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    held_ += delta;
  }
  MemoryHeld held() const ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return held_;
  }

 private:
  mutable Mutex mutex_;
  MemoryHeld held_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier::cachestore
