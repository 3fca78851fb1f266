#include "client/lease_keeper.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/time/clock.h"
#include "cachestore/base/status_macros.h"
#include "client/error_reason.h"

namespace kvtier::client {
namespace {

// A renewal that failed for the network's sake is tried again after so long.
constexpr absl::Duration kRetry = absl::Milliseconds(200);

absl::Time RenewalOf(absl::Time since, std::uint64_t duration_ms) {
  return since + absl::Milliseconds(static_cast<std::int64_t>(duration_ms)) / 3;
}

}  // namespace

LeaseKeeper::LeaseKeeper(Client& client) : client_(client), thread_([this] { Run(); }) {}

LeaseKeeper::~LeaseKeeper() {
  {
    absl::MutexLock lock(&mutex_);
    stops_ = true;
  }
  thread_.join();  // bounded by a call's deadline
}

absl::StatusOr<std::unique_ptr<LeaseKeeper::Lease>> LeaseKeeper::Acquire(
    const v1::AcquireRequest& request) {
  const absl::Time asked = absl::Now();
  KVT_ASSIGN_OR_RETURN(const v1::AcquireResponse lease, client_.Acquire(request));
  if (lease.lease_id() > 0) {
    absl::MutexLock lock(&mutex_);
    const auto duration = absl::Milliseconds(static_cast<std::int64_t>(lease.duration_ms()));
    kept_[lease.lease_id()] = {.name_space = request.namespace_(),
                               .duration = duration,
                               .renew_at = RenewalOf(asked, lease.duration_ms()),
                               .ends_at = asked + duration,
                               .status = absl::OkStatus()};
    news_ = true;
  }
  return std::unique_ptr<Lease>(new Lease(*this, lease.lease_id(), lease.tokens()));
}

LeaseKeeper::Lease::~Lease() {
  if (id_ != 0) keeper_.Release(id_);
}

absl::Status LeaseKeeper::Lease::status() const {
  if (id_ == 0) return absl::OkStatus();
  absl::MutexLock lock(&keeper_.mutex_);
  const Kept& kept = keeper_.kept_.at(id_);
  if (kept.status.ok() && absl::Now() >= kept.ends_at)
    return absl::AbortedError("the lease was not renewed in time");
  return kept.status;
}

void LeaseKeeper::Release(std::uint64_t id) {
  v1::ReleaseRequest request;
  request.set_lease_id(id);
  {
    absl::MutexLock lock(&mutex_);
    const auto kept = kept_.find(id);
    request.set_namespace_(kept->second.name_space);
    kept_.erase(kept);
  }
  client_.Release(request).IgnoreError();  // else it ends by itself
}

void LeaseKeeper::Renew(std::uint64_t id) {
  v1::RenewRequest request;
  request.set_lease_id(id);
  {
    absl::MutexLock lock(&mutex_);
    const auto kept = kept_.find(id);
    if (kept == kept_.end()) return;
    request.set_namespace_(kept->second.name_space);
    request.set_duration_ms(
        static_cast<std::uint64_t>(absl::ToInt64Milliseconds(kept->second.duration)));
  }
  const absl::Time asked = absl::Now();
  const auto renewed = client_.Renew(request);
  absl::MutexLock lock(&mutex_);
  const auto kept = kept_.find(id);
  if (kept == kept_.end()) return;
  Kept& lease = kept->second;
  if (renewed.ok()) {
    lease.renew_at = RenewalOf(asked, renewed->duration_ms());
    lease.ends_at = asked + absl::Milliseconds(static_cast<std::int64_t>(renewed->duration_ms()));
  } else if (ErrorReason(renewed.status()).empty()) {  // nobody answered
    lease.renew_at = absl::Now() + kRetry;
    if (lease.renew_at >= lease.ends_at) lease.status = renewed.status();
  } else {
    lease.status = renewed.status();
  }
}

void LeaseKeeper::Run() {
  while (true) {
    std::optional<std::uint64_t> due;
    {
      absl::MutexLock lock(&mutex_);
      absl::Time wake = absl::InfiniteFuture();
      for (const auto& [id, lease] : kept_) {
        if (!lease.status.ok() || lease.renew_at >= wake) continue;
        wake = lease.renew_at;
        due = id;
      }
      news_ = false;
      const auto changed = [this]()
                               ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stops_ || news_; };
      if (mutex_.AwaitWithDeadline(absl::Condition(&changed), wake)) due.reset();
      if (stops_) return;
    }
    if (due.has_value()) Renew(*due);
  }
}

}  // namespace kvtier::client
