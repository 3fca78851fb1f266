#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>

#include "absl/types/span.h"
#include "cachestore/subscription.h"

namespace kvtier::testing {

// Which hash blocks can be found, as far as events have told.
class EventMirror {
 public:
  void Apply(const cachestore::EventBatch& batch) {
    for (const cachestore::BlockEvent& event : batch.events) Apply(event);
    position_ = batch.position;
  }
  // All there is for the moment.
  void Drain(cachestore::Subscription& subscription) {
    for (auto batch = subscription.Next(); !batch.events.empty(); batch = subscription.Next())
      Apply(batch);
  }

  std::int64_t Held(absl::Span<const cachestore::PrefixKey> keys) const {
    const auto known = [&](const auto& key) { return known_.contains(key); };
    return std::find_if_not(keys.begin(), keys.end(), known) - keys.begin();
  }
  std::int64_t known() const { return std::ssize(known_); }
  std::int64_t cleared() const { return cleared_; }
  std::int64_t stored() const { return stored_; }  // events
  const cachestore::EventPosition& position() const { return position_; }
  // An event told what was told before, or was too large; or "".
  const std::string& wrong() const { return wrong_; }

 private:
  void Apply(const cachestore::BlockEvent& event) {
    using Kind = cachestore::BlockEvent::Kind;
    switch (event.kind) {
      case Kind::kAllCleared:
        known_.clear();
        ++cleared_;
        return;
      case Kind::kStored:
        ++stored_;
        if (event.blocks->size() > cachestore::MaxEventBlocks(*event.blocks))
          wrong_ = "an event is too large";
        for (const auto& key : event.blocks->keys)
          if (!known_.insert(key).second) wrong_ = "a block was stored twice";
        return;
      case Kind::kRemoved:
        for (const auto& key : event.blocks->keys)
          if (known_.erase(key) == 0) wrong_ = "a block was removed that was not there";
        return;
    }
  }

  std::set<cachestore::PrefixKey> known_;
  cachestore::EventPosition position_;
  std::int64_t cleared_ = 0;
  std::int64_t stored_ = 0;
  std::string wrong_;
};

}  // namespace kvtier::testing
