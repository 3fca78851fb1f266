#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "cachestore/base/mutex.h"
#include "cachestore/eviction/evictor.h"
#include "cachestore/memory_account.h"
#include "cachestore/prefix_index.h"

namespace kvtier::cachestore {

// What one tenant has. Lives as long as something of it is held.
struct Namespace {
  explicit Namespace(EvictionPolicyName policy)
      : memory(std::make_shared<MemoryAccount>()), candidates(policy) {}

  const std::shared_ptr<MemoryAccount> memory;
  EvictionQueue candidates;  // of it alone
  PrefixIndex index;
};

// Quotas that differ from the default.
inline constexpr std::int64_t kMaxQuotas = 65'536;

// The namespaces of which something is held, or that have a quota of their own. Thread-safe.
class NamespaceTable {
 public:
  // `default_quota`: of namespaces that have none of their own.
  NamespaceTable(EvictionPolicyName policy, std::int64_t default_quota)
      : policy_(policy), default_quota_(default_quota) {}

  // Made where it isn't known.
  std::shared_ptr<Namespace> Get(const std::string& name) ABSL_LOCKS_EXCLUDED(mutex_);
  // 0: the default. RESOURCE_EXHAUSTED past kMaxQuotas.
  absl::StatusOr<std::shared_ptr<Namespace>> SetQuota(const std::string& name, std::int64_t bytes)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Forgets those of which nothing is held and that have no quota of their own.
  void Sweep() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    std::shared_ptr<Namespace> name_space;
    bool has_quota = false;
  };
  Entry& GetLocked(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const EvictionPolicyName policy_;
  const std::int64_t default_quota_;
  mutable Mutex mutex_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::int64_t quotas_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvtier::cachestore
