#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace kvtier::service {

// Threads that do what gRPC's own threads must not wait for: codecs and locks. Control calls go
// before reads, reads for decode before appends from prefill. Bounded. Thread-safe.
class WorkQueue {
 public:
  enum class Priority { kControl, kRead, kAppend };
  static constexpr int kPriorities = 3;

  WorkQueue(int threads, std::size_t max_pending);
  // Runs what is queued, then ends.
  ~WorkQueue();

  // False when max_pending tasks wait already; the task is not taken then.
  [[nodiscard]] bool Post(Priority priority, std::function<void()> task)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || pending_ > 0; }

  const std::size_t max_pending_;
  std::vector<std::thread> threads_;

  absl::Mutex mutex_;
  std::deque<std::function<void()>> queues_[kPriorities] ABSL_GUARDED_BY(mutex_);
  std::size_t pending_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvtier::service
