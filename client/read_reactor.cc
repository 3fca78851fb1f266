#include "client/read_reactor.h"

#include <fmt/format.h>

#include <utility>

#include "client/grpc_status.h"

namespace kvtier::client {

ReadReactor::ReadReactor(absl::Duration stall_limit, absl::Time deadline)
    : stall_limit_(stall_limit) {
  context_.set_deadline(absl::ToChronoTime(deadline));
}

ReadReactor::~ReadReactor() {
  if (!open_) return;
  context_.TryCancel();
  Close().IgnoreError();
}

void ReadReactor::Start(v1::KvTierService::Stub& stub, const v1::ReadRequest& request) {
  stub.async()->Read(&context_, &request, this);
  // Reads start on the caller's thread: the hold keeps the call alive for them until Close.
  AddHold();
  open_ = true;
  absl::MutexLock lock(&mutex_);
  reading_ = true;
  StartRead(&incoming_);
  StartCall();
}

absl::StatusOr<bool> ReadReactor::Next(v1::ReadResponse& message) {
  bool ended = false;
  {
    absl::MutexLock lock(&mutex_);
    const auto arrived = [this] {
      mutex_.AssertReaderHeld();
      return !reading_;
    };
    if (!mutex_.AwaitWithTimeout(absl::Condition(&arrived), stall_limit_)) {
      return absl::DeadlineExceededError(
          fmt::format("the read stood still for {} s", absl::ToDoubleSeconds(stall_limit_)));
    }
    ended = ended_;
    if (!ended) {
      message = std::move(incoming_);
      reading_ = true;
      StartRead(&incoming_);
    }
  }
  if (!ended) return true;
  absl::Status status = Close();
  if (!status.ok()) return status;
  return false;
}

absl::Status ReadReactor::Close() {
  open_ = false;
  RemoveHold();
  absl::MutexLock lock(&mutex_);
  const auto done = [this] {
    mutex_.AssertReaderHeld();
    return status_.has_value();
  };
  mutex_.Await(absl::Condition(&done));  // bounded: the stream has ended or was cancelled
  return FromGrpc(*status_);
}

void ReadReactor::OnReadDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  reading_ = false;
  ended_ = !ok;
}

void ReadReactor::OnDone(const grpc::Status& status) {
  absl::MutexLock lock(&mutex_);
  status_ = status;
}

}  // namespace kvtier::client
