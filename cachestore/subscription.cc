#include "cachestore/subscription.h"

#include <fmt/format.h>

#include <iterator>
#include <utility>

#include "cachestore/base/errors.h"

namespace kvtier::cachestore {
namespace {

// For how long one who left is told what came meanwhile, and not all that is held.
constexpr absl::Duration kMayComeBack = absl::Minutes(5);

}  // namespace

Subscription::~Subscription() { subscribers_.Leave(*this); }

EventBatch Subscription::Next() {
  if (listing_.empty()) {
    if (auto events = log_->After(number_, waiter_); events.has_value()) {
      number_ += events->size();
      return {{log_->id(), number_}, *std::move(events)};
    }
    return StartListing();
  }
  EventBatch batch{{log_->id(), 0}, {}};
  for (std::int64_t bytes = 0; !listing_.empty() && bytes < kEventBatchBytes;
       listing_.pop_front()) {
    batch.events.push_back({BlockEvent::Kind::kStored, CopyOf(listing_.front())});
    bytes += BytesOf(batch.events.back());
  }
  if (listing_.empty()) batch.position.number = number_;
  return batch;
}

EventBatch Subscription::StartListing() {
  PrefixIndex::Listing held = name_space_->index.List();
  number_ = held.number;
  listing_.assign(std::make_move_iterator(held.ranges.begin()),
                  std::make_move_iterator(held.ranges.end()));
  return {{log_->id(), listing_.empty() ? number_ : 0}, {{BlockEvent::Kind::kAllCleared, nullptr}}};
}

absl::StatusOr<std::unique_ptr<Subscription>> Subscribers::Add(
    std::shared_ptr<Namespace> name_space, const EventPosition& after, EventLog::Waiter on_events) {
  MutexLock lock(&mutex_);
  if (size_ >= limits_.subscriptions) {
    return Error(Reason::kTooManySubscriptions,
                 fmt::format("{} subscriptions are held; the limit (max_subscriptions) is {}",
                             size_, limits_.subscriptions));
  }
  std::shared_ptr<EventLog> log = name_space->index.log();
  if (log == nullptr) {
    log = std::make_shared<EventLog>(next_log_id_++, limits_.log_bytes);
    name_space->index.SetLog(log);
  }
  std::unique_ptr<Subscription> subscription(
      new Subscription(*this, std::move(name_space), std::move(log), std::move(on_events)));
  ++size_;
  // 0 is what no event has: all that is held comes first.
  subscription->number_ = after.log_id == subscription->log_->id() ? after.number : 0;
  return subscription;
}

std::int64_t Subscribers::size() const {
  MutexLock lock(&mutex_);
  return size_;
}

void Subscribers::Leave(const Subscription& subscription) {
  MutexLock lock(&mutex_);
  --size_;
  std::erase_if(left_, [&](const Left& left) { return left.log == subscription.log_; });
  left_.push_back({clock_.Now(), subscription.name_space_, subscription.log_});
  if (std::ssize(left_) > limits_.subscriptions) left_.pop_front();
}

void Subscribers::Sweep() {
  MutexLock lock(&mutex_);
  while (!left_.empty() && clock_.Now() - left_.front().at > kMayComeBack) left_.pop_front();
}

}  // namespace kvtier::cachestore
