#include "client/ring_reader.h"

#include <fmt/format.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <atomic>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace kvtier::client {
namespace {

constexpr int kMostFailures = 5;
constexpr absl::Duration kCreditLimit = absl::Seconds(30);

std::uint64_t NextReadId() {
  static std::atomic<std::uint64_t> next{1};
  return next++;
}

}  // namespace

// Tells the server, one call at a time, how far the reader has come by then. A call that fails is
// tried again some times: without it the read would stand still. Goes on the caller's thread, after
// Wait: with the call's context goes, perhaps, the last hold on the channel, which gRPC's own
// threads must not let go of.
class RingReader::Credits {
 public:
  Credits(v1::KvTierService::Stub& stub, std::string transport_id, std::uint64_t read_id)
      : stub_(stub) {
    request_.set_transport_id(std::move(transport_id));
    request_.set_read_id(read_id);
  }

  void Tell(std::uint64_t chunks) {
    absl::MutexLock lock(&mutex_);
    wanted_ = chunks;
    if (!calling_) Call();
  }

  void Wait() {
    absl::MutexLock lock(&mutex_);
    wanted_ = 0;  // nothing more
    const auto idle = [this] {
      mutex_.AssertReaderHeld();
      return !calling_;
    };
    mutex_.Await(absl::Condition(&idle));  // bounded by the call's deadline
  }

 private:
  void Call() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    calling_ = true;
    request_.set_chunks(wanted_);
    context_.emplace();
    context_->set_deadline(absl::ToChronoTime(absl::Now() + kCreditLimit));
    stub_.async()->GrantCredit(&*context_, &request_, &response_,
                               [this](const grpc::Status& status) { OnDone(status.ok()); });
  }

  void OnDone(bool ok) {
    absl::MutexLock lock(&mutex_);
    calling_ = false;
    failures_ = ok ? 0 : failures_ + 1;
    const bool again = !ok && failures_ <= kMostFailures && wanted_ > 0;
    if (again || wanted_ > request_.chunks()) Call();
  }

  v1::KvTierService::Stub& stub_;
  absl::Mutex mutex_;
  v1::GrantCreditRequest request_ ABSL_GUARDED_BY(mutex_);  // gRPC's while calling_
  v1::GrantCreditResponse response_ ABSL_GUARDED_BY(mutex_);
  std::optional<grpc::ClientContext> context_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t wanted_ ABSL_GUARDED_BY(mutex_) = 0;
  int failures_ ABSL_GUARDED_BY(mutex_) = 0;  // of the last calls
  bool calling_ ABSL_GUARDED_BY(mutex_) = false;
};

RingReader::RingReader(v1::KvTierService::Stub& stub, std::shared_ptr<SharedPool> pool,
                       SharedPool::Piece piece)
    : pool_(std::move(pool)),
      piece_(std::move(piece)),
      read_id_(NextReadId()),
      credits_(std::make_unique<Credits>(stub, pool_->memory().transport_id(), read_id_)) {}

RingReader::~RingReader() {
  credits_->Wait();
  if (!server_ended_) SharedPool::Piece::Abandon(std::move(piece_));
}

v1::ReadTarget RingReader::target() const {
  v1::ReadTarget target;
  target.set_transport_id(pool_->memory().transport_id());
  target.set_offset(piece_.offset());
  target.set_bytes(static_cast<std::uint64_t>(piece_.bytes()));
  target.set_ring(true);
  target.set_read_id(read_id_);
  return target;
}

absl::StatusOr<std::span<const std::byte>> RingReader::At(std::uint64_t offset,
                                                          std::uint64_t bytes) const {
  const auto size = static_cast<std::uint64_t>(piece_.bytes());
  const std::uint64_t inside = offset - piece_.offset();  // wraps around where it's before that
  if (inside <= size && bytes <= size - inside)
    return std::span<const std::byte>(piece_.data() + inside, bytes);
  return absl::DataLossError(
      fmt::format("a chunk of {} bytes is said to be at {} of the shared memory; the read's ring "
                  "has {} from {} on",
                  bytes, offset, size, piece_.offset()));
}

void RingReader::Done() { credits_->Tell(++chunks_); }

}  // namespace kvtier::client
