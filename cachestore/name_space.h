#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
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

// What gives way first when room is needed.
enum class Pressure {
  kEvict,   // tokens
  kLadder,  // bits of pages that nobody uses, and then tokens
};

// Namespaces with settings of their own.
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
  // The same of pressure; kEvict is the default. `apply` puts it into effect.
  absl::Status SetPressure(const std::string& name, Pressure pressure,
                           absl::FunctionRef<void(Namespace&)> apply) ABSL_LOCKS_EXCLUDED(mutex_);
  // Namespaces that take the ladder.
  std::int64_t ladders() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Forgets those of which nothing is held and that have no quota of their own.
  void Sweep() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    std::shared_ptr<Namespace> name_space;
    bool has_quota = false;
    bool has_ladder = false;
    bool has_settings() const { return has_quota || has_ladder; }
  };
  // Sets one of the two. RESOURCE_EXHAUSTED past kMaxQuotas namespaces that have settings.
  absl::Status Set(Entry& entry, bool Entry::*setting, bool value)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Entry& GetLocked(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const EvictionPolicyName policy_;
  const std::int64_t default_quota_;
  mutable Mutex mutex_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::int64_t with_settings_ ABSL_GUARDED_BY(mutex_) = 0;
  std::int64_t ladders_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvtier::cachestore
