#include "client/append_stream.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "cachestore/base/status_macros.h"
#include "client/append_reactor.h"
#include "client/error_reason.h"
#include "client/grpc_status.h"

namespace kvtier::client {
AppendStream::Reactor::Reactor(Limits limits) : limits_(std::move(limits)) {
  context_.set_deadline(absl::ToChronoTime(limits_.deadline));
}

AppendStream::Reactor::~Reactor() {
  if (!closed_) {
    context_.TryCancel();
    Close().IgnoreError();
  }
  absl::MutexLock lock(&mutex_);
  // The server ends a stream only once it works on none of its chunks; what this end breaks off, it
  // may be encoding still.
  const absl::Status end = FromGrpc(*status_);
  if (end.ok() || !ErrorReason(end).empty()) return;
  for (std::optional<SharedPool::Piece>& piece : shared_) {
    if (piece.has_value()) SharedPool::Piece::Abandon(*std::move(piece));
  }
}

absl::Status AppendStream::Reactor::Open(v1::KvTierService::Stub& stub,
                                         const v1::AppendOpen& open) {
  *request_.mutable_open() = open;
  if (limits_.pool != nullptr)
    request_.mutable_open()->set_transport_id(limits_.pool->memory().transport_id());
  stub.async()->Append(&context_, this);
  // Writes start on the caller's thread: the hold keeps the call alive for them until Close.
  AddHold();
  StartRead(&response_);
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    StartWriteLocked();
    StartCall();
    status = Await([this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return answered_; });
  }
  return status.ok() ? status : Fail(status);
}

void AppendStream::Reactor::StartWriteLocked() {
  writing_ = true;
  ++unacked_;
  StartWrite(&request_);
}

template <class Ready>
absl::Status AppendStream::Reactor::Await(Ready ready) {
  const auto wake = [&] {
    mutex_.AssertHeld();
    return broken_ || ready();
  };
  for (std::uint64_t before = moves_;;) {
    if (mutex_.AwaitWithTimeout(absl::Condition(&wake), limits_.stall)) break;
    if (moves_ != before) {
      before = moves_;
      continue;
    }
    broken_ = true;
    context_.TryCancel();
    return absl::DeadlineExceededError(
        fmt::format("the append stream stood still for {} s with {} messages unacknowledged",
                    absl::ToDoubleSeconds(limits_.stall), unacked_));
  }
  // Why is in the call's status, which comes last: Fail waits for it.
  return broken_ ? absl::UnknownError("the append stream broke") : absl::OkStatus();
}

absl::Status AppendStream::Reactor::Send(v1::AppendChunk chunk, std::shared_ptr<const void> keeps) {
  if (closed_) return absl::FailedPreconditionError("the append stream has ended");
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    status = Await([this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return !writing_ && unacked_ < std::max(limits_.max_unacked_chunks, 1);
    });
    if (status.ok()) {
      Share(chunk);
      kept_.push_back(std::move(keeps));
      *request_.mutable_chunk() = std::move(chunk);
      StartWriteLocked();
      return absl::OkStatus();
    }
  }
  return Fail(status);
}

void AppendStream::Reactor::Share(v1::AppendChunk& chunk) {
  std::optional<SharedPool::Piece>& piece = shared_.emplace_back();
  const std::size_t bytes = chunk.k().size() + chunk.v().size();
  const std::size_t v_begin = (chunk.k().size() + 63) / 64 * 64;
  if (limits_.pool != nullptr && bytes >= limits_.least_shared)
    piece = limits_.pool->Take(static_cast<std::int64_t>(v_begin + chunk.v().size()));
  if (!piece.has_value()) {
    if (limits_.count) limits_.count(bytes);
    return;
  }
  std::memcpy(piece->data(), chunk.k().data(), chunk.k().size());
  std::memcpy(piece->data() + v_begin, chunk.v().data(), chunk.v().size());
  chunk.set_k_offset(piece->offset());
  chunk.set_v_offset(piece->offset() + v_begin);
  chunk.clear_k();
  chunk.clear_v();
}

absl::StatusOr<AppendProgress> AppendStream::Reactor::Finish() {
  if (closed_) return absl::FailedPreconditionError("the append stream has ended");
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    status = Await(
        [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !writing_ && unacked_ == 0; });
  }
  if (!status.ok()) return Fail(status);
  StartWritesDone();
  KVT_RETURN_IF_ERROR(Close());
  return progress();
}

absl::Status AppendStream::Reactor::Fail(const absl::Status& found) {
  absl::Status cause = Close();
  if (absl::IsDeadlineExceeded(found)) return found;
  if (!cause.ok()) return cause;
  // The one end that a server gives a stream by itself, and no error.
  return absl::FailedPreconditionError(
      "the sequence was sealed by another call; messages that were under way came too late");
}

AppendProgress AppendStream::Reactor::progress() const {
  absl::MutexLock lock(&mutex_);
  return progress_;
}

absl::Status AppendStream::Reactor::Close() {
  closed_ = true;
  RemoveHold();
  absl::MutexLock lock(&mutex_);
  const auto ended = [this] {
    mutex_.AssertReaderHeld();
    return status_.has_value();
  };
  if (mutex_.AwaitWithTimeout(absl::Condition(&ended), limits_.stall)) return FromGrpc(*status_);
  context_.TryCancel();
  mutex_.Await(absl::Condition(&ended));  // bounded: a cancelled call ends here, not at the server
  return absl::DeadlineExceededError(fmt::format("the server did not end the append stream in {} s",
                                                 absl::ToDoubleSeconds(limits_.stall)));
}

void AppendStream::Reactor::OnReadDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  // Acks answer messages one by one; one too many is no kvtier server's.
  if (!ok || unacked_ == 0) {
    broken_ = true;
    if (ok) context_.TryCancel();
    return;
  }
  --unacked_;
  ++moves_;
  progress_.received_tokens = response_.received_tokens();
  progress_.committed_tokens = response_.committed_tokens();
  progress_.skipped_tokens += response_.skipped_tokens();
  progress_.saturated_values += response_.saturated_values();
  if (!answered_) {
    opened_ = response_;
    answered_ = true;
  } else {
    ++progress_.chunks;
    shared_.pop_front();
    kept_.pop_front();
  }
  StartRead(&response_);
}

void AppendStream::Reactor::OnWriteDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  writing_ = false;
  ++moves_;
  if (!ok) broken_ = true;
}

void AppendStream::Reactor::OnDone(const grpc::Status& status) {
  absl::MutexLock lock(&mutex_);
  broken_ = true;
  status_ = status;
}

AppendStream::AppendStream(std::unique_ptr<Reactor> reactor) : reactor_(std::move(reactor)) {}
AppendStream::~AppendStream() = default;

const v1::AppendResponse& AppendStream::opened() const { return reactor_->opened(); }
AppendProgress AppendStream::progress() const { return reactor_->progress(); }
absl::Status AppendStream::Send(v1::AppendChunk chunk, std::shared_ptr<const void> keeps) {
  return reactor_->Send(std::move(chunk), std::move(keeps));
}
absl::StatusOr<AppendProgress> AppendStream::Finish() { return reactor_->Finish(); }

}  // namespace kvtier::client
