#include "service/rpc/work_queue.h"

#include <utility>

namespace kvtier::service {

WorkQueue::WorkQueue(int threads, std::size_t max_pending) : max_pending_(max_pending) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
}

WorkQueue::~WorkQueue() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

bool WorkQueue::Post(Priority priority, std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  if (pending_ >= max_pending_) return false;
  queues_[static_cast<int>(priority)].push_back(std::move(task));
  ++pending_;
  return true;
}

void WorkQueue::Run() {
  while (true) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &WorkQueue::HasWork));
      if (pending_ == 0) return;
      for (auto& queue : queues_) {
        if (queue.empty()) continue;
        task = std::move(queue.front());
        queue.pop_front();
        break;
      }
      --pending_;
    }
    task();
  }
}

}  // namespace kvtier::service
