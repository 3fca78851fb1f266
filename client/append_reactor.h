#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/append_stream.h"
#include "client/shared_memory.h"
#include "kvtier/v1/kv_tier.grpc.pb.h"

namespace kvtier::client {

// The gRPC end of an AppendStream: gRPC's threads report writes and acks, the caller's thread
// starts writes and waits. gRPC holds on to it until Close has returned.
class AppendStream::Reactor final
    : public grpc::ClientBidiReactor<v1::AppendRequest, v1::AppendResponse> {
 public:
  struct Limits {
    int max_unacked_chunks = 1;
    absl::Duration stall;
    absl::Time deadline;
    std::shared_ptr<SharedPool> pool;                // null: values go inside messages
    std::size_t least_shared = 0;                    // bytes of a chunk; fewer go inside
    std::function<void(std::uint64_t bytes)> count;  // is told of those that do
  };
  explicit Reactor(Limits limits);
  ~Reactor() override;

  // Sends the opening message and waits for its ack. Call once, first.
  absl::Status Open(v1::KvTierService::Stub& stub, const v1::AppendOpen& open);
  absl::Status Send(v1::AppendChunk chunk, std::shared_ptr<const void> keeps);
  absl::StatusOr<AppendProgress> Finish();

  const v1::AppendResponse& opened() const { return opened_; }
  AppendProgress progress() const;

 private:
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  // Waits until `ready` holds or the stream broke. A stall cancels the stream.
  template <class Ready>
  absl::Status Await(Ready ready) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What of a chunk there is room for in shared memory goes there, until its ack.
  void Share(v1::AppendChunk& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartWriteLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Lets gRPC end the call and waits for its status. Call without the lock.
  absl::Status Close() ABSL_LOCKS_EXCLUDED(mutex_);
  // Close, for a stream that broke: the call's own error, or `found` if that is a stall.
  absl::Status Fail(const absl::Status& found) ABSL_LOCKS_EXCLUDED(mutex_);

  const Limits limits_;
  grpc::ClientContext context_;
  v1::AppendRequest request_;    // in flight while writing_
  v1::AppendResponse response_;  // being read
  v1::AppendResponse opened_;    // set by Open, constant afterwards
  bool closed_ = false;          // of the caller's thread

  mutable absl::Mutex mutex_;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;    // no read or write will succeed any more
  bool answered_ ABSL_GUARDED_BY(mutex_) = false;  // the opening message
  int unacked_ ABSL_GUARDED_BY(mutex_) = 0;        // messages sent or being sent
  std::uint64_t moves_ ABSL_GUARDED_BY(mutex_) =
      0;  // writes and acks seen: tells slow from stalled
  std::deque<std::optional<SharedPool::Piece>> shared_
      ABSL_GUARDED_BY(mutex_);                                            // of each chunk under way
  std::deque<std::shared_ptr<const void>> kept_ ABSL_GUARDED_BY(mutex_);  // the same
  AppendProgress progress_ ABSL_GUARDED_BY(mutex_);
  std::optional<grpc::Status> status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier::client
