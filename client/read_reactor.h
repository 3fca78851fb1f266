#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kvtier/v1/kv_tier.grpc.pb.h"

namespace kvtier::client {

// The gRPC end of one read. One message is received while the caller works on the one before, so
// two messages are all the memory it takes. One thread calls; an unfinished read is cancelled.
class ReadReactor final : public grpc::ClientReadReactor<v1::ReadResponse> {
 public:
  ReadReactor(absl::Duration stall_limit, absl::Time deadline);
  ReadReactor(const ReadReactor&) = delete;
  ReadReactor& operator=(const ReadReactor&) = delete;
  ~ReadReactor() override;

  // `request` must stay until the reactor goes.
  void Start(v1::KvTierService::Stub& stub, const v1::ReadRequest& request);
  // Puts the next message into `message` and returns true, or false at the end. The error is the
  // call's, or DEADLINE_EXCEEDED when nothing came for the stall limit.
  absl::StatusOr<bool> Next(v1::ReadResponse& message);

 private:
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;
  absl::Status Close();

  const absl::Duration stall_limit_;
  grpc::ClientContext context_;
  v1::ReadResponse incoming_;  // gRPC's while reading_
  bool open_ = false;          // of the caller's thread: Start was called and Close was not

  absl::Mutex mutex_;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<grpc::Status> status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier::client
