#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "cachestore/notices.h"

namespace kvtier::cachestore {

// One who reads a sequence as it is received, as the sequence knows it.
struct FollowClaim {
  // There is something to look at (Sequence::Look): more was received, it was sealed, or it went.
  // From any thread, outside locks, and not again before it has looked; perhaps once more after
  // the claim was taken back.
  std::function<void()> on_news;

  // Guarded by the sequence's lock.
  bool told = false;   // and has not looked since
  absl::Status ended;  // not OK: the sequence went
};

// How far a sequence has got, as one who follows some of its layers and heads sees it.
struct FollowStanding {
  std::vector<std::int64_t> received;  // by layer of the shard, the least over its heads
  std::int64_t committed = 0;
  std::optional<std::int64_t> end;  // where what is followed ends, once that is known
};

// Who follows one sequence. Not thread-safe: the sequence's lock guards it.
class FollowClaims {
 public:
  bool empty() const { return live_.empty(); }
  void Add(std::shared_ptr<FollowClaim> claim) { live_.push_back(std::move(claim)); }
  void Remove(const std::shared_ptr<FollowClaim>& claim) { std::erase(live_, claim); }

  // That there is something new.
  void Tell(Notices& notices) {
    for (const std::shared_ptr<FollowClaim>& claim : live_) {
      if (claim->told) continue;
      claim->told = true;
      notices.Add([claim] { claim->on_news(); });
    }
  }
  void EndAll(const absl::Status& why, Notices& notices) {
    for (const std::shared_ptr<FollowClaim>& claim : live_) claim->ended = why;
    Tell(notices);
    live_.clear();
  }

 private:
  std::vector<std::shared_ptr<FollowClaim>> live_;
};

}  // namespace kvtier::cachestore
