// Eviction: what goes when the budget or a quota is full, in which order, and what never does.

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/cachestore/shared_sequence.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::KvData;
using kvtier::testing::Refuses;
using kvtier::testing::SeededRandom;
using testing::AppendSpan;
using ::testing::HasSubstr;
using testing::kAsFp32;
using testing::Key;
using testing::kSpace;
using testing::NaiveSequence;
using testing::PromptFrom;
using testing::ReadCheck;
using testing::TestStore;

constexpr std::int64_t kTokens = 200;
constexpr int kPage = 32;

struct Case {
  const char* format;
  EvictionPolicyName policy;
};

// A budget of five sequences of kTokens, and some.
class EvictionTest : public ::testing::TestWithParam<Case> {
 protected:
  EvictionTest() : spec_(testing::UniformSpec({.layers = 2, .heads = 2, .dim = 32})) { Start({}); }

  void Start(StoreOptions options) {
    const auto model = ResolveModel(testing::RequestOf(spec_, GetParam().format, kPage), 0).value();
    each_ = PlanSequence(*model, kTokens).allocated;
    options.memory = 5 * each_ + each_ / 2;
    options.eviction = GetParam().policy;
    store_ = std::make_unique<TestStore>(options);
    entry_ = store_->Register(testing::RequestOf(spec_, GetParam().format, kPage));
    data_ = kvtier::testing::MakeKvData(spec_, kTokens, random_,
                                        testing::LargestFor(GetParam().format, spec_));
  }
  Store& store() { return **store_; }
  const Model& model() const { return entry_->model(); }

  std::unique_ptr<Writer> Open(const std::string& id, const Prompt& prompt,
                               const std::string& space = kSpace) {
    WriterRequest request;
    request.key = {space, id};
    request.model_id = model().id;
    request.prompt = prompt;
    return store().OpenWriter(std::move(request)).value();
  }
  // All of it, from where the sequence stands.
  absl::Status Append(Writer& writer, std::int64_t tokens = kTokens) {
    const std::int64_t from = writer.standing().received_tokens;
    testing::Message message(data_, writer.shard(), {}, {0, 1}, {from, tokens - from});
    return writer.Append(message.chunk()).status();
  }
  void Write(const std::string& id, const Prompt& prompt, const std::string& space = kSpace) {
    store_->clock.Advance(absl::Seconds(1));
    const auto writer = Open(id, prompt, space);
    ASSERT_THAT(Append(*writer), IsOk());
    ASSERT_THAT(store().Seal({space, id}, kTokens), IsOk());
  }
  Prompt PromptOf(int i) { return PromptFrom(static_cast<std::uint32_t>(1000 * i), kTokens); }
  void Write(int i) { Write(std::to_string(i), PromptOf(i)); }

  std::int64_t CommittedOf(const std::string& id, const std::string& space = kSpace) {
    const auto description = store().Describe({space, id});
    return description.ok() ? description->committed_tokens : 0;
  }
  std::int64_t HitOf(const Prompt& prompt, const std::string& space = kSpace) {
    return store().Lookup(space, model().id, {prompt}).value()[0];
  }
  // What Lookup promises can be read, and is right.
  void ExpectHitReads(const Prompt& prompt, std::int64_t length) {
    const Grant lease = store().Acquire(kSpace, model().id, prompt, absl::ZeroDuration()).value();
    EXPECT_EQ(lease.tokens, HitOf(prompt));
    if (lease.id == 0) return;
    auto reader = store().OpenReader(kSpace, lease.id, model().id, {}, kAsFp32);
    ASSERT_THAT(reader, IsOk());
    ReadCheck(*reader, kAsFp32, NaiveSequence(model(), data_, length)).Run(random_);
    store().Release(kSpace, lease.id);
  }
  void ExpectBooksAgree() {
    const MemoryParts parts = store().memory();
    EXPECT_EQ(testing::SumOf(parts), store().budget());
    MemoryHeld held = entry_->totals().held;
    EXPECT_EQ(held.allocated, store().budget() - parts.free);
    EXPECT_EQ(store().GetQuota(kSpace).held + store().GetQuota("other").held, held.allocated);
  }
  std::int64_t evicted() const {
    return (*store_)->evictions()[static_cast<std::size_t>(EvictionReason::kMemory)].tokens;
  }

  SeededRandom random_;
  ModelSpec spec_;
  std::int64_t each_ = 0;
  std::unique_ptr<TestStore> store_;
  std::shared_ptr<ModelEntry> entry_;
  KvData data_;
};

// Nothing is refused; what went are the ends of what is coldest, and what stays is right.
TEST_P(EvictionTest, MakesRoomFromTheColdestEnds) {
  for (int i = 0; i < 30; ++i) Write(i);
  ExpectBooksAgree();
  EXPECT_EQ(CommittedOf("29"), kTokens);
  EXPECT_EQ(CommittedOf("0"), 0);
  EXPECT_THAT(store().Describe(Key("0")), Refuses(Reason::kUnknownSequence, HasSubstr("0")));
  EXPECT_THAT(store().OpenReader(Key("0"), "", {}, kAsFp32),
              Refuses(Reason::kUnknownSequence, HasSubstr("not held")));
  std::int64_t kept = 0, whole = 0;
  for (int i = 0; i < 30; ++i) {
    const std::int64_t committed = CommittedOf(std::to_string(i));
    kept += committed;
    whole += committed == kTokens ? 1 : 0;
    if (committed < kTokens) {
      EXPECT_EQ(committed % kPage, 0) << "whole columns";
    }
    EXPECT_EQ(HitOf(PromptOf(i)), committed / 16 * 16) << "lookup and sequence agree";
    ExpectHitReads(PromptOf(i), kTokens);
  }
  EXPECT_GE(whole, 4);
  EXPECT_EQ(evicted(), 30 * kTokens - kept);
  EXPECT_EQ(entry_->totals().tokens_held, kept);
  EXPECT_EQ(entry_->totals().sequence_tokens, kept);
}

TEST_P(EvictionTest, SaysWhatIsLeftOfASequence) {
  for (int i = 0; i < 5; ++i) Write(i);
  const auto writer = Open("next", {});
  for (std::int64_t tokens = 1; CommittedOf("0") == kTokens; ++tokens)
    AppendSpan(*writer, data_, {tokens - 1, 1});
  const std::int64_t left = CommittedOf("0");
  ASSERT_GT(left, 0) << "only its end went";
  EXPECT_EQ(store().Describe(Key("0"))->evicted_tokens, kTokens - left);
  EXPECT_THAT(store().OpenReader(Key("0"), "", {}, kAsFp32),
              Refuses(Reason::kEvicted, HasSubstr("from token " + std::to_string(left) + " on")));
  EXPECT_THAT(store().OpenReader(Key("0"), "", {.first_token = left, .tokens = 1}, kAsFp32),
              Refuses(Reason::kEvicted, HasSubstr("sealed with 200")));
  EXPECT_THAT(store().OpenReader(Key("0"), "", {.tokens = kTokens + 1}, kAsFp32),
              Refuses(Reason::kPastCommitted, HasSubstr("201")));
  auto reader = store().OpenReader(Key("0"), "", {.tokens = left}, kAsFp32);
  ASSERT_THAT(reader, IsOk());
  ReadCheck(*reader, kAsFp32, NaiveSequence(model(), data_, kTokens)).Run(random_);
  // A lease says how much it holds; less than asked for is no error.
  const Grant lease = store().Acquire(Key("0"), absl::ZeroDuration()).value();
  EXPECT_EQ(lease.tokens, left);
  EXPECT_THAT(store().OpenReader(kSpace, lease.id, "", {}, kAsFp32), IsOk());
  EXPECT_THAT(store().Seal(Key("0"), kTokens), IsOk()) << "sealing again does nothing";
  EXPECT_THAT(store().Seal(Key("0"), left), Refuses(Reason::kIncomplete, HasSubstr("tokens")));
  EXPECT_THAT(store().Fork(Key("0"), "f", kTokens), Refuses(Reason::kEvicted, HasSubstr("sealed")));
  EXPECT_EQ(store().Fork(Key("0"), "f", -1).value(), left);
}

// K and V, scales and residual of a page go together or not at all: every length that is left reads
// right in every layer, and takes what the planner says of it.
TEST_P(EvictionTest, PartsOfAPageGoTogether) {
  Write(0);
  std::int64_t committed = kTokens;
  std::vector<std::unique_ptr<Writer>> open;
  while (committed > 0 && open.size() < 6) {
    open.push_back(Open("open" + std::to_string(open.size()), {}));
    for (std::int64_t token = 0; token < kTokens && committed > 0; ++token) {
      testing::Message message(data_, open.back()->shard(), {}, {0, 1}, {token, 1});
      // Not refused before all that can go has gone.
      if (!open.back()->Append(message.chunk()).ok()) {
        ASSERT_EQ(CommittedOf("0"), 0);
        committed = 0;
        break;
      }
      if (std::exchange(committed, CommittedOf("0")) == CommittedOf("0") || committed == 0)
        continue;
      auto reader = store().OpenReader(Key("0"), "", {.tokens = committed}, kAsFp32);
      ASSERT_THAT(reader, IsOk());
      ReadCheck(*reader, kAsFp32, NaiveSequence(model(), data_, kTokens)).Run(random_);
    }
  }
  EXPECT_EQ(committed, 0);
  ExpectBooksAgree();
}

TEST_P(EvictionTest, NeverTakesWhatIsOpen) {
  std::vector<std::unique_ptr<Writer>> writers;
  for (int i = 0; i < 5; ++i) {
    writers.push_back(Open(std::to_string(i), PromptOf(i)));
    ASSERT_THAT(Append(*writers.back()), IsOk());
  }
  const auto more = Open("more", {});
  EXPECT_THAT(Append(*more), Refuses(Reason::kBudget, HasSubstr("more are needed")));
  EXPECT_EQ(evicted(), 0);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(CommittedOf(std::to_string(i)), kTokens);
  ASSERT_THAT(store().Seal(Key("3"), kTokens), IsOk());
  EXPECT_THAT(Append(*more), IsOk());
  EXPECT_LT(CommittedOf("3"), kTokens);
}

TEST_P(EvictionTest, NeverTakesWhatIsLeased) {
  for (int i = 0; i < 5; ++i) Write(i);
  std::vector<Grant> leases;
  for (int i = 0; i < 5; ++i) {
    leases.push_back(
        i % 2 == 0 ? store().Acquire(Key(std::to_string(i)), absl::Seconds(10)).value()
                   : store().Acquire(kSpace, model().id, PromptOf(i), absl::Seconds(10)).value());
  }
  const auto more = Open("more", {});
  EXPECT_THAT(Append(*more), Refuses(Reason::kBudget, HasSubstr("more are needed")));
  for (const Grant& lease : leases) {
    auto reader = store().OpenReader(kSpace, lease.id, "", {}, kAsFp32);
    ASSERT_THAT(reader, IsOk());
    EXPECT_EQ(reader->pins().tokens, lease.tokens);
    ReadCheck(*reader, kAsFp32, NaiveSequence(model(), data_, kTokens)).Run(random_);
  }
  store().Release(kSpace, leases[2].id);
  EXPECT_THAT(Append(*more), IsOk());
  EXPECT_LT(CommittedOf("2"), kTokens);
  // Expiry does it as well.
  store_->clock.Advance(absl::Seconds(11));
  EXPECT_EQ(store().Sweep(), 4);
  for (int i = 10; i < 20; ++i) Write(i);
  EXPECT_EQ(CommittedOf("0"), 0);
}

// A prefix is as hot as the hottest of those who share it.
TEST_P(EvictionTest, TakesASharedPrefixWithTheLastOfItsSharers) {
  constexpr std::int64_t kShared = 2 * kPage;
  const auto sharing = [&](int i) {
    Prompt prompt = PromptFrom(0, kShared);
    const Prompt own = PromptFrom(static_cast<std::uint32_t>(10'000 * (i + 1)), kTokens - kShared);
    prompt.token_ids.insert(prompt.token_ids.end(), own.token_ids.begin(), own.token_ids.end());
    return prompt;
  };
  for (int i = 0; i < 3; ++i) Write("shared" + std::to_string(i), sharing(i));
  ASSERT_GE(testing::SharablePages(model(), kTokens), 2);
  for (int i = 0; i < 20; ++i) {
    Write(i);
    Write("shared" + std::to_string(3 + i), sharing(3 + i));
    ASSERT_GE(HitOf(PromptFrom(0, kShared)), kShared);
  }
  for (int i = 20; i < 40; ++i) Write(i);
  EXPECT_EQ(HitOf(PromptFrom(0, kShared)), 0) << "in the end it is cold, too";
  ExpectBooksAgree();
}

TEST_P(EvictionTest, ReadsKeepASequence) {
  Write(100);
  for (int i = 0; i < 40; ++i) {
    for (int times = 0; times < 3; ++times) {
      store_->clock.Advance(absl::Seconds(1));
      ASSERT_THAT(store().OpenReader(Key("100"), "", {}, kAsFp32), IsOk());
    }
    Write(i);
  }
  EXPECT_EQ(CommittedOf("100"), kTokens);
}

TEST_P(EvictionTest, LookupsHoldNothing) {
  for (int i = 0; i < 5; ++i) Write(i);
  for (int i = 0; i < 10'000; ++i) ASSERT_EQ(HitOf(PromptOf(i % 5)), kTokens / 16 * 16);
  EXPECT_EQ(store().leases(), 0);
  for (int i = 5; i < 15; ++i) Write(i);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(CommittedOf(std::to_string(i)), 0);
}

// Lookup said so much; it is evicted before Acquire.
TEST_P(EvictionTest, AcquireGivesTheShorterHit) {
  for (int i = 0; i < 5; ++i) Write(i);
  ASSERT_EQ(HitOf(PromptOf(0)), kTokens / 16 * 16);
  const auto writer = Open("next", {});
  for (std::int64_t token = 0; CommittedOf("0") == kTokens; ++token)
    AppendSpan(*writer, data_, {token, 1});
  const Grant lease =
      store().Acquire(kSpace, model().id, PromptOf(0), absl::ZeroDuration()).value();
  EXPECT_EQ(lease.tokens, CommittedOf("0"));
  EXPECT_GT(lease.tokens, 0);
  EXPECT_THAT(store().OpenReader(kSpace, lease.id, "", {}, kAsFp32), IsOk());
}

TEST_P(EvictionTest, AForkAndItsSourceGoOneAfterTheOther) {
  Write(0);
  ASSERT_THAT(store().Fork(Key("0"), "fork", -1), IsOk());
  ASSERT_THAT(store().Seal(Key("fork"), kTokens), IsOk());
  for (int i = 10; i < 40; ++i) Write(i);
  EXPECT_EQ(CommittedOf("0"), 0);
  EXPECT_EQ(CommittedOf("fork"), 0);
  ExpectBooksAgree();
}

TEST_P(EvictionTest, AForkMakesRoomForItsCopies) {
  for (int i = 0; i < 5; ++i) Write(i);
  std::int64_t forks = 0;
  for (; evicted() == 0; ++forks)
    ASSERT_THAT(store().Fork(Key("4"), "fork" + std::to_string(forks), -1), IsOk());
  EXPECT_EQ(CommittedOf("4"), kTokens);
  EXPECT_LT(CommittedOf("0"), kTokens);
}

TEST_P(EvictionTest, AHardPinKeepsUntilItEnds) {
  for (int i = 0; i < 3; ++i) Write(i);
  const Grant pin = store().AddPin(Key("0"), {PinKind::kHard, absl::Hours(1)}).value();
  EXPECT_EQ(pin.tokens, kTokens);
  const Grant prefix =
      store().AddPin(kSpace, model().id, PromptOf(1), {PinKind::kHard, absl::Seconds(90)}).value();
  EXPECT_EQ(store().pins(), 2);
  EXPECT_THAT(store().Remove(Key("1")), IsOk());
  for (int i = 10; i < 30; ++i) Write(i);
  EXPECT_EQ(CommittedOf("0"), kTokens);
  EXPECT_EQ(HitOf(PromptOf(1)) / kPage, testing::SharablePages(model(), kTokens)) << "columns stay";
  EXPECT_EQ(CommittedOf("2"), 0);
  store().Unpin(kSpace, pin.id);
  store().Unpin(kSpace, pin.id);
  store_->clock.Advance(absl::Seconds(91));
  store().Sweep();
  EXPECT_EQ(store().pins(), 0);
  for (int i = 30; i < 40; ++i) Write(i);
  EXPECT_EQ(CommittedOf("0"), 0);
  EXPECT_EQ(HitOf(PromptOf(1)), 0);
  store().Unpin(kSpace, prefix.id);
  ExpectBooksAgree();
}

TEST_P(EvictionTest, WhatIsPinnedSoftlyGoesLast) {
  for (int i = 0; i < 5; ++i) Write(i);
  ASSERT_THAT(store().AddPin(Key("0"), {PinKind::kSoft, absl::Hours(1)}), IsOk());
  const Grant ends = store().AddPin(Key("1"), {PinKind::kSoft, absl::Seconds(10)}).value();
  store_->clock.Advance(absl::Seconds(11));
  store().Sweep();
  const auto one = Open("one", {}), two = Open("two", {}), three = Open("three", {}),
             four = Open("four", {}), five = Open("five", {}), six = Open("six", {});
  for (const auto* writer : {&one, &two, &three}) ASSERT_THAT(Append(**writer), IsOk());
  EXPECT_EQ(CommittedOf("0"), kTokens);
  EXPECT_EQ(CommittedOf("1"), 0) << "that pin had ended";
  for (const auto* writer : {&four, &five})
    ASSERT_THAT(Append(**writer), IsOk()) << "in the end it goes, too";
  EXPECT_LT(CommittedOf("0"), kTokens);
  EXPECT_THAT(Append(*six), Refuses(Reason::kBudget, HasSubstr("more are needed")));
  EXPECT_EQ(CommittedOf("0"), 0);
  store().Unpin(kSpace, ends.id);
}

TEST_P(EvictionTest, APinEndsWithItsSequenceAndHasBounds) {
  Start({.max_pins = 2, .max_pin = absl::Minutes(1)});
  Write(0);
  EXPECT_THAT(store().AddPin(Key("0"), {PinKind::kHard, absl::Minutes(2)}),
              Refuses(Reason::kInvalidField, HasSubstr("at most 60000 (max_pin)")));
  EXPECT_THAT(store().AddPin(Key("1"), {PinKind::kHard, absl::ZeroDuration()}),
              Refuses(Reason::kUnknownSequence, HasSubstr("1")));
  EXPECT_EQ(store().AddPin(kSpace, model().id, PromptOf(7), {}).value().id, 0u);
  for (int i = 0; i < 2; ++i) {
    const auto pin = store().AddPin(Key("0"), {i == 0 ? PinKind::kHard : PinKind::kSoft, {}});
    ASSERT_THAT(pin, IsOk());
    EXPECT_EQ(pin->duration, absl::Minutes(1));
  }
  EXPECT_THAT(store().AddPin(Key("0"), {PinKind::kSoft, {}}),
              Refuses(Reason::kTooManyPins, HasSubstr("max_pins")));
  EXPECT_THAT(store().Remove(Key("0")), IsOk());
  EXPECT_EQ(store().memory().free, store().budget());
  store_->clock.Advance(absl::Minutes(2));
  store().Sweep();
  EXPECT_EQ(store().pins(), 0);
}

TEST_P(EvictionTest, ANamespaceAtItsQuotaEvictsItsOwn) {
  ASSERT_THAT(store().SetQuota("other", 2 * each_), IsOk());
  Write("a", PromptOf(1));
  Write("b", PromptOf(2));
  for (int i = 0; i < 20; ++i) {
    Write(std::to_string(i), PromptOf(i), "other");
    ASSERT_LE(store().GetQuota("other").held, 2 * each_);
  }
  EXPECT_EQ(CommittedOf("a"), kTokens);
  EXPECT_EQ(CommittedOf("b"), kTokens);
  EXPECT_EQ(CommittedOf("19", "other"), kTokens);
  EXPECT_EQ(CommittedOf("0", "other"), 0);
  EXPECT_EQ(evicted(), 0);
  EXPECT_GT(store().evictions()[static_cast<std::size_t>(EvictionReason::kQuota)].tokens, 0);
  ExpectBooksAgree();
  // What is open there is not evicted for it, either: the append is refused, though memory is free.
  const auto one = Open("one", {}, "other"), two = Open("two", {}, "other"),
             three = Open("three", {}, "other");
  ASSERT_THAT(Append(*one), IsOk());
  ASSERT_THAT(Append(*two), IsOk());
  EXPECT_THAT(Append(*three), Refuses(Reason::kQuota, HasSubstr("quota of")));
  EXPECT_EQ(CommittedOf("a"), kTokens);
}

TEST_P(EvictionTest, ALowerQuotaEvictsAtOnce) {
  for (int i = 0; i < 4; ++i) Write(i);
  EXPECT_EQ(store().GetQuota(kSpace).quota, kNoQuota);
  const QuotaStanding standing = store().SetQuota(kSpace, 2 * each_).value();
  EXPECT_EQ(standing.quota, 2 * each_);
  EXPECT_LE(standing.held, 2 * each_);
  EXPECT_GT(standing.held, each_);
  EXPECT_EQ(store().SetQuota(kSpace, 0)->quota, kNoQuota);
  for (int i = 4; i < 8; ++i) Write(i);
  EXPECT_GT(store().GetQuota(kSpace).held, 3 * each_);
}

TEST_P(EvictionTest, WhatNobodyUsesGoesAfterItsTime) {
  Start({.idle_ttl = absl::Seconds(100)});
  for (int i = 0; i < 3; ++i) Write(i);
  const auto open = Open("open", {});
  ASSERT_THAT(Append(*open, 50), IsOk());
  store_->clock.Advance(absl::Seconds(60));
  ASSERT_THAT(store().OpenReader(Key("1"), "", {}, kAsFp32), IsOk());
  const Grant lease = store().Acquire(Key("2"), absl::Seconds(300)).value();
  store_->clock.Advance(absl::Seconds(50));
  store().Sweep();
  EXPECT_EQ(CommittedOf("0"), 0);
  EXPECT_EQ(CommittedOf("1"), kTokens) << "it was read";
  EXPECT_EQ(CommittedOf("2"), kTokens) << "it is leased";
  EXPECT_EQ(CommittedOf("open"), 50) << "it is open";
  store().Release(kSpace, lease.id);
  store_->clock.Advance(absl::Seconds(101));
  store().Sweep();
  EXPECT_EQ(CommittedOf("1") + CommittedOf("2"), 0);
  EXPECT_EQ(store().evictions()[static_cast<std::size_t>(EvictionReason::kIdle)].tokens,
            3 * kTokens);
}

TEST_P(EvictionTest, KeepsBelowTheWatermark) {
  Start({.evict_above = 80, .evict_until = 60});
  std::int64_t most = 0;
  for (int i = 0; i < 30; ++i) {
    store().Sweep();
    const std::int64_t held = store().budget() - store().memory().free;
    EXPECT_LE(held, store().budget() * 8 / 10);
    most = std::max(most, held);
    Write(i);
  }
  EXPECT_GT(most, store().budget() / 2);
}

INSTANTIATE_TEST_SUITE_P(Formats, EvictionTest,
                         ::testing::Values(Case{"auto", EvictionPolicyName::kLru},
                                           Case{"fp8", EvictionPolicyName::kS3Fifo},
                                           Case{"kivi2", EvictionPolicyName::kLru},
                                           Case{"kivi2", EvictionPolicyName::kS3Fifo},
                                           Case{"kivi(4,4,32,32)", EvictionPolicyName::kLru},
                                           Case{"fp8(scale=page)", EvictionPolicyName::kLru}),
                         [](const auto& test) {
                           return testing::TestNameOf(test.param.format) +
                                  (test.param.policy == EvictionPolicyName::kLru ? "_lru"
                                                                                 : "_s3_fifo");
                         });

}  // namespace
}  // namespace kvtier::cachestore
