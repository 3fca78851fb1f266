#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "cachestore/device/device.h"
#include "kvtier/v1/transport.pb.h"
#include "service/rpc/nccl_transport.h"
#include "transport/nccl.h"
#include "transport/shm_region.h"
#include "transport/unique_fd.h"

namespace kvtier::service {

// How much of its ring a reader has given back. Thread-safe.
class RingCredit {
 public:
  // `on_news`: from any thread, outside locks.
  explicit RingCredit(std::function<void()> on_news) : on_news_(std::move(on_news)) {}

  void Grant(std::uint64_t chunks) {
    std::uint64_t before = chunks_;
    while (before < chunks && !chunks_.compare_exchange_weak(before, chunks)) {
    }
    if (before < chunks) on_news_();
  }
  std::uint64_t chunks() const { return chunks_; }

 private:
  const std::function<void()> on_news_;
  std::atomic<std::uint64_t> chunks_ = 0;
};

// The transports that clients have opened, by an id that nobody can guess: who knows it may use it.
// Thread-safe.
class Transports {
 public:
  struct Limits {
    std::int64_t max_transports = 0;
    std::int64_t max_shm_bytes = 0;  // mapped at once
    absl::Duration nccl_deadline = absl::Seconds(30);
    absl::Duration nccl_idle = absl::Minutes(5);  // one over which nothing goes is closed
  };
  // What is opened and handed nothing for so long is closed.
  static constexpr absl::Duration kHandoverDeadline = absl::Seconds(10);

  // `device`, which must outlive the memory, may reach it by itself.
  Transports(const Limits& limits, cachestore::Device& device) : limits_(limits), device_(device) {}

  const Limits& limits() const { return limits_; }

  // Where memory is handed over; before that, and where it's empty, there is no shared memory, and
  // `why` says why.
  void SetShmSocket(const std::string& address, const std::string& why) ABSL_LOCKS_EXCLUDED(mutex_);
  std::string shm_socket() const ABSL_LOCKS_EXCLUDED(mutex_);

  // A new one of shared memory, whose memory is still to come. Its id. FAILED_PRECONDITION where
  // there is none here, RESOURCE_EXHAUSTED where there are too many.
  absl::StatusOr<std::string> OpenShm(absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);
  // What NCCL transports stand on; before that, and where there is none, `why` says why.
  void SetNccl(std::shared_ptr<transport::NcclRuntime> runtime, std::shared_ptr<NcclMemory> memory,
               const std::string& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // A new one, which begins to connect. FAILED_PRECONDITION where there is no NCCL here, or none
  // that the worker could be connected by; RESOURCE_EXHAUSTED where there are too many.
  absl::Status OpenNccl(const v1::NcclTransport& wanted, v1::OpenTransportResponse& response)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Maps the memory that came for it. `connection` is shut down when it's closed from here.
  // NOT_FOUND where it isn't open; ALREADY_EXISTS where it has memory.
  absl::Status TakeShm(const std::string& id, transport::UniqueFd memory,
                       std::shared_ptr<transport::UniqueFd> connection) ABSL_LOCKS_EXCLUDED(mutex_);
  void Close(const std::string& id) ABSL_LOCKS_EXCLUDED(mutex_);
  void Sweep(absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);

  // The memory of one; stays as long as somebody holds it. Of NCCL, the transport, too.
  struct Found {
    std::shared_ptr<const transport::Region> memory;
    std::shared_ptr<NcclTransport> nccl;
  };
  // NOT_FOUND where it isn't open, or has no memory yet; UNAVAILABLE where it's of NCCL and has
  // failed. `field`: that named it.
  absl::StatusOr<Found> Find(const std::string& id, const char* field) const
      ABSL_LOCKS_EXCLUDED(mutex_);

  // The credit of a read into a ring of one; from now on Grant finds it, until it goes.
  // INVALID_ARGUMENT where another read of that number is under way.
  absl::StatusOr<std::shared_ptr<RingCredit>> OpenRing(const std::string& id, std::uint64_t read_id,
                                                       std::function<void()> on_news)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Of a read that is over it does nothing. NOT_FOUND where the transport isn't open.
  absl::Status Grant(const v1::GrantCreditRequest& request) ABSL_LOCKS_EXCLUDED(mutex_);

  std::int64_t open() const ABSL_LOCKS_EXCLUDED(mutex_);
  std::int64_t mapped_bytes() const { return *mapped_; }

 private:
  struct Transport {
    absl::Time opened;
    std::shared_ptr<const transport::Region> memory;
    std::shared_ptr<NcclTransport> nccl;
    std::shared_ptr<transport::UniqueFd> connection;
    std::map<std::uint64_t, std::weak_ptr<RingCredit>> rings;  // by read
  };

  // From the kernel: it is all that keeps others out.
  static absl::StatusOr<std::string> NewId();
  absl::Status CheckRoom() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Memory for another of NCCL; where none is left, that which nothing was asked of for longest, if
  // for some time, is closed for it: its worker may be gone, and opens another if not.
  std::shared_ptr<const transport::Region> TakeNcclMemory(NcclMemory& memory)
      ABSL_LOCKS_EXCLUDED(mutex_);

  const Limits limits_;
  cachestore::Device& device_;
  const std::shared_ptr<std::atomic<std::int64_t>> mapped_ =
      std::make_shared<std::atomic<std::int64_t>>(0);

  mutable absl::Mutex mutex_;
  std::string shm_socket_ ABSL_GUARDED_BY(mutex_);
  std::string why_no_shm_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<transport::NcclRuntime> nccl_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<NcclMemory> nccl_memory_ ABSL_GUARDED_BY(mutex_);
  std::string why_no_nccl_ ABSL_GUARDED_BY(mutex_) = "it is not there yet";
  std::map<std::string, Transport> transports_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier::service
