#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <utility>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "cachestore/eviction/policy.h"

namespace kvtier::cachestore {

// S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP
// 2023): what comes waits in a small queue, a tenth of all; what was used there more than once
// moves on to the main queue, the rest goes and is remembered, so that it goes straight to the main
// queue when it comes back. In the main queue each use, of three at most, buys another round. Here
// what is in use is in neither queue, and keeps its place.
class S3Fifo final : public EvictionPolicy {
 public:
  void Add(const EvictionCandidate& candidate) override;
  void Remove(const EvictionCandidate& candidate) override;
  void Forget(const EvictionCandidate& candidate, bool evicted) override;
  std::optional<EvictionCandidate> Next() override;

 private:
  struct Place {
    bool main = false;
    std::uint64_t position = 0;
    std::int64_t accesses_paid = 0;  // that bought a round already
  };
  using Queue = absl::btree_map<std::uint64_t, EvictionCandidate>;

  Queue& QueueOf(const Place& place) { return place.main ? main_ : small_; }
  // To the main queue's end.
  void MoveToMain(const EvictionCandidate& candidate, std::int64_t accesses_paid);
  void Remember(std::uint64_t content);

  absl::flat_hash_map<std::uint64_t, Place> places_;  // of ids, in use or not
  Queue small_;
  Queue main_;
  std::uint64_t next_position_ = 0;
  // Contents evicted from the small queue, by when; in order, with some that came back meanwhile.
  absl::flat_hash_map<std::uint64_t, std::uint64_t> remembered_;
  std::deque<std::pair<std::uint64_t, std::uint64_t>> remembered_in_order_;
  std::uint64_t next_remembered_ = 0;
};

}  // namespace kvtier::cachestore
