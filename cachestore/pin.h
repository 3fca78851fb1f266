#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "cachestore/base/mutex.h"
#include "cachestore/sequence.h"

namespace kvtier::cachestore {

// A promise, until a deadline, not to evict a sequence (hard), or to evict it only once everything
// that isn't pinned has gone (soft). It reads nothing, and does not outlive its removal.
// Thread-safe.
class Pin {
 public:
  // A sequence that was pinned, with so many tokens (Sequence::AddPin).
  struct Pinned {
    std::shared_ptr<Sequence> sequence;
    std::int64_t tokens = 0;
  };
  // Gives them back when it ends.
  Pin(std::vector<Pinned> sequences, PinKind kind, absl::Time deadline)
      : kind_(kind), deadline_(deadline), sequences_(std::move(sequences)) {}
  ~Pin() { End(); }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

  absl::Time deadline() const { return deadline_; }
  // `successor` took the place of `sequence`: if that is pinned, the other is from now on.
  void Follow(const std::shared_ptr<Sequence>& sequence, const std::shared_ptr<Sequence>& successor)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    const auto pinned =
        std::find_if(sequences_.begin(), sequences_.end(),
                     [&](const Pinned& candidate) { return candidate.sequence == sequence; });
    if (ended_ || pinned == sequences_.end() || successor == sequence) return;
    auto tokens = successor->AddPin(kind_, pinned->tokens);
    if (!tokens.ok()) tokens = successor->AddPin(kind_, -1);
    if (!tokens.ok()) return;
    sequence->RemovePin(kind_, pinned->tokens);
    *pinned = {successor, *tokens};
  }
  void End() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    if (std::exchange(ended_, true)) return;
    for (const Pinned& pinned : sequences_) pinned.sequence->RemovePin(kind_, pinned.tokens);
  }

 private:
  const PinKind kind_;
  const absl::Time deadline_;
  Mutex mutex_;  // before the sequence's
  std::vector<Pinned> sequences_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvtier::cachestore
