#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cachestore/base/clock.h"
#include "cachestore/base/mutex.h"
#include "cachestore/sequence.h"

namespace kvtier::cachestore {

// A promise, until a deadline, that the first tokens of a sequence stay readable, whatever becomes
// of it. Every read holds one, its own where it names none, and asks it before and after each copy.
// Thread-safe. `clock` must outlive it.
class Lease {
 public:
  // Of a sequence on which a hold was taken (Sequence::Hold), which it gives back when it ends.
  Lease(std::shared_ptr<Sequence> sequence, std::int64_t tokens, absl::Time deadline,
        const Clock& clock)
      : sequence_(std::move(sequence)), tokens_(tokens), clock_(clock), deadline_(deadline) {}
  ~Lease() { End(); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  const std::shared_ptr<Sequence>& sequence() const { return sequence_; }
  std::int64_t tokens() const { return tokens_; }

  // ABORTED once it was released or its deadline is past.
  absl::Status Check() const ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Time deadline() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Until `deadline`, if it has not ended.
  absl::Status Renew(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  // At most once it gives the hold back; reads by it are refused from now on.
  void End() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  absl::Status CheckLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<Sequence> sequence_;
  const std::int64_t tokens_;
  const Clock& clock_;

  mutable Mutex mutex_;
  absl::Time deadline_ ABSL_GUARDED_BY(mutex_);
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);  // not OK: why
};

// The leases that clients hold by number. Bounded. Thread-safe.
class LeaseTable {
 public:
  // Numbers begin at `first_id`, so that another process's numbers mean nothing here.
  LeaseTable(std::uint64_t first_id, std::int64_t max_leases, const Clock& clock)
      : max_leases_(max_leases), clock_(clock), next_id_(first_id) {}

  // RESOURCE_EXHAUSTED past max_leases.
  absl::StatusOr<std::uint64_t> Add(const std::string& name_space,
                                    const std::shared_ptr<Lease>& lease)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // ABORTED for what isn't a lease of this namespace, or no longer.
  absl::StatusOr<std::shared_ptr<Lease>> Find(const std::string& name_space, std::uint64_t id) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends it, if it has not ended already.
  void Release(const std::string& name_space, std::uint64_t id) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends those whose deadline is past. How many.
  int Sweep() ABSL_LOCKS_EXCLUDED(mutex_);

  std::int64_t size() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Key = std::pair<std::string, std::uint64_t>;

  const std::int64_t max_leases_;
  const Clock& clock_;
  mutable Mutex mutex_;
  absl::flat_hash_map<Key, std::shared_ptr<Lease>> leases_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t next_id_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier::cachestore
