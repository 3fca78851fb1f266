// Truncate: what is left reads as before, and what follows is as if the rest had never been.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/cachestore/shared_sequence.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::KvData;
using kvtier::testing::Refuses;
using testing::AppendSpan;
using testing::Diverge;
using testing::ExpectReads;
using ::testing::HasSubstr;
using testing::kAsFp32;
using testing::Key;
using testing::kSpace;
using testing::OpenWithPrompt;
using testing::PromptFrom;

constexpr std::int64_t kMemory = 8 << 20;
constexpr std::int64_t kTokens = 400;

class TruncateTest : public testing::TwoTextsTest {
 protected:
  TruncateTest() : TwoTextsTest(TwoLayers(), {.memory = kMemory}, kTokens) {}

  // Every K and V of the first tokens, one after the other.
  std::vector<std::byte> Bytes(absl::StatusOr<SequenceReader> reader) {
    std::vector<std::byte> all;
    EXPECT_THAT(reader, IsOk());
    if (!reader.ok()) return all;
    for (std::size_t layer = 0; layer < reader->layers().size(); ++layer) {
      const LayerOutput& out = reader->layers()[layer];
      const std::int64_t tokens = reader->pins().tokens;
      std::vector<std::byte> k(static_cast<std::size_t>(tokens * out.k_bytes_per_token())),
          v(static_cast<std::size_t>(tokens * out.v_bytes_per_token()));
      if (tokens > 0) {
        EXPECT_THAT(reader->Fill(layer, 0, tokens, k.data(), v.data()), IsOk());
      }
      all.insert(all.end(), k.begin(), k.end());
      all.insert(all.end(), v.begin(), v.end());
    }
    return all;
  }
  std::vector<std::byte> Read(const std::string& id, std::int64_t tokens) {
    return Bytes(store_->OpenReader(Key(id), "", {.tokens = tokens}, kAsFp32));
  }
  // The next length from `token` down that cuts no group.
  std::int64_t Allowed(std::int64_t token, std::int64_t length) const {
    const auto cuts = [&](const TensorModel& tensor) {
      return token < tensor.residual.CodeTokens(length) && token % tensor.layout.unit_tokens != 0;
    };
    while (cuts(model().layers[0].k) || cuts(model().layers[0].v)) --token;
    return token;
  }
};

TEST_P(TruncateTest, WhatIsLeftStaysAndWhatFollowsIsAsIfTheRestHadNeverBeen) {
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const std::int64_t before = random_.Between(1, 300);
    const std::int64_t cut = Allowed(random_.Between(0, before), before);
    const std::int64_t after = random_.Between(before, kTokens);
    SCOPED_TRACE(std::to_string(before) + " tokens, cut to " + std::to_string(cut) + ", then " +
                 std::to_string(after));
    auto writer = OpenWithPrompt(store_, "a", model(), PromptFrom(0, before));
    AppendSpan(*writer, one_, {0, before});
    const std::vector<std::byte> left = Read("a", cut);
    ASSERT_THAT(store_->Truncate(Key("a"), cut, 0), IsOk());
    EXPECT_EQ(store_->Describe(Key("a"))->committed_tokens, cut);
    EXPECT_EQ(Read("a", -1), left);
    EXPECT_EQ(store_->Lookup(kSpace, model().id, {PromptFrom(0, before)}).value()[0],
              cut / 16 * 16);
    writer = OpenWithPrompt(store_, "a", model(), {});
    EXPECT_EQ(writer->standing().received_tokens, cut);
    const KvData data = Diverge(one_, other_, cut);
    const std::int64_t middle = random_.Between(cut, after);
    AppendSpan(*writer, data, {cut, middle - cut});
    AppendSpan(*writer, data, {middle, after - middle});
    ExpectReads(store_, "a", model(), data, after, 0, random_);
    EXPECT_EQ(store_->Describe(Key("a"))->held, PlanSequence(model(), after));
    ASSERT_THAT(store_->Remove(Key("a")), IsOk());
    ASSERT_EQ(store_->memory().free, kMemory);
  }
  EXPECT_EQ(entry_->totals().tokens_held, 0);
}

// Again and again, as speculative decoding does.
TEST_P(TruncateTest, ManyShortOnes) {
  KvData data = one_;
  std::int64_t length = 0;
  while (length < kTokens - 8) {
    const auto writer = OpenWithPrompt(store_, "a", model(), {});
    const std::int64_t drafted = random_.Between(1, 8);
    data = Diverge(data, random_.OneIn(2) ? one_ : other_, length);
    AppendSpan(*writer, data, {length, drafted});
    const std::int64_t kept = Allowed(length + random_.Between(1, drafted), length + drafted);
    ASSERT_THAT(store_->Truncate(Key("a"), kept, 0), IsOk());
    length = kept;
  }
  const auto writer = OpenWithPrompt(store_, "a", model(), {});
  AppendSpan(*writer, data, {length, kTokens - length});
  ExpectReads(store_, "a", model(), data, kTokens, 0, random_);
}

TEST_P(TruncateTest, ALeaseKeepsWhatItWas) {
  const auto writer = OpenWithPrompt(store_, "a", model(), PromptFrom(0, 300));
  AppendSpan(*writer, one_, {0, 290});
  const Grant lease = store_->Acquire(Key("a"), absl::Seconds(10)).value();
  const std::vector<std::byte> leased =
      Bytes(store_->OpenReader(kSpace, lease.id, "", {}, kAsFp32));
  const std::int64_t cut = Allowed(130, 290);
  const std::vector<std::byte> left = Read("a", cut);
  auto running = store_->OpenReader(kSpace, lease.id, "", {}, kAsFp32);
  ASSERT_THAT(store_->Truncate(Key("a"), cut, 0), IsOk());
  EXPECT_EQ(Read("a", -1), left);
  const auto again = OpenWithPrompt(store_, "a", model(), {});
  const KvData data = Diverge(one_, other_, cut);
  AppendSpan(*again, data, {cut, 300 - cut});
  EXPECT_EQ(Bytes(std::move(running)), leased);
  EXPECT_EQ(Bytes(store_->OpenReader(kSpace, lease.id, "", {}, kAsFp32)), leased);
  ExpectReads(store_, "a", model(), data, 300, 0, random_);
  store_->Release(kSpace, lease.id);
  ASSERT_THAT(store_->Remove(Key("a")), IsOk());
  EXPECT_EQ(store_->memory().free, kMemory);
  EXPECT_EQ(entry_->totals().sequences(), 0);
}

// Others that share what is cut keep it.
TEST_P(TruncateTest, IntoSharedPages) {
  const auto a = OpenWithPrompt(store_, "a", model(), PromptFrom(0, 300));
  AppendSpan(*a, one_, {0, 300});
  const auto b = OpenWithPrompt(store_, "b", model(), PromptFrom(0, 300));
  const std::int64_t origin = b->standing().received_tokens;
  ASSERT_GT(origin, 0);
  AppendSpan(*b, one_, {origin, 300 - origin});
  const std::int64_t cut = Allowed(origin - 30, 300);
  const std::vector<std::byte> of_b = Read("b", cut), of_a = Read("a", 300);
  ASSERT_THAT(store_->Truncate(Key("b"), cut, 0), IsOk());
  EXPECT_EQ(Read("b", -1), of_b);
  EXPECT_EQ(Read("a", 300), of_a);
  const auto again = OpenWithPrompt(store_, "b", model(), {});
  AppendSpan(*again, other_, {cut, 350 - cut});
  EXPECT_EQ(Read("b", cut), of_b);
  EXPECT_EQ(Read("a", 300), of_a);
}

TEST_P(TruncateTest, LayersThatStandApart) {
  const auto writer = OpenWithPrompt(store_, "a", model(), PromptFrom(0, 300));
  testing::Message first(one_, writer->shard(), {}, {0}, {0, 300});
  ASSERT_THAT(writer->Append(first.chunk()), IsOk());
  testing::Message second(one_, writer->shard(), {}, {1}, {0, 200});
  ASSERT_THAT(writer->Append(second.chunk()), IsOk());
  EXPECT_THAT(store_->Truncate(Key("a"), 201, 0),
              Refuses(Reason::kPastCommitted, HasSubstr("200")));
  const std::int64_t cut = std::min(Allowed(150, 300), Allowed(150, 200));
  const std::vector<std::byte> left = Read("a", cut);
  ASSERT_THAT(store_->Truncate(Key("a"), cut, 0), IsOk());
  EXPECT_EQ(Read("a", -1), left);
  const auto again = OpenWithPrompt(store_, "a", model(), {});
  EXPECT_EQ(again->standing().received_tokens, cut);
  const KvData data = Diverge(one_, other_, cut);
  AppendSpan(*again, data, {cut, kTokens - cut});
  ExpectReads(store_, "a", model(), data, kTokens, 0, random_);
}

TEST_P(TruncateTest, EndsWritersOfTheSameOrALowerEpoch) {
  WriterRequest request;
  request.key = Key("a");
  request.model_id = model().id;
  request.epoch = 3;
  absl::Status ended;
  request.on_end = [&](const absl::Status& why) { ended = why; };
  const auto writer = store_->OpenWriter(std::move(request)).value();
  AppendSpan(*writer, one_, {0, 64});
  EXPECT_THAT(store_->Truncate(Key("a"), 0, 2), Refuses(Reason::kOldEpoch, HasSubstr("epoch 3")));
  EXPECT_THAT(ended, IsOk());
  EXPECT_EQ(store_->Describe(Key("a"))->committed_tokens, 64);
  ASSERT_THAT(store_->Truncate(Key("a"), 0, 4), IsOk());
  EXPECT_THAT(ended, Refuses(Reason::kOldEpoch, HasSubstr("truncated by a writer of epoch 4")));
  testing::Message message(one_, writer->shard(), {}, {0, 1}, {0, 1});
  EXPECT_THAT(writer->Append(message.chunk()), Refuses(Reason::kOldEpoch, HasSubstr("truncated")));
  ASSERT_THAT(store_->OpenWriter({.key = Key("a"), .model_id = model().id, .epoch = 3}),
              Refuses(Reason::kOldEpoch, HasSubstr("4")));
  EXPECT_EQ(store_->memory().use.codes, 0);
}

TEST_P(TruncateTest, RefusesWhatItCannotDo) {
  EXPECT_THAT(store_->Truncate(Key("a"), 0, 0), Refuses(Reason::kUnknownSequence, HasSubstr("a")));
  const auto writer = OpenWithPrompt(store_, "a", model(), {});
  AppendSpan(*writer, one_, {0, 300});
  EXPECT_THAT(store_->Truncate(Key("a"), 301, 0),
              Refuses(Reason::kPastCommitted, HasSubstr("300")));
  const int unit = model().layers[0].k.layout.unit_tokens;
  if (unit > 1) {
    EXPECT_THAT(store_->Truncate(Key("a"), 65, 0),
                Refuses(Reason::kGroupBound, HasSubstr("64 and " + std::to_string(64 + unit))));
  }
  EXPECT_EQ(store_->Describe(Key("a"))->committed_tokens, 300);
  ASSERT_THAT(store_->Seal(Key("a"), 300), IsOk());
  EXPECT_THAT(store_->Truncate(Key("a"), 64, 0), Refuses(Reason::kSealed, HasSubstr("fork")));
}

INSTANTIATE_TEST_SUITE_P(Formats, TruncateTest,
                         ::testing::Values("auto", "fp8", "kivi2", "kivi(4,4,32,64)",
                                           "kivi(2,2,32,0)", "int8_per_token_head",
                                           "fp8(scale=page)"),
                         [](const auto& test) { return testing::TestNameOf(test.param); });

}  // namespace
}  // namespace kvtier::cachestore
