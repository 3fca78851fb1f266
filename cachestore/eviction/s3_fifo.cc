#include "cachestore/eviction/s3_fifo.h"

#include <algorithm>

#include "cachestore/base/check.h"

namespace kvtier::cachestore {
namespace {

constexpr std::size_t kSmallShare = 10;  // one of so many
constexpr std::int64_t kMostRounds = 3;
constexpr std::size_t kLeastRemembered = 1024;

}  // namespace

void S3Fifo::Add(const EvictionCandidate& candidate) {
  const auto [place, came] = places_.try_emplace(candidate.id);
  if (came) {
    // By when it came, not by when it first could go: a page goes right after those behind it.
    place->second = {.main = candidate.content != 0 && remembered_.erase(candidate.content) > 0,
                     .position = candidate.id};
    if (place->second.main) place->second.position = next_position_++;
  }
  QueueOf(place->second).emplace(place->second.position, candidate);
}

void S3Fifo::Remove(const EvictionCandidate& candidate) {
  const Place& place = places_.at(candidate.id);
  KVT_CHECK(QueueOf(place).erase(place.position) == 1);
}

void S3Fifo::Forget(const EvictionCandidate& candidate, bool evicted) {
  const auto place = places_.find(candidate.id);
  if (place == places_.end()) return;  // it was in use from the first moment to the last
  if (evicted && !place->second.main && candidate.content != 0) Remember(candidate.content);
  places_.erase(place);
}

void S3Fifo::Remember(std::uint64_t content) {
  remembered_[content] = ++next_remembered_;
  remembered_in_order_.emplace_back(content, next_remembered_);
  while (remembered_in_order_.size() > std::max(kLeastRemembered, main_.size())) {
    const auto [oldest, when] = remembered_in_order_.front();
    const auto known = remembered_.find(oldest);
    if (known != remembered_.end() && known->second == when) remembered_.erase(known);
    remembered_in_order_.pop_front();
  }
}

void S3Fifo::MoveToMain(const EvictionCandidate& candidate, std::int64_t accesses_paid) {
  const EvictionCandidate moved = candidate;
  Place& place = places_.at(moved.id);
  QueueOf(place).erase(place.position);
  place = {.main = true, .position = next_position_++, .accesses_paid = accesses_paid};
  main_.emplace(place.position, moved);
}

std::optional<EvictionCandidate> S3Fifo::Next() {
  while (!small_.empty() || !main_.empty()) {
    const bool from_small = main_.empty() || (!small_.empty() && small_.size() * kSmallShare >=
                                                                     small_.size() + main_.size());
    const EvictionCandidate& candidate = (from_small ? small_ : main_).begin()->second;
    if (from_small) {
      if (candidate.accesses <= 1) return candidate;
      MoveToMain(candidate, candidate.accesses);
      continue;
    }
    const std::int64_t rounds =
        std::min(kMostRounds, candidate.accesses - places_.at(candidate.id).accesses_paid);
    if (rounds <= 0) return candidate;
    MoveToMain(candidate, candidate.accesses - rounds + 1);
  }
  return std::nullopt;
}

}  // namespace kvtier::cachestore
