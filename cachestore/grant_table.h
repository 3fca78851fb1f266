#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "cachestore/base/clock.h"
#include "cachestore/base/errors.h"
#include "cachestore/base/mutex.h"

namespace kvtier::cachestore {

// How many grants there may be, and how an error names that.
struct GrantLimit {
  std::int64_t most = 0;
  const char* what = "";    // "leases"
  const char* option = "";  // "max_leases"
  Reason reason = Reason::kTooManyLeases;
};

absl::Status TooMany(const GrantLimit& limit);

// What clients hold by number until a deadline: leases, pins. T has deadline(), and End(), which
// may be called more than once. Bounded. Thread-safe; End is called outside its lock.
template <class T>
class GrantTable {
 public:
  // Numbers begin at `first_id`, so that another process's numbers mean nothing here.
  GrantTable(std::uint64_t first_id, const GrantLimit& limit, const Clock& clock)
      : limit_(limit), clock_(clock), next_id_(first_id) {}

  // RESOURCE_EXHAUSTED past the limit.
  absl::StatusOr<std::uint64_t> Add(const std::string& name_space, const std::shared_ptr<T>& grant)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    if (static_cast<std::int64_t>(grants_.size()) >= limit_.most) return TooMany(limit_);
    const std::uint64_t id = next_id_++;
    grants_.emplace(Key(name_space, id), grant);
    return id;
  }

  // Null for what isn't one of this namespace, or no longer.
  std::shared_ptr<T> Find(const std::string& name_space, std::uint64_t id) const
      ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    const auto found = grants_.find(Key(name_space, id));
    return found == grants_.end() ? nullptr : found->second;
  }

  // Ends it, if it has not ended already.
  void End(const std::string& name_space, std::uint64_t id) ABSL_LOCKS_EXCLUDED(mutex_) {
    std::shared_ptr<T> grant;
    {
      MutexLock lock(&mutex_);
      const auto found = grants_.find(Key(name_space, id));
      if (found == grants_.end()) return;
      grant = std::move(found->second);
      grants_.erase(found);
    }
    grant->End();
  }

  // Ends those whose deadline is past. How many.
  int Sweep() ABSL_LOCKS_EXCLUDED(mutex_) {
    std::vector<std::shared_ptr<T>> over;
    const absl::Time now = clock_.Now();
    {
      MutexLock lock(&mutex_);
      for (auto at = grants_.begin(); at != grants_.end();) {
        const auto grant = at++;
        if (grant->second->deadline() > now) continue;
        over.push_back(std::move(grant->second));
        grants_.erase(grant);
      }
    }
    for (const auto& grant : over) grant->End();
    return static_cast<int>(over.size());
  }

  // Calls f(grant) for all, outside its lock.
  template <class F>
  void ForEach(F f) const ABSL_LOCKS_EXCLUDED(mutex_) {
    std::vector<std::shared_ptr<T>> all;
    {
      MutexLock lock(&mutex_);
      for (const auto& [key, grant] : grants_) all.push_back(grant);
    }
    for (const auto& grant : all) f(*grant);
  }

  std::int64_t size() const ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return static_cast<std::int64_t>(grants_.size());
  }

 private:
  using Key = std::pair<std::string, std::uint64_t>;

  const GrantLimit limit_;
  const Clock& clock_;
  mutable Mutex mutex_;
  absl::flat_hash_map<Key, std::shared_ptr<T>> grants_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t next_id_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier::cachestore
