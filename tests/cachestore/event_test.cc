// What subscribers are told of prefixes that come and go: after all that was told they know exactly
// what Lookup finds.

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cachestore/event_mirror.h"
#include "tests/cachestore/shared_sequence.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::KvData;
using kvtier::testing::Refuses;
using testing::AppendSpan;
using testing::Diverge;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Key;
using testing::kPage;
using testing::kSpace;
using testing::OpenWithPrompt;
using testing::PromptFrom;
using Kind = BlockEvent::Kind;

struct EventMirror : kvtier::testing::EventMirror {
  ~EventMirror() { EXPECT_EQ(wrong(), ""); }
};

constexpr std::int64_t kTokens = 300;
constexpr std::int64_t kBlock = 16;
constexpr std::int64_t kLog = 4096;  // bytes, of some 24 blocks

class EventTest : public testing::TwoTextsTest {
 protected:
  EventTest()
      : TwoTextsTest(TwoLayers(), {.memory = 4 << 20, .max_subscriptions = 2, .event_log = kLog},
                     kTokens) {}

  std::unique_ptr<Subscription> Subscribe(
      const EventPosition& after = {}, EventLog::Waiter on_events = [] {}) {
    return store_->Subscribe(kSpace, after, std::move(on_events)).value();
  }
  void Write(const std::string& id, std::uint32_t prompt, std::int64_t tokens) {
    const auto writer = OpenWithPrompt(store_, id, model(), PromptFrom(prompt, tokens));
    const std::int64_t from = writer->standing().received_tokens;
    AppendSpan(*writer, one_, {from, tokens - from});
  }
  std::vector<PrefixKey> KeysOf(const Prompt& prompt) const {
    return PrefixKeysOf(kSpace, model().id, kBlock, prompt);
  }
  void ExpectAgrees(const EventMirror& mirror, const Prompt& prompt) {
    EXPECT_EQ(store_->Lookup(kSpace, model().id, {prompt}).value()[0],
              kBlock * mirror.Held(KeysOf(prompt)));
  }
};

TEST_P(EventTest, TellsWhatLookupFinds) {
  const auto subscription = Subscribe();
  EventMirror mirror;
  mirror.Drain(*subscription);
  EXPECT_EQ(mirror.known(), 0);
  const Prompt prompt = PromptFrom(0, kTokens);
  const auto writer = OpenWithPrompt(store_, "a", model(), prompt);
  std::int64_t tokens = 0;
  for (const std::int64_t count : {1, 7, 16, 129}) {
    AppendSpan(*writer, one_, {tokens, count});
    tokens += count;
    mirror.Drain(*subscription);
    EXPECT_EQ(mirror.known(), tokens / kBlock);
    ExpectAgrees(mirror, prompt);
  }
  ASSERT_THAT(store_->Truncate(Key("a"), 64, 0), IsOk());
  mirror.Drain(*subscription);
  EXPECT_EQ(mirror.known(), 4);
  ASSERT_THAT(store_->Remove(Key("a")), IsOk());
  mirror.Drain(*subscription);
  EXPECT_EQ(mirror.known(), 0);
  EXPECT_EQ(mirror.cleared(), 1) << "at the begin, and never since";
}

TEST_P(EventTest, OnceForAllWhoShare) {
  const auto subscription = Subscribe();
  EventMirror mirror;
  Write("a", 0, kTokens);
  mirror.Drain(*subscription);
  const std::int64_t told = mirror.stored();
  Write("b", 0, kTokens);
  ASSERT_THAT(store_->Fork(Key("a"), "c", kTokens), IsOk());
  ASSERT_THAT(store_->Remove(Key("a")), IsOk());
  ASSERT_THAT(store_->Remove(Key("c")), IsOk());
  mirror.Drain(*subscription);
  EXPECT_EQ(mirror.stored(), told);
  EXPECT_EQ(mirror.known(), kTokens / kBlock);
  ASSERT_THAT(store_->Remove(Key("b")), IsOk());
  mirror.Drain(*subscription);
  EXPECT_EQ(mirror.known(), 0);
}

TEST_P(EventTest, SaysWhatTheKeysWereMadeOf) {
  const auto subscription = Subscribe();
  EXPECT_EQ(subscription->Next().events[0].kind, Kind::kAllCleared);
  Prompt prompt = PromptFrom(1000, 2 * kPage + 40);
  prompt.adapter = "an adapter";
  prompt.extra_keys = {{1, "an image"}, {9, "another"}};
  AppendSpan(*OpenWithPrompt(store_, "a", model(), prompt), one_, {0, 2 * kPage + 40});
  std::vector<PrefixKey> keys;
  std::vector<std::uint32_t> token_ids;
  for (auto batch = subscription->Next(); !batch.events.empty(); batch = subscription->Next()) {
    for (const BlockEvent& event : batch.events) {
      ASSERT_EQ(event.kind, Kind::kStored);
      const HashBlocks& blocks = *event.blocks;
      EXPECT_EQ(blocks.root->model_id, model().id);
      EXPECT_EQ(blocks.root->block_tokens, kBlock);
      EXPECT_EQ(blocks.root->adapter, "an adapter");
      EXPECT_EQ(blocks.first, std::ssize(keys));
      if (blocks.first > 0) {
        EXPECT_EQ(blocks.parent, keys.back());
      }
      keys.insert(keys.end(), blocks.keys.begin(), blocks.keys.end());
      token_ids.insert(token_ids.end(), blocks.token_ids.begin(), blocks.token_ids.end());
      for (const ExtraKey& extra : blocks.extra_keys) {
        EXPECT_EQ(extra.key, extra.block == 1 ? "an image" : "another");
        EXPECT_GE(extra.block, blocks.first);
        EXPECT_LT(extra.block, blocks.first + blocks.size());
      }
    }
  }
  EXPECT_EQ(keys, KeysOf(prompt));
  prompt.token_ids.resize(10 * kBlock);
  EXPECT_EQ(token_ids, prompt.token_ids);
}

TEST_P(EventTest, OneWhoComesBackIsToldWhatItMissed) {
  EventMirror mirror;
  mirror.Drain(*Subscribe());
  Write("a", 0, kTokens);
  mirror.Drain(*Subscribe(mirror.position()));
  EXPECT_EQ(mirror.known(), kTokens / kBlock);
  EXPECT_EQ(mirror.cleared(), 1);
  ASSERT_THAT(store_->Remove(Key("a")), IsOk());
  Write("b", 5000, kBlock);
  mirror.Drain(*Subscribe(mirror.position()));
  ExpectAgrees(mirror, PromptFrom(5000, kBlock));
  EXPECT_EQ(mirror.known(), 1);
  EXPECT_EQ(mirror.cleared(), 1);
}

TEST_P(EventTest, OneWhoMissedMoreThanIsKeptBeginsAnew) {
  const auto slow = Subscribe();
  EventMirror mirror;
  mirror.Drain(*slow);
  for (int i = 0; i < 4; ++i)
    Write("s" + std::to_string(i), static_cast<std::uint32_t>(1000 * i), 160);
  ASSERT_THAT(store_->Remove(Key("s0")), IsOk());
  mirror.Drain(*slow);
  EXPECT_EQ(mirror.cleared(), 2);
  EXPECT_EQ(mirror.known(), 30);
  for (std::uint32_t i = 0; i < 4; ++i) ExpectAgrees(mirror, PromptFrom(1000 * i, 160));
  // One with a number of another log, or one that nobody was given.
  for (const EventPosition& wrong : {EventPosition{mirror.position().log_id + 1, 3},
                                     EventPosition{mirror.position().log_id, 1'000'000}}) {
    EventMirror other;
    other.Drain(*Subscribe(wrong));
    EXPECT_EQ(other.cleared(), 1);
    EXPECT_EQ(other.known(), 30);
  }
}

TEST_P(EventTest, AListingHasNoNumberBeforeItsEnd) {
  const auto writer = OpenWithPrompt(store_, "a", model(), PromptFrom(0, kTokens));
  AppendSpan(*writer, one_, {0, kTokens});
  const auto subscription = Subscribe();
  EventBatch batch = subscription->Next();
  EXPECT_EQ(batch.position.number, 0u) << "whoever leaves now begins anew";
  while (batch.position.number == 0) {
    batch = subscription->Next();
    ASSERT_FALSE(batch.events.empty());
  }
  EXPECT_TRUE(subscription->Next().events.empty());
}

TEST_P(EventTest, WakesOnceForAllThatCame) {
  int woken = 0;
  const auto subscription = Subscribe({}, [&] { ++woken; });
  EventMirror mirror;
  mirror.Drain(*subscription);
  mirror.Drain(*subscription);
  Write("a", 0, 40);
  EXPECT_EQ(woken, 1) << "though it has looked twice";
  Write("b", 1000, 40);
  EXPECT_EQ(woken, 1) << "it has not looked since";
  mirror.Drain(*subscription);
  EXPECT_EQ(mirror.known(), 4);
  ASSERT_THAT(store_->Remove(Key("a")), IsOk());
  EXPECT_EQ(woken, 2);
}

TEST_P(EventTest, NamespacesDoNotSeeEachOther) {
  const auto subscription = store_->Subscribe("other", {}, [] {}).value();
  EventMirror mirror;
  mirror.Drain(*subscription);
  Write("a", 0, kTokens);
  mirror.Drain(*subscription);
  EXPECT_EQ(mirror.stored(), 0);
}

TEST_P(EventTest, ThereIsALimitAndWhoLeavesMakesRoom) {
  const auto one = Subscribe();
  {
    const auto two = Subscribe();
    EXPECT_EQ(store_->subscriptions(), 2);
    EXPECT_THAT(store_->Subscribe(kSpace, {}, [] {}),
                Refuses(Reason::kTooManySubscriptions, HasSubstr("is 2")));
  }
  EXPECT_EQ(store_->subscriptions(), 1);
  EXPECT_THAT(store_->Subscribe(kSpace, {}, [] {}), IsOk());
}

TEST_P(EventTest, ALogIsForgottenOnceNobodyComesBack) {
  EventMirror mirror;
  mirror.Drain(*Subscribe());
  store_.clock.Advance(absl::Minutes(6));
  store_->Sweep();
  mirror.Drain(*Subscribe(mirror.position()));
  EXPECT_EQ(mirror.cleared(), 2);
}

INSTANTIATE_TEST_SUITE_P(Formats, EventTest, ::testing::Values("auto", "kivi(2,2,32,32)"),
                         [](const auto& test) { return testing::TestNameOf(test.param); });

// A subscriber beside writers that come and go.
TEST(EventConcurrency, WhatWasToldIsWhatIsHeld) {
  testing::TestStore store({.memory = 1 << 20, .event_log = 8192});
  const auto entry = store.Register(
      testing::RequestOf(testing::UniformSpec({.layers = 1, .heads = 1, .dim = 32}), "auto", 64));
  kvtier::testing::SeededRandom random;
  const KvData data = kvtier::testing::MakeKvData(entry->model().request.spec, 256, random, 10.0f);
  std::atomic<bool> over = false;
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint32_t i = 0; !over; ++i) {
        const std::string id = std::to_string(t) + "-" + std::to_string(i % 5);
        (void)store->Remove(Key(id));
        const auto writer =
            OpenWithPrompt(store, id, entry->model(), PromptFrom(i % 7 * 1000, 256));
        const std::int64_t from = writer->standing().received_tokens;
        AppendSpan(*writer, data, {from, 256 - from});
      }
    });
  }
  EventMirror mirror;
  const auto subscription = store->Subscribe(kSpace, {}, [] {}).value();
  while (mirror.stored() < 500) mirror.Apply(subscription->Next());
  over = true;
  for (std::thread& thread : threads) thread.join();
  mirror.Drain(*subscription);
  for (std::uint32_t i = 0; i < 7; ++i) {
    const Prompt prompt = PromptFrom(i * 1000, 256);
    EXPECT_EQ(store->Lookup(kSpace, entry->model().id, {prompt}).value()[0],
              16 * mirror.Held(PrefixKeysOf(kSpace, entry->model().id, 16, prompt)));
  }
}

}  // namespace
}  // namespace kvtier::cachestore
