#include "client/credits.h"

#include <grpcpp/support/client_callback.h>

#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace kvtier::client {
namespace {

constexpr int kMostFailures = 5;
constexpr absl::Duration kCreditLimit = absl::Seconds(30);

}  // namespace

Credits::Credits(v1::KvTierService::Stub& stub, v1::GrantCreditRequest request,
                 void (v1::GrantCreditRequest::*set)(std::uint64_t))
    : stub_(stub), set_(set), request_(std::move(request)) {}

Credits::~Credits() {
  absl::MutexLock lock(&mutex_);
  wanted_ = 0;  // nothing more
  const auto idle = [this] {
    mutex_.AssertReaderHeld();
    return !calling_;
  };
  mutex_.Await(absl::Condition(&idle));  // bounded by the call's deadline
}

void Credits::Tell(std::uint64_t count) {
  absl::MutexLock lock(&mutex_);
  wanted_ = count;
  if (!calling_) Call();
}

void Credits::Call() {
  calling_ = true;
  told_ = wanted_;
  (request_.*set_)(told_);
  context_.emplace();
  context_->set_deadline(absl::ToChronoTime(absl::Now() + kCreditLimit));
  stub_.async()->GrantCredit(&*context_, &request_, &response_,
                             [this](const grpc::Status& status) { OnDone(status.ok()); });
}

void Credits::OnDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  calling_ = false;
  failures_ = ok ? 0 : failures_ + 1;
  const bool again = !ok && failures_ <= kMostFailures && wanted_ > 0;
  if (again || wanted_ > told_) Call();
}

}  // namespace kvtier::client
