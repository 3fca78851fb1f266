#include "service/rpc/stream_watch.h"

#include <utility>

namespace kvtier::service {

void StreamWatch::Add(std::weak_ptr<WatchedStream> stream) {
  absl::MutexLock lock(&mutex_);
  streams_.push_back(std::move(stream));
}

void StreamWatch::Sweep(absl::Time limit) {
  std::vector<std::shared_ptr<WatchedStream>> alive;
  {
    absl::MutexLock lock(&mutex_);
    std::erase_if(streams_, [](const auto& stream) { return stream.expired(); });
    for (const auto& stream : streams_) {
      if (auto held = stream.lock()) alive.push_back(std::move(held));
    }
  }
  for (const auto& stream : alive) stream->EndIfStalled(limit);
}

}  // namespace kvtier::service
