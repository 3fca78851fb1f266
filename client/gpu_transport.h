#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/credits.h"
#include "client/gpu_copies.h"
#include "kvtier/v1/kv_tier.grpc.pb.h"
#include "transport/nccl.h"

// The worker's ends of NCCL transports (v1::NcclTransport).
namespace kvtier::client {

// What one is opened with. The stub must outlive it.
struct GpuTransportOptions {
  v1::KvTierService::Stub* stub = nullptr;
  std::shared_ptr<transport::NcclRuntime> nccl;
  int device = 0;
  absl::Duration deadline;  // as NcclRuntime::Options has it
};

// One that is open at the server, and closed there when it goes.
struct OpenedTransport {
  ~OpenedTransport();

  v1::KvTierService::Stub& stub;
  const v1::OpenTransportResponse reply;
};

// For reads: chunks come in the order of their numbers, whichever read they are of, and are copied
// from here to where they go. Thread-safe.
class GpuReadTransport {
 public:
  static absl::StatusOr<std::shared_ptr<GpuReadTransport>> Open(const GpuTransportOptions& options);

  const std::string& id() const { return opened_->reply.transport_id(); }

  // The chunks of one read that are still to come. When it goes none of them is copied any more.
  class Read;
  // Puts on the stream what takes a chunk from where it came.
  using Copies = std::function<absl::Status(const std::byte* chunk, const GpuStream& stream)>;

 private:
  static constexpr std::size_t kSlots = 4;

  // Shared with the channel's thread, which copies, and with NCCL, until it can't write any more.
  struct Slots {
    std::int64_t bytes = 0;
    std::vector<GpuMemory> memory;
    GpuStream stream;
    GpuEvent copied;
  };

  GpuReadTransport(const GpuTransportOptions& options, std::shared_ptr<OpenedTransport> opened,
                   std::shared_ptr<Slots> slots);
  static v1::GrantCreditRequest CreditOf(const OpenedTransport& opened);
  // Waits for the slot, posts the transfer and tells the server so.
  absl::Status Receive(std::uint64_t number, std::int64_t bytes, Copies copies,
                       std::function<void(const absl::Status&)> done) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Copy(std::uint64_t number, const Copies& copies) const;
  void Free(std::uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);

  const GpuTransportOptions options_;
  const std::shared_ptr<OpenedTransport> opened_;
  const std::shared_ptr<Slots> slots_;
  absl::Mutex mutex_;
  std::uint64_t freed_ ABSL_GUARDED_BY(mutex_) = 0;         // all transfers before are done with
  std::set<std::uint64_t> posted_ ABSL_GUARDED_BY(mutex_);  // from posted_to_ on
  std::uint64_t posted_to_ ABSL_GUARDED_BY(mutex_) = 0;
  Credits credits_;
  std::unique_ptr<transport::NcclChannel> channel_;  // last: its thread uses the rest
};

class GpuReadTransport::Read {
 public:
  explicit Read(std::shared_ptr<GpuReadTransport> transport) : transport_(std::move(transport)) {}
  Read(const Read&) = delete;
  Read& operator=(const Read&) = delete;
  // Unless Finish said that all is there, the transport is closed: nobody knows what is under way.
  ~Read();

  // Returns when its slot is free; the copies run once it has come. `chunk` says how many bytes.
  absl::Status Take(const v1::ReadChunk& chunk, Copies copies);
  // Waits for all of it.
  absl::Status Finish();

 private:
  struct Progress {
    absl::Mutex mutex;
    int left ABSL_GUARDED_BY(mutex) = 0;
    absl::Status status ABSL_GUARDED_BY(mutex);
  };

  // False: not within the deadline.
  bool Await();

  const std::shared_ptr<GpuReadTransport> transport_;
  const std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
  bool finished_ = false;
};

// For appends: K and V go from where they lie to the server's GPU. Thread-safe.
class GpuAppendTransport : public std::enable_shared_from_this<GpuAppendTransport> {
 public:
  static absl::StatusOr<std::shared_ptr<GpuAppendTransport>> Open(
      const GpuTransportOptions& options);

  const std::string& id() const { return opened_->reply.transport_id(); }

  // Sends them, after `after`, and says in `chunk` where they are to lie, and by which transfer.
  // What comes back is to be held until the server has them from there. Waits for room;
  // INVALID_ARGUMENT where there never is enough.
  absl::StatusOr<std::shared_ptr<const void>> Send(const transport::DevicePiece& k,
                                                   const transport::DevicePiece& v,
                                                   std::shared_ptr<CUevent_st> after,
                                                   v1::AppendChunk& chunk)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // A stream over it was broken off: nobody knows what of it the server takes.
  void Close(const std::string& why) { channel_->Close(why); }
  bool ok() const { return channel_->status().ok(); }

 private:
  GpuAppendTransport(const GpuTransportOptions& options, std::shared_ptr<OpenedTransport> opened);
  // Of the server's memory.
  std::int64_t Place(std::int64_t bytes) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void GiveBack(std::int64_t begin) ABSL_LOCKS_EXCLUDED(mutex_);

  const GpuTransportOptions options_;
  const std::shared_ptr<OpenedTransport> opened_;
  absl::Mutex mutex_;
  std::uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::pair<std::int64_t, std::int64_t>> taken_ ABSL_GUARDED_BY(mutex_);  // ascending
  std::unique_ptr<transport::NcclChannel> channel_;
};

}  // namespace kvtier::client
