#include "cachestore/event_log.h"

#include <algorithm>
#include <utility>

namespace kvtier::cachestore {

std::uint64_t EventLog::last() const {
  MutexLock lock(&mutex_);
  return last_;
}

void EventLog::Append(BlockEvent event) {
  MutexLock lock(&mutex_);
  blocks_ += event.blocks->size();
  events_.push_back(std::move(event));
  ++last_;
  for (; blocks_ > max_blocks_; events_.pop_front()) blocks_ -= events_.front().blocks->size();
  for (const auto& waiter : std::exchange(waiters_, {})) {
    if (const auto call = waiter.lock()) (*call)();
  }
}

std::optional<std::vector<BlockEvent>> EventLog::After(
    std::uint64_t number, const std::shared_ptr<const Waiter>& waiter) {
  MutexLock lock(&mutex_);
  if (number > last_ || last_ - number > events_.size()) return std::nullopt;
  if (number == last_) {
    waiters_.push_back(waiter);
    return std::vector<BlockEvent>();
  }
  std::vector<BlockEvent> after;
  std::int64_t blocks = 0;
  for (auto event = events_.end() - static_cast<std::ptrdiff_t>(last_ - number);
       event != events_.end() && blocks < kMaxEventBlocks; ++event) {
    blocks += event->blocks->size();
    after.push_back(*event);
  }
  return after;
}

}  // namespace kvtier::cachestore
