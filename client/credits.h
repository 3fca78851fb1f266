#pragma once

#include <grpcpp/client_context.h>

#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kvtier/v1/kv_tier.grpc.pb.h"

namespace kvtier::client {

// Tells the server, one call at a time, how far the reader has come by then. A call that fails is
// tried again some times: without it the read would stand still. Goes on the caller's thread: with
// the call's context goes, perhaps, the last hold on the channel, which gRPC's own threads must not
// let go of. Thread-safe.
class Credits {
 public:
  // What it tells is `set` in a copy of `request`. `stub` must outlive it.
  Credits(v1::KvTierService::Stub& stub, v1::GrantCreditRequest request,
          void (v1::GrantCreditRequest::*set)(std::uint64_t));
  // Waits for what it has called: bounded by a deadline.
  ~Credits();
  Credits(const Credits&) = delete;
  Credits& operator=(const Credits&) = delete;

  // More than ever before.
  void Tell(std::uint64_t count) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Call() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnDone(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);

  v1::KvTierService::Stub& stub_;
  void (v1::GrantCreditRequest::*const set_)(std::uint64_t);
  absl::Mutex mutex_;
  v1::GrantCreditRequest request_ ABSL_GUARDED_BY(mutex_);  // gRPC's while calling_
  v1::GrantCreditResponse response_ ABSL_GUARDED_BY(mutex_);
  std::optional<grpc::ClientContext> context_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t wanted_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t told_ ABSL_GUARDED_BY(mutex_) = 0;
  int failures_ ABSL_GUARDED_BY(mutex_) = 0;  // of the last calls
  bool calling_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvtier::client
