#include "cachestore/lease.h"

#include <fmt/format.h>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"

namespace kvtier::cachestore {
absl::Status Lease::Check() const {
  MutexLock lock(&mutex_);
  return CheckLocked();
}

absl::Status Lease::CheckLocked() const {
  if (!ended_.ok()) return ended_;
  const absl::Time now = clock_.Now();
  if (now < deadline_) return absl::OkStatus();
  return Error(Reason::kLeaseEnded,
               fmt::format("the lease expired {} ago", absl::FormatDuration(now - deadline_)));
}

absl::Time Lease::deadline() const {
  MutexLock lock(&mutex_);
  return deadline_;
}

absl::Status Lease::Renew(absl::Time deadline) {
  MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(CheckLocked());
  deadline_ = deadline;
  return absl::OkStatus();
}

void Lease::End() {
  {
    MutexLock lock(&mutex_);
    if (!ended_.ok()) return;
    ended_ = CheckLocked();
    if (ended_.ok()) ended_ = Error(Reason::kLeaseEnded, "the lease was released");
  }
  sequence_->Unhold(tokens_);
}

}  // namespace kvtier::cachestore
