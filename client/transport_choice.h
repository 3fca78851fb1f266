#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/shared_memory.h"
#include "kvtier/v1/kv_tier.grpc.pb.h"

namespace kvtier::client {

// How values travel that the caller doesn't share himself. kAuto: through shared memory where the
// server is on this host and offers it, once so much has to travel that it's worth opening; else
// inside gRPC's messages.
enum class Transport { kAuto, kInline, kShm };

// Opens a transport of `bytes`. FAILED_PRECONDITION or UNAVAILABLE say why there is none.
absl::StatusOr<std::shared_ptr<const SharedMemory>> OpenShm(v1::KvTierService::Stub& stub,
                                                            std::int64_t bytes,
                                                            absl::Duration limit);

// The memory that one client shares for its streams and reads, opened when it's first wanted.
// Thread-safe.
class TransportChoice {
 public:
  struct Options {
    Transport transport = Transport::kAuto;
    std::int64_t shm_bytes = 0;
    absl::Duration limit;                          // of opening
    std::function<void(const std::string&)> tell;  // which it is, and why; may be empty
  };
  explicit TransportChoice(Options options) : options_(std::move(options)) {}

  // Null where values go inside messages. `expected_bytes`: that are to travel, as far as that is
  // known. The error is that of kShm where there is none.
  absl::StatusOr<std::shared_ptr<SharedPool>> Pool(v1::KvTierService::Stub& stub,
                                                   std::uint64_t expected_bytes)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // So many have travelled inside messages.
  void Count(std::uint64_t bytes) { inline_bytes_ += bytes; }
  // `pool` is known to the server no more: the next Pool() opens another.
  void Forget(const std::shared_ptr<SharedPool>& pool) ABSL_LOCKS_EXCLUDED(mutex_);
  // "shm", "inline", or "" while none was chosen.
  std::string name() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const Options options_;
  std::atomic<std::uint64_t> inline_bytes_ = 0;
  mutable absl::Mutex mutex_;
  std::shared_ptr<SharedPool> pool_ ABSL_GUARDED_BY(mutex_);
  bool opening_ ABSL_GUARDED_BY(mutex_) = false;  // others wait
  bool chosen_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvtier::client
