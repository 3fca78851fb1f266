#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
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

}  // namespace kvtier::cachestore
