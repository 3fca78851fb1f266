// What every eviction policy has to do, and what each does differently.

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "cachestore/eviction/policy.h"
#include "tests/support/seed.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::SeededRandom;

absl::Time At(std::int64_t second) { return absl::UnixEpoch() + absl::Seconds(second); }

// Things that come, are used and go, as an evictor moves them.
class Things {
 public:
  explicit Things(EvictionPolicyName name) : policy_(MakeEvictionPolicy(name)) {}

  std::uint64_t Come(std::uint64_t content = 0) {
    const EvictionCandidate thing{++last_id_, content, At(++now_), 0};
    candidates_[thing.id] = thing;
    policy_->Add(thing);
    return thing.id;
  }
  void Take(std::uint64_t id) {
    const auto thing = candidates_.extract(id);
    policy_->Remove(thing.mapped());
    in_use_[id] = thing.mapped();
  }
  void PutBack(std::uint64_t id) {
    EvictionCandidate thing = in_use_.extract(id).mapped();
    thing.last_access = At(++now_);
    ++thing.accesses;
    candidates_[id] = thing;
    policy_->Add(thing);
  }
  void Use(std::uint64_t id) {
    Take(id);
    PutBack(id);
  }
  void Drop(std::uint64_t id) {
    if (candidates_.contains(id)) Take(id);
    policy_->Forget(in_use_.extract(id).mapped(), false);
  }
  // 0: nothing is left.
  std::uint64_t Evict() {
    const auto next = policy_->Next();
    if (!next.has_value()) return 0;
    EXPECT_TRUE(candidates_.contains(next->id)) << next->id << " is no candidate";
    policy_->Remove(*next);
    policy_->Forget(*next, true);
    candidates_.erase(next->id);
    return next->id;
  }

  const std::map<std::uint64_t, EvictionCandidate>& candidates() const { return candidates_; }
  const std::map<std::uint64_t, EvictionCandidate>& in_use() const { return in_use_; }

 private:
  const std::unique_ptr<EvictionPolicy> policy_;
  std::map<std::uint64_t, EvictionCandidate> candidates_;
  std::map<std::uint64_t, EvictionCandidate> in_use_;
  std::uint64_t last_id_ = 0;
  std::int64_t now_ = 0;
};

class EvictionPolicyTest : public ::testing::TestWithParam<EvictionPolicyName> {};

TEST_P(EvictionPolicyTest, EvictsCandidatesAloneAndAllOfThem) {
  SeededRandom random;
  Things things(GetParam());
  const auto any_of = [&](const std::map<std::uint64_t, EvictionCandidate>& some) {
    return std::next(some.begin(), random.Between(0, std::ssize(some) - 1))->first;
  };
  for (int step = 0; step < 20'000; ++step) {
    const bool candidates = !things.candidates().empty();
    switch (random.Between(0, 5)) {
      case 0:
      case 1:
        things.Come(static_cast<std::uint64_t>(random.Between(0, 50)));
        break;
      case 2:
        if (candidates) things.Take(any_of(things.candidates()));
        break;
      case 3:
        if (!things.in_use().empty()) things.PutBack(any_of(things.in_use()));
        break;
      case 4:
        if (candidates && random.OneIn(4)) things.Drop(any_of(things.candidates()));
        break;
      default:
        ASSERT_EQ(things.Evict() != 0, candidates);
    }
  }
  std::size_t left = things.candidates().size();
  while (things.Evict() != 0) --left;
  EXPECT_EQ(left, 0u);
  for (; !things.in_use().empty(); things.PutBack(things.in_use().begin()->first)) ++left;
  while (things.Evict() != 0) --left;
  EXPECT_EQ(left, 0u);
}

// A page goes as soon as those behind it have, not after everybody else's.
TEST_P(EvictionPolicyTest, WhatCameEarlierAndWasUsedAsMuchGoesNext) {
  Things things(GetParam());
  std::vector<std::uint64_t> ids;
  for (int i = 0; i < 6; ++i) ids.push_back(things.Come());
  things.Take(ids[0]);
  things.Take(ids[1]);
  EXPECT_EQ(things.Evict(), ids[2]);
}

TEST_P(EvictionPolicyTest, OfWhatCameAtTheSameTimeWhatIsUsedStaysLonger) {
  Things things(GetParam());
  std::vector<std::uint64_t> ids;
  for (int i = 0; i < 10; ++i) ids.push_back(things.Come());
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 10; i += 2) things.Use(ids[static_cast<std::size_t>(i)]);
  }
  std::set<std::uint64_t> first;
  for (int i = 0; i < 5; ++i) first.insert(things.Evict());
  for (int i = 1; i < 10; i += 2)
    EXPECT_TRUE(first.contains(ids[static_cast<std::size_t>(i)])) << i;
}

INSTANTIATE_TEST_SUITE_P(Policies, EvictionPolicyTest,
                         ::testing::Values(EvictionPolicyName::kLru, EvictionPolicyName::kS3Fifo),
                         [](const auto& test) {
                           return test.param == EvictionPolicyName::kLru ? "lru" : "s3_fifo";
                         });

TEST(Lru, EvictsInTheOrderOfLastUse) {
  Things things(EvictionPolicyName::kLru);
  const std::uint64_t a = things.Come(), b = things.Come(), c = things.Come();
  things.Use(a);
  EXPECT_EQ(things.Evict(), b);
  EXPECT_EQ(things.Evict(), c);
  EXPECT_EQ(things.Evict(), a);
  EXPECT_EQ(things.Evict(), 0u);
}

// A scan of what is read once does not push out what is read often; by LRU it would.
TEST(S3Fifo, KeepsWhatIsUsedOftenThroughAScan) {
  for (const auto policy : {EvictionPolicyName::kLru, EvictionPolicyName::kS3Fifo}) {
    Things things(policy);
    std::vector<std::uint64_t> often;
    for (int i = 0; i < 20; ++i) often.push_back(things.Come());
    for (int i = 0; i < 3; ++i) {
      for (const std::uint64_t id : often) things.Use(id);
    }
    for (int i = 0; i < 80; ++i) things.Come();
    for (int i = 0; i < 500; ++i) {
      things.Use(things.Come());
      things.Evict();
    }
    std::size_t kept = 0;
    for (const std::uint64_t id : often) kept += things.candidates().count(id);
    EXPECT_EQ(kept, policy == EvictionPolicyName::kLru ? 0u : 20u);
  }
}

TEST(S3Fifo, WhatComesBackIsKnownAgain) {
  Things things(EvictionPolicyName::kS3Fifo);
  for (std::uint64_t content = 1; content <= 20; ++content) things.Come(content);
  for (int i = 0; i < 5; ++i) things.Evict();
  const std::uint64_t again = things.Come(3);
  for (std::uint64_t content = 100; content < 120; ++content) things.Come(content);
  std::set<std::uint64_t> evicted;
  for (int i = 0; i < 30; ++i) evicted.insert(things.Evict());
  EXPECT_FALSE(evicted.contains(again));
}

}  // namespace
}  // namespace kvtier::cachestore
