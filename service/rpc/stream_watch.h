#pragma once

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace kvtier::service {

// A stream whose peer may fall silent while it holds something.
class WatchedStream {
 public:
  virtual ~WatchedStream() = default;
  // Ends the stream if its peer has kept it waiting since before `limit`. Thread-safe.
  virtual void EndIfStalled(absl::Time limit) = 0;
};

// Ends streams whose peers stall, so that nothing is held without a bound. Thread-safe.
class StreamWatch {
 public:
  void Add(std::weak_ptr<WatchedStream> stream) ABSL_LOCKS_EXCLUDED(mutex_);
  // Called every second or so.
  void Sweep(absl::Time limit) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  absl::Mutex mutex_;
  std::vector<std::weak_ptr<WatchedStream>> streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier::service
