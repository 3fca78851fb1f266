#include "service/rpc/nccl_transport.h"

#include <fmt/format.h>

#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"

namespace kvtier::service {
namespace {

// So that some are filled while others travel.
constexpr std::int64_t kSlots = 4;

// Gives its place back when it goes.
class Place final : public transport::Region {
 public:
  Place(std::byte* data, std::int64_t size, std::function<void(std::byte*)> give_back)
      : Region(data, size), give_back_(std::move(give_back)) {}
  ~Place() { give_back_(data()); }

 private:
  const std::function<void(std::byte*)> give_back_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<NcclMemory>> NcclMemory::Reserve(cachestore::Device& device,
                                                                int places, std::int64_t bytes) {
  KVT_ASSIGN_OR_RETURN(std::byte* const data, device.Reserve(places * bytes));
  std::shared_ptr<NcclMemory> memory(new NcclMemory(device, bytes));
  absl::MutexLock lock(&memory->mutex_);
  for (int i = places; i > 0; --i) memory->free_.push_back(data + (i - 1) * bytes);
  return memory;
}

std::shared_ptr<const transport::Region> NcclMemory::Take(absl::Duration wait) {
  absl::MutexLock lock(&mutex_);
  const auto some = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !free_.empty(); };
  if (!mutex_.AwaitWithTimeout(absl::Condition(&some), wait)) return nullptr;
  std::byte* const data = free_.back();
  free_.pop_back();
  return std::make_shared<Place>(data, bytes_, [self = shared_from_this()](std::byte* at) {
    absl::MutexLock relock(&self->mutex_);
    self->free_.push_back(at);
  });
}

// What of a region transfers are made in.
class NcclTransport::Slots : public std::enable_shared_from_this<Slots> {
 public:
  Slots(std::shared_ptr<const transport::Region> region, cachestore::Device& device)
      : region_(std::move(region)), device_(device), bytes_(region_->size() / kSlots) {
    for (std::int64_t i = kSlots; i > 0; --i) free_.push_back(region_->data() + (i - 1) * bytes_);
  }

  std::int64_t bytes() const { return bytes_; }
  cachestore::Device& device() const { return device_; }

  std::shared_ptr<Slot> Take() {
    absl::MutexLock lock(&mutex_);
    if (free_.empty()) return nullptr;
    std::byte* const data = free_.back();
    free_.pop_back();
    return std::make_shared<Slot>(shared_from_this(), data);
  }

  void GiveBack(std::byte* data) {
    std::vector<std::shared_ptr<const std::function<void()>>> told;
    {
      absl::MutexLock lock(&mutex_);
      free_.push_back(data);
      std::erase_if(watches_, [](const auto& watch) { return watch.expired(); });
      for (const auto& watch : watches_) {
        if (auto on_news = watch.lock()) told.push_back(std::move(on_news));
      }
    }
    for (const auto& on_news : told) (*on_news)();
  }

  std::shared_ptr<const void> Watch(std::function<void()> on_news) {
    auto watch = std::make_shared<const std::function<void()>>(std::move(on_news));
    absl::MutexLock lock(&mutex_);
    watches_.push_back(watch);
    return watch;
  }

 private:
  const std::shared_ptr<const transport::Region> region_;
  cachestore::Device& device_;
  const std::int64_t bytes_;
  absl::Mutex mutex_;
  std::vector<std::byte*> free_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<const std::function<void()>>> watches_ ABSL_GUARDED_BY(mutex_);
};

NcclTransport::Slot::~Slot() { slots_->GiveBack(data_); }

void NcclTransport::Slot::Write(const std::vector<std::byte>& bytes) const {
  const cachestore::Transfer transfer{data_, bytes.data(), static_cast<std::int64_t>(bytes.size())};
  slots_->device().Write({&transfer, 1});
}

NcclTransport::NcclTransport(transport::NcclRuntime& runtime, const NcclMemory& memory,
                             std::shared_ptr<const transport::Region> region,
                             transport::NcclRuntime::Options options)
    : sends_(options.sends),
      region_(std::move(region)),
      slots_(std::make_shared<Slots>(region_, memory.device())),
      channel_(runtime.Open(std::move(options))) {}

std::int64_t NcclTransport::slot_bytes() const { return slots_->bytes(); }

std::shared_ptr<NcclTransport::Slot> NcclTransport::TakeSlot() { return slots_->Take(); }

std::shared_ptr<const void> NcclTransport::Watch(std::function<void()> on_news) {
  return slots_->Watch(std::move(on_news));
}

absl::StatusOr<std::uint64_t> NcclTransport::Send(std::shared_ptr<Slot> slot, std::int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  std::byte* const data = slot->data();
  KVT_RETURN_IF_ERROR(channel_->Post(
      next_,
      {.pieces = {{data, bytes}}, .done = [slot = std::move(slot)](const absl::Status&) {}}));
  return next_++;
}

}  // namespace kvtier::service
