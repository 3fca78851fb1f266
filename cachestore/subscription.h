#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cachestore/base/clock.h"
#include "cachestore/base/mutex.h"
#include "cachestore/event_log.h"
#include "cachestore/name_space.h"

namespace kvtier::cachestore {

// How far a subscriber has come.
struct EventPosition {
  std::uint64_t log_id = 0;
  std::uint64_t number = 0;  // of the last event that it has
};

// What comes next, and where to go on after it. `position.number` is 0 as long as more of what is
// held already has to be told.
struct EventBatch {
  EventPosition position;
  std::vector<BlockEvent> events;
};

class Subscribers;

// One who is told what of a namespace can be found. It ends up knowing exactly that: where it can't
// be told all that it missed it is told to forget all, and then all that is held. Not thread-safe.
// Must not outlive the store.
class Subscription {
 public:
  ~Subscription();
  Subscription(const Subscription&) = delete;
  Subscription& operator=(const Subscription&) = delete;

  // Empty: nothing for the moment; `on_events` is called once there is.
  EventBatch Next();

 private:
  friend class Subscribers;
  Subscription(Subscribers& subscribers, std::shared_ptr<Namespace> name_space,
               std::shared_ptr<EventLog> log, EventLog::Waiter on_events)
      : subscribers_(subscribers),
        name_space_(std::move(name_space)),
        log_(std::move(log)),
        waiter_(std::make_shared<const EventLog::Waiter>(std::move(on_events))) {}

  // From now on all that is held comes first.
  EventBatch StartListing();

  Subscribers& subscribers_;
  const std::shared_ptr<Namespace> name_space_;
  const std::shared_ptr<EventLog> log_;
  const std::shared_ptr<const EventLog::Waiter> waiter_;
  std::uint64_t number_ = 0;
  std::deque<BlockRange> listing_;  // what is left of it
};

// All subscriptions of a store, and the logs of those who left lately, who may come back.
// Thread-safe.
class Subscribers {
 public:
  struct Limits {
    std::int64_t subscriptions = 0;
    std::int64_t log_bytes = 0;  // of each namespace
  };
  Subscribers(std::uint64_t first_log_id, const Limits& limits, const Clock& clock)
      : limits_(limits), clock_(clock), next_log_id_(first_log_id) {}

  // RESOURCE_EXHAUSTED where there are as many as there may be. `on_events` as EventLog::Waiter.
  absl::StatusOr<std::unique_ptr<Subscription>> Add(std::shared_ptr<Namespace> name_space,
                                                    const EventPosition& after,
                                                    EventLog::Waiter on_events)
      ABSL_LOCKS_EXCLUDED(mutex_);
  std::int64_t size() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Forgets the logs of those who left long ago.
  void Sweep() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  friend class Subscription;
  // A log that lives until nobody who left may come back to it any more.
  struct Left {
    absl::Time at;
    std::shared_ptr<Namespace> name_space;
    std::shared_ptr<EventLog> log;
  };
  void Leave(const Subscription& subscription) ABSL_LOCKS_EXCLUDED(mutex_);

  const Limits limits_;
  const Clock& clock_;

  mutable Mutex mutex_;
  std::uint64_t next_log_id_ ABSL_GUARDED_BY(mutex_);
  std::int64_t size_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Left> left_ ABSL_GUARDED_BY(mutex_);  // by time
};

}  // namespace kvtier::cachestore
