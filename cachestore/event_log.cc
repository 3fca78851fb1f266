#include "cachestore/event_log.h"

#include <algorithm>
#include <utility>

namespace kvtier::cachestore {

std::int64_t MaxEventBlocks(const HashBlocks& blocks) {
  constexpr std::int64_t kMost = 256, kKeyBytes = 128, kTokenBytes = 5;
  const std::int64_t each = kKeyBytes + kTokenBytes * blocks.root->block_tokens;
  return std::clamp<std::int64_t>(kEventBatchBytes / each, 1, kMost);
}

std::int64_t BytesOf(const BlockEvent& event) {
  constexpr std::int64_t kOwn = 256;
  if (event.blocks == nullptr) return kOwn;
  std::size_t bytes = event.blocks->keys.size() * sizeof(PrefixKey) +
                      event.blocks->token_ids.size() * sizeof(std::uint32_t);
  for (const std::string& hash : event.blocks->hashes) bytes += sizeof(std::string) + hash.size();
  for (const ExtraKey& extra : event.blocks->extra_keys)
    bytes += sizeof(ExtraKey) + extra.key.size();
  return kOwn + static_cast<std::int64_t>(bytes);
}

std::uint64_t EventLog::last() const {
  MutexLock lock(&mutex_);
  return last_;
}

void EventLog::Append(BlockEvent event) {
  MutexLock lock(&mutex_);
  bytes_ += BytesOf(event);
  events_.push_back(std::move(event));
  ++last_;
  for (; bytes_ > max_bytes_; events_.pop_front()) bytes_ -= BytesOf(events_.front());
  for (const auto& waiter : std::exchange(waiters_, {})) {
    if (const auto call = waiter.lock()) (*call)();
  }
}

std::optional<std::vector<BlockEvent>> EventLog::After(
    std::uint64_t number, const std::shared_ptr<const Waiter>& waiter) {
  MutexLock lock(&mutex_);
  if (number > last_ || last_ - number > events_.size()) return std::nullopt;
  if (number == last_) {
    // It may look many times before something comes.
    std::erase_if(waiters_, [&](const auto& other) {
      const auto alive = other.lock();
      return alive == nullptr || alive == waiter;
    });
    waiters_.push_back(waiter);
    return std::vector<BlockEvent>();
  }
  std::vector<BlockEvent> after;
  std::int64_t bytes = 0;
  for (auto event = events_.end() - static_cast<std::ptrdiff_t>(last_ - number);
       event != events_.end() && bytes < kEventBatchBytes; ++event) {
    bytes += BytesOf(*event);
    after.push_back(*event);
  }
  return after;
}

}  // namespace kvtier::cachestore
