#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "kvtier/v1/kv_tier.pb.h"

namespace kvtier::client {

// Acquires leases and renews them, on a thread of its own, for as long as they are wanted.
// Thread-safe. `client` must outlive it.
class LeaseKeeper {
 public:
  explicit LeaseKeeper(Client& client);
  // What is left of its leases is no longer renewed.
  ~LeaseKeeper();
  LeaseKeeper(const LeaseKeeper&) = delete;
  LeaseKeeper& operator=(const LeaseKeeper&) = delete;

  // A lease that is kept until this goes; then it's released. Must not outlive its keeper.
  class Lease {
   public:
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    std::uint64_t id() const { return id_; }          // 0: nothing of the prompt is held
    std::uint64_t tokens() const { return tokens_; }  // that it holds
    // OK while it holds them; then why not. What is read by it is right as long as this is OK after
    // the read.
    absl::Status status() const;

   private:
    friend class LeaseKeeper;
    Lease(LeaseKeeper& keeper, std::uint64_t id, std::uint64_t tokens)
        : keeper_(keeper), id_(id), tokens_(tokens) {}

    LeaseKeeper& keeper_;
    const std::uint64_t id_;
    const std::uint64_t tokens_;
  };

  // As Client::Acquire. It's renewed after a third of the time that the server gives it.
  absl::StatusOr<std::unique_ptr<Lease>> Acquire(const v1::AcquireRequest& request)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Kept {
    std::string name_space;
    absl::Duration duration;  // as asked for
    absl::Time renew_at;
    absl::Time ends_at;
    absl::Status status;
  };

  void Run();
  void Renew(std::uint64_t id) ABSL_LOCKS_EXCLUDED(mutex_);
  void Release(std::uint64_t id) ABSL_LOCKS_EXCLUDED(mutex_);

  Client& client_;
  mutable absl::Mutex mutex_;
  std::map<std::uint64_t, Kept> kept_ ABSL_GUARDED_BY(mutex_);
  bool stops_ ABSL_GUARDED_BY(mutex_) = false;
  bool news_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace kvtier::client
