#pragma once

#include <optional>
#include <tuple>

#include "absl/container/btree_set.h"
#include "cachestore/eviction/policy.h"

namespace kvtier::cachestore {

// Least recently used first; of things used at the same time the one that came last, which lies
// behind the others of its sequence.
class Lru final : public EvictionPolicy {
 public:
  void Add(const EvictionCandidate& candidate) override { coldest_first_.insert({candidate}); }
  void Remove(const EvictionCandidate& candidate) override { coldest_first_.erase({candidate}); }
  void Forget(const EvictionCandidate&, bool) override {}
  std::optional<EvictionCandidate> Next() override {
    if (coldest_first_.empty()) return std::nullopt;
    return coldest_first_.begin()->candidate;
  }

 private:
  struct Entry {
    EvictionCandidate candidate;
    friend bool operator<(const Entry& a, const Entry& b) {
      return std::tie(a.candidate.last_access, b.candidate.id) <
             std::tie(b.candidate.last_access, a.candidate.id);
    }
  };
  absl::btree_set<Entry> coldest_first_;
};

}  // namespace kvtier::cachestore
