// Prompts that begin alike: how far they are held, and what their sequences share.

#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <memory>
#include <optional>
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
using testing::Diverge;
using testing::ExpectReads;
using ::testing::HasSubstr;
using testing::Key;
using testing::kPage;
using testing::OpenWithPrompt;
using testing::PromptFrom;
using testing::TestStore;

constexpr std::int64_t kMemory = 4 << 20;
constexpr std::int64_t kTokens = 300;

class PrefixTest : public testing::TwoTextsTest {
 protected:
  PrefixTest() : TwoTextsTest(Spec(), {.memory = kMemory}, kTokens) {}
  static ModelSpec Spec() {
    ModelSpec spec = TwoLayers();
    spec.layers[1].k_head_dim = 64;
    return spec;
  }

  std::int64_t Held(const Prompt& prompt) {
    return store_->Lookup("default", model().id, {prompt}).value()[0];
  }
  // A writer of sequence "a".
  absl::StatusOr<std::unique_ptr<Writer>> Open(const Prompt& prompt, std::uint64_t epoch) {
    WriterRequest request;
    request.key = Key("a");
    request.model_id = model().id;
    request.epoch = epoch;
    request.prompt = prompt;
    return store_->OpenWriter(std::move(request));
  }
  void Write(const std::string& id, const Prompt& prompt, const KvData& data, std::int64_t tokens) {
    const auto writer = OpenWithPrompt(store_, id, model(), prompt);
    const std::int64_t from = writer->standing().received_tokens;
    AppendSpan(*writer, data, {from, tokens - from});
  }
};

TEST_P(PrefixTest, IsHeldInWholeHashBlocksAsFarAsItIsCommitted) {
  const Prompt prompt = PromptFrom(0, kTokens);
  EXPECT_EQ(Held(prompt), 0);
  const auto writer = OpenWithPrompt(store_, "a", model(), prompt);
  std::int64_t tokens = 0;
  for (const std::int64_t count : {1, 7, 16, 129}) {
    AppendSpan(*writer, one_, {tokens, count});
    tokens += count;
    EXPECT_EQ(Held(prompt), tokens / 16 * 16);
  }
  ASSERT_THAT(store_->Seal(Key("a"), 153), IsOk());
  EXPECT_EQ(Held(prompt), 144) << "153 tokens are nine blocks of 16 and a tail";
  ExpectReads(store_, "a", model(), one_, 153, 0, random_);
  ASSERT_THAT(store_->Remove(Key("a")), IsOk());
  EXPECT_EQ(Held(prompt), 0);
}

// What one layer has and the other has not isn't held.
TEST_P(PrefixTest, IsHeldWhenEveryLayerHasIt) {
  const Prompt prompt = PromptFrom(0, 200);
  const auto writer = OpenWithPrompt(store_, "a", model(), prompt);
  testing::Message first(one_, writer->shard(), {}, {0}, {0, 200});
  ASSERT_THAT(writer->Append(first.chunk()), IsOk());
  EXPECT_EQ(Held(prompt), 0);
  testing::Message second(one_, writer->shard(), {}, {1}, {0, 50});
  ASSERT_THAT(writer->Append(second.chunk()), IsOk());
  EXPECT_EQ(Held(prompt), 48);
}

// Pages of 64, hash blocks of 16, prompts that part at token 40.
TEST_P(PrefixTest, EndsWherePromptsPart) {
  Prompt prompt = PromptFrom(0, 200);
  Write("a", prompt, one_, 200);
  prompt.token_ids[40] += 1000;
  EXPECT_EQ(Held(prompt), 32);
  // Nothing whole is shared: the sequence begins at 0.
  const auto writer = OpenWithPrompt(store_, "b", model(), prompt);
  EXPECT_EQ(writer->standing().received_tokens, 0);
}

TEST_P(PrefixTest, OtherSaltsAdaptersAndImagesHitNothing) {
  Prompt prompt = PromptFrom(0, 128);
  prompt.salt = "a";
  Write("a", prompt, one_, 128);
  EXPECT_EQ(Held(prompt), 128);
  Prompt other = prompt;
  other.salt = "b";
  EXPECT_EQ(Held(other), 0);
  other = prompt;
  other.adapter = "lora";
  EXPECT_EQ(Held(other), 0);
  other = prompt;
  other.extra_keys = {{2, "image"}};
  EXPECT_EQ(Held(other), 32);
  EXPECT_EQ(store_->Lookup("tenant", model().id, {prompt}).value()[0], 0);
}

TEST_P(PrefixTest, WholePagesAreSharedAndTheRestIsSent) {
  Write("a", PromptFrom(0, 200), one_, 200);
  ASSERT_THAT(store_->Seal(Key("a"), 200), IsOk());
  // 150 tokens alike, 144 in whole blocks, two pages at most.
  Prompt prompt = PromptFrom(0, 250);
  for (std::size_t i = 150; i < 250; ++i) prompt.token_ids[i] += 1000;
  const KvData data = Diverge(one_, other_, 150);
  const std::int64_t free = store_->memory().free;
  const auto writer = OpenWithPrompt(store_, "b", model(), prompt);
  const std::int64_t shared =
      kPage * std::min<std::int64_t>(2, testing::SharablePages(model(), 200));
  EXPECT_EQ(writer->standing().received_tokens, shared);
  EXPECT_EQ(writer->standing().committed_tokens, shared);
  EXPECT_EQ(writer->standing().residual_origin, shared);
  EXPECT_EQ(store_->memory().free, free) << "shared pages take nothing";
  ExpectReads(store_, "b", model(), data, shared, shared, random_);
  // One token at a time, then many.
  AppendSpan(*writer, data, {shared, 1});
  AppendSpan(*writer, data, {shared + 1, 250 - shared - 1});
  ExpectReads(store_, "b", model(), data, 250, shared, random_);
  ExpectReads(store_, "a", model(), one_, 200, 0, random_);
  EXPECT_EQ(Held(prompt), 240);
  const ModelTotals totals = entry_->totals();
  EXPECT_EQ(totals.sequence_tokens, 450);
  EXPECT_EQ(totals.tokens_held, 450 - shared);
  EXPECT_EQ(totals.appended_tokens, 450 - shared);
  // Each goes its own way.
  ASSERT_THAT(store_->Remove(Key("a")), IsOk());
  ExpectReads(store_, "b", model(), data, 250, shared, random_);
  EXPECT_EQ(Held(PromptFrom(0, 200)), 144);
  ASSERT_THAT(store_->Remove(Key("b")), IsOk());
  EXPECT_EQ(Held(prompt), 0);
  EXPECT_EQ(store_->memory().free, kMemory);
  EXPECT_EQ(entry_->totals().tokens_held, 0);
  EXPECT_EQ(entry_->totals().sequence_tokens, 0);
}

// Sequences that have no prompt, or that got it too late, share nothing and are found by nobody.
TEST_P(PrefixTest, WithoutAPromptNothingIsShared) {
  Write("a", {}, one_, 200);
  const Prompt prompt = PromptFrom(0, 200);
  EXPECT_EQ(Held(prompt), 0);
  const auto writer = OpenWithPrompt(store_, "b", model(), prompt);
  EXPECT_EQ(writer->standing().received_tokens, 0);
}

TEST_P(PrefixTest, AWriterMayKnowMoreOfThePromptButNotAnother) {
  const auto writer = OpenWithPrompt(store_, "a", model(), PromptFrom(0, 32));
  AppendSpan(*writer, one_, {0, 48});
  EXPECT_EQ(Held(PromptFrom(0, 200)), 32);
  Prompt another = PromptFrom(0, 200);
  another.token_ids[20] = 7;
  EXPECT_THAT(Open(another, 1), Refuses(Reason::kPromptMismatch, HasSubstr("hash block 1")));
  ASSERT_THAT(Open(PromptFrom(0, 10), 1), IsOk());
  ASSERT_THAT(Open(PromptFrom(0, 200), 2), IsOk());
  EXPECT_EQ(Held(PromptFrom(0, 200)), 48);
}

// A prefix that was written twice is held until both are gone.
TEST_P(PrefixTest, WrittenTwiceIsHeldUntilBothAreGone) {
  const Prompt prompt = PromptFrom(0, 200);
  const auto a = OpenWithPrompt(store_, "a", model(), prompt);
  const auto b = OpenWithPrompt(store_, "b", model(), prompt);
  AppendSpan(*a, one_, {0, 200});
  AppendSpan(*b, one_, {0, 150});
  EXPECT_EQ(Held(prompt), 192);
  ASSERT_THAT(store_->Remove(Key("a")), IsOk());
  EXPECT_EQ(Held(prompt), 144);
  ASSERT_THAT(store_->Remove(Key("b")), IsOk());
  EXPECT_EQ(Held(prompt), 0);
  EXPECT_EQ(store_->memory().free, kMemory);
}

// A writer that is refused says nothing of the sequence's tokens.
TEST_P(PrefixTest, ARefusedWritersPromptIsNotTaken) {
  const auto writer = Open({}, 5);
  ASSERT_THAT(writer, IsOk());
  AppendSpan(**writer, one_, {0, 100});
  EXPECT_THAT(Open(PromptFrom(0, 100), 5), Refuses(Reason::kWriterExists, HasSubstr("epoch")));
  EXPECT_THAT(Open(PromptFrom(0, 100), 4), Refuses(Reason::kOldEpoch, HasSubstr("epoch")));
  EXPECT_EQ(Held(PromptFrom(0, 100)), 0);
}

// The bytes of a long prefix go without a call deeper for each page: a small stack is enough.
void* WriteShareAndRemoveALongPrefix(void*) {
  SeededRandom random;
  const ModelSpec spec = testing::UniformSpec({.layers = 1, .heads = 1, .dim = 8});
  TestStore store(std::int64_t{64} << 20);
  const Model& model = store.Register(testing::RequestOf(spec, "fp8", 16))->model();
  constexpr std::int64_t kLong = 200'000;
  const KvData data = kvtier::testing::MakeKvData(spec, kLong, random, 100.0f);
  const Prompt prompt = PromptFrom(0, kLong);
  {
    const auto writer = OpenWithPrompt(store, "a", model, prompt);
    AppendSpan(*writer, data, {0, kLong});
    const auto other = OpenWithPrompt(store, "b", model, prompt);
    EXPECT_EQ(other->standing().received_tokens, kLong);
  }
  const Grant lease = store->Acquire("default", model.id, prompt, {}).value();
  EXPECT_EQ(lease.tokens, kLong);
  EXPECT_THAT(store->Remove(Key("a")), IsOk());
  EXPECT_THAT(store->Remove(Key("b")), IsOk());
  store->Release("default", lease.id);
  EXPECT_EQ(store->memory().free, store->budget());
  return nullptr;
}

TEST(Prefix, OfVeryManyPagesGoesWithoutARecursion) {
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, 512 << 10), 0);
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, &attributes, WriteShareAndRemoveALongPrefix, nullptr), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

INSTANTIATE_TEST_SUITE_P(Formats, PrefixTest,
                         ::testing::Values("auto", "fp8", "int8_per_token_head", "kivi2",
                                           "kivi(4,4,16,0)", "kivi(2,4,32,96)",
                                           "fp8_e4m3(scale=page)", "kivi4(k_rotation=hadamard)"),
                         [](const auto& test) { return testing::TestNameOf(test.param); });

}  // namespace
}  // namespace kvtier::cachestore
