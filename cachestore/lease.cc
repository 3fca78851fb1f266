#include "cachestore/lease.h"

#include <fmt/format.h>

#include <vector>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"

namespace kvtier::cachestore {
namespace {

absl::Status Unknown(std::uint64_t id) {
  return Error(
      Reason::kLeaseEnded,
      fmt::format("lease_id is {}; no such lease is held: it expired or was released", id));
}

}  // namespace

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
  sequence_->Unhold();
}

absl::StatusOr<std::uint64_t> LeaseTable::Add(const std::string& name_space,
                                              const std::shared_ptr<Lease>& lease) {
  MutexLock lock(&mutex_);
  if (static_cast<std::int64_t>(leases_.size()) >= max_leases_) {
    return Error(Reason::kTooManyLeases,
                 fmt::format("{} leases are held; the limit (max_leases) is {}", leases_.size(),
                             max_leases_));
  }
  const std::uint64_t id = next_id_++;
  leases_.emplace(Key(name_space, id), lease);
  return id;
}

absl::StatusOr<std::shared_ptr<Lease>> LeaseTable::Find(const std::string& name_space,
                                                        std::uint64_t id) const {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(Key(name_space, id));
  if (found == leases_.end()) return Unknown(id);
  return found->second;
}

void LeaseTable::Release(const std::string& name_space, std::uint64_t id) {
  std::shared_ptr<Lease> lease;
  {
    MutexLock lock(&mutex_);
    const auto found = leases_.find(Key(name_space, id));
    if (found == leases_.end()) return;
    lease = std::move(found->second);
    leases_.erase(found);
  }
  lease->End();
}

int LeaseTable::Sweep() {
  std::vector<std::shared_ptr<Lease>> over;
  const absl::Time now = clock_.Now();
  {
    MutexLock lock(&mutex_);
    for (auto at = leases_.begin(); at != leases_.end();) {
      const auto lease = at++;
      if (lease->second->deadline() > now) continue;
      over.push_back(std::move(lease->second));
      leases_.erase(lease);
    }
  }
  for (const auto& lease : over) lease->End();
  return static_cast<int>(over.size());
}

std::int64_t LeaseTable::size() const {
  MutexLock lock(&mutex_);
  return static_cast<std::int64_t>(leases_.size());
}

}  // namespace kvtier::cachestore
