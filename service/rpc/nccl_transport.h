#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "cachestore/device/device.h"
#include "transport/nccl.h"
#include "transport/region.h"

namespace kvtier::service {

// Memory of the server's GPU, in places of one size, one for each NCCL transport. Thread-safe.
class NcclMemory : public std::enable_shared_from_this<NcclMemory> {
 public:
  // `places` times `bytes` of `device`, which must outlive it.
  static absl::StatusOr<std::shared_ptr<NcclMemory>> Reserve(cachestore::Device& device, int places,
                                                             std::int64_t bytes);

  // Comes back when the last holds it no more. Null where none is left, nor comes back in time.
  std::shared_ptr<const transport::Region> Take(absl::Duration wait) ABSL_LOCKS_EXCLUDED(mutex_);
  cachestore::Device& device() const { return device_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  NcclMemory(cachestore::Device& device, std::int64_t bytes) : device_(device), bytes_(bytes) {}

  cachestore::Device& device_;
  const std::int64_t bytes_;
  absl::Mutex mutex_;
  std::vector<std::byte*> free_ ABSL_GUARDED_BY(mutex_);
};

// The server's end of an NCCL transport: a channel, and memory for what is under way. Thread-safe.
class NcclTransport {
 public:
  // Of a read: what one transfer is made in.
  class Slot;

  NcclTransport(transport::NcclRuntime& runtime, const NcclMemory& memory,
                std::shared_ptr<const transport::Region> region,
                transport::NcclRuntime::Options options);

  bool sends() const { return sends_; }
  const std::shared_ptr<const transport::Region>& region() const { return region_; }
  std::int64_t slot_bytes() const;
  transport::NcclChannel& channel() { return *channel_; }

  // Null while none is free.
  std::shared_ptr<Slot> TakeSlot();
  // Sends the slot's first bytes once the other end awaits them; the transfer's number.
  absl::StatusOr<std::uint64_t> Send(std::shared_ptr<Slot> slot, std::int64_t bytes)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // `on_news` is called when a slot is free again, until what is given back goes; from any thread,
  // outside locks.
  std::shared_ptr<const void> Watch(std::function<void()> on_news);

 private:
  class Slots;

  const bool sends_;
  const std::shared_ptr<const transport::Region> region_;
  const std::shared_ptr<Slots> slots_;
  const std::unique_ptr<transport::NcclChannel> channel_;
  absl::Mutex mutex_;
  std::uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
};

class NcclTransport::Slot {
 public:
  Slot(std::shared_ptr<Slots> slots, std::byte* data) : slots_(std::move(slots)), data_(data) {}
  ~Slot();
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;

  std::byte* data() const { return data_; }
  // From host memory.
  void Write(const std::vector<std::byte>& bytes) const;

 private:
  const std::shared_ptr<Slots> slots_;
  std::byte* const data_;
};

}  // namespace kvtier::service
