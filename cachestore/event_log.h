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

// Of blocks of a prompt, how many one event may have: no more than some hundred KiB, so that a few
// events fit a message.
std::int64_t MaxEventBlocks(const HashBlocks& blocks);
// What an event takes here, and about what it takes on the way.
std::int64_t BytesOf(const BlockEvent& event);
// What is given at once, and no more than one event more.
inline constexpr std::int64_t kEventBatchBytes = 256 << 10;

// The newest events of a namespace, numbered one by one. Thread-safe; under its lock only what its
// waiters take is taken.
class EventLog {
 public:
  // `id` tells it from every other. Of events, `max_bytes` are kept, for those who come back.
  EventLog(std::uint64_t id, std::int64_t max_bytes) : id_(id), max_bytes_(max_bytes) {}

  std::uint64_t id() const { return id_; }
  // The last number that was given; the first event has 2, so that even an empty log has one.
  std::uint64_t last() const ABSL_LOCKS_EXCLUDED(mutex_);

  void Append(BlockEvent event) ABSL_LOCKS_EXCLUDED(mutex_);

  // Is called under locks: it may take note, and nothing else.
  using Waiter = std::function<void()>;
  // What came after `number`, kEventBatchBytes of it. Where that is nothing,
  // `waiter` is called once as soon as something comes, if it is still there. nullopt where some of
  // it is no longer kept, or no event has had that number.
  std::optional<std::vector<BlockEvent>> After(std::uint64_t number,
                                               const std::shared_ptr<const Waiter>& waiter)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const std::uint64_t id_;
  const std::int64_t max_bytes_;

  mutable Mutex mutex_;
  std::deque<BlockEvent> events_ ABSL_GUARDED_BY(mutex_);  // the last has number last_
  std::uint64_t last_ ABSL_GUARDED_BY(mutex_) = 1;
  std::int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of events_
  std::vector<std::weak_ptr<const Waiter>> waiters_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier::cachestore
