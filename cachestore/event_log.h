#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cachestore/base/mutex.h"
#include "cachestore/model/hash_blocks.h"

namespace kvtier::cachestore {

// Hash blocks that can be found from now on, or no longer; or all that were are forgotten.
struct BlockEvent {
  enum class Kind { kStored, kRemoved, kAllCleared };
  Kind kind = Kind::kAllCleared;
  HashBlocksPtr blocks;  // of kRemoved the keys alone; null of kAllCleared
};

// What an event is split at, so that one fits a message.
inline constexpr std::int64_t kMaxEventBlocks = 256;

// The newest events of a namespace, numbered one by one. Thread-safe; its lock is the last to be
// taken.
class EventLog {
 public:
  // `id` tells it from every other. `max_blocks` are kept, for those who come back.
  EventLog(std::uint64_t id, std::int64_t max_blocks) : id_(id), max_blocks_(max_blocks) {}

  std::uint64_t id() const { return id_; }
  // The last number that was given; the first event has 2, so that even an empty log has one.
  std::uint64_t last() const ABSL_LOCKS_EXCLUDED(mutex_);

  void Append(BlockEvent event) ABSL_LOCKS_EXCLUDED(mutex_);

  // Is called under locks: it may take note, and nothing else.
  using Waiter = std::function<void()>;
  // What came after `number`, not much more than kMaxEventBlocks of it. Where that is nothing,
  // `waiter` is called once as soon as something comes, if it is still there. nullopt where some of
  // it is no longer kept, or no event has had that number.
  std::optional<std::vector<BlockEvent>> After(std::uint64_t number,
                                               const std::shared_ptr<const Waiter>& waiter)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const std::uint64_t id_;
  const std::int64_t max_blocks_;

  mutable Mutex mutex_;
  std::deque<BlockEvent> events_ ABSL_GUARDED_BY(mutex_);  // the last has number last_
  std::uint64_t last_ ABSL_GUARDED_BY(mutex_) = 1;
  std::int64_t blocks_ ABSL_GUARDED_BY(mutex_) = 0;  // of events_
  std::vector<std::weak_ptr<const Waiter>> waiters_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier::cachestore
