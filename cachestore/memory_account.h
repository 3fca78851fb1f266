#pragma once

#include <cstdint>
#include <limits>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "cachestore/base/mutex.h"
#include "cachestore/model/memory_parts.h"

namespace kvtier::cachestore {

inline constexpr std::int64_t kNoQuota = std::numeric_limits<std::int64_t>::max();

// What of the budget somebody has, a model or a namespace, what for, and how much it may have.
// Thread-safe.
class MemoryAccount {
 public:
  // False, and nothing happens, where it would have more than its quota.
  bool Take(std::int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    if (bytes > quota_ - held_.allocated) return false;
    held_.allocated += bytes;
    return true;
  }
  void Add(const MemoryHeld& delta) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    held_ += delta;
  }
  MemoryHeld held() const ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return held_;
  }
  // kNoQuota: as much as there is.
  void SetQuota(std::int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    quota_ = bytes;
  }
  std::int64_t quota() const ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return quota_;
  }

 private:
  mutable Mutex mutex_;
  MemoryHeld held_ ABSL_GUARDED_BY(mutex_);
  std::int64_t quota_ ABSL_GUARDED_BY(mutex_) = kNoQuota;
};

// Whom memory is put down to; neither where it is nobody's.
struct MemoryOwner {
  MemoryAccount* model = nullptr;             // must outlive the memory
  std::shared_ptr<MemoryAccount> name_space;  // whose quota it may not exceed

  void Add(const MemoryHeld& delta) const {
    if (model != nullptr) model->Add(delta);
    if (name_space != nullptr) name_space->Add(delta);
  }
};

}  // namespace kvtier::cachestore
