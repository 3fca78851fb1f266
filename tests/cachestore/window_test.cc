// Models whose sliding-window layers keep what their window sees (retention=window), beside the
// same model that keeps all.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cachestore/model/plan.h"
#include "tests/cachestore/shared_sequence.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::KvData;
using kvtier::testing::Refuses;
using ::testing::AllOf;
using testing::AppendSpan;
using testing::Diverge;
using ::testing::HasSubstr;
using testing::Key;
using testing::kPage;
using testing::kSpace;
using testing::Message;
using testing::PromptFrom;
using testing::TestStore;

constexpr std::int64_t kMemory = 8 << 20;
constexpr std::int64_t kTokens = 900;
constexpr int kWindow = 150;
constexpr int kNarrow = 20;

ModelSpec ThreeLayers() {
  ModelSpec spec = testing::UniformSpec({.layers = 3, .heads = 2, .dim = 32});
  for (const int layer : {1, 2}) spec.layers[layer].kind = LayerKind::kSlidingWindow;
  spec.layers[1].window = kWindow;
  spec.layers[2].window = kNarrow;
  return spec;
}

ModelRequest Request(const std::string& format, Retention retention,
                     const ModelSpec& spec = ThreeLayers()) {
  ModelRequest request = testing::RequestOf(spec, format, kPage);
  request.policy.retention = retention;
  return request;
}

TEST(Window, RetentionIsPartOfTheModelIdWhereALayerHasAWindow) {
  const auto id = [](Retention retention, const ModelSpec& spec) {
    return ResolveModel(Request("auto", retention, spec), kPage).value()->id;
  };
  EXPECT_NE(id(Retention::kAll, ThreeLayers()), id(Retention::kWindow, ThreeLayers()));
  const ModelSpec full = testing::UniformSpec({});
  EXPECT_EQ(id(Retention::kAll, full), id(Retention::kWindow, full));
  EXPECT_EQ(FirstDifference(Request("auto", Retention::kAll), Request("auto", Retention::kWindow)),
            "policy.retention");
}

class WindowTest : public ::testing::TestWithParam<const char*> {
 protected:
  WindowTest()
      : store_(kMemory),
        all_store_(kMemory),
        entry_(store_.Register(Request(GetParam(), Retention::kWindow))),
        all_(all_store_.Register(Request(GetParam(), Retention::kAll))) {
    const float largest = testing::LargestFor(GetParam(), ThreeLayers());
    one_ = kvtier::testing::MakeKvData(ThreeLayers(), kTokens, random_, largest);
    other_ = kvtier::testing::MakeKvData(ThreeLayers(), kTokens, random_, largest);
  }

  const Model& model() const { return entry_->model(); }

  void AppendTo(const std::string& id, const KvData& data, const Prompt& prompt,
                std::int64_t tokens) {
    const auto writer = testing::OpenWithPrompt(store_, id, model(), prompt);
    for (std::int64_t at = writer->standing().received_tokens; at < tokens;) {
      const std::int64_t count = std::min(tokens - at, random_.Between(1, 200));
      AppendSpan(*writer, data, {at, count});
      at += count;
    }
  }
  void Append(const std::string& id, std::int64_t tokens) {
    AppendTo(id, one_, PromptFrom(0, tokens), tokens);
  }

  std::int64_t Hit(const Prompt& prompt) {
    return store_->Lookup(kSpace, model().id, {prompt}).value()[0];
  }
  std::int64_t Bytes(const std::string& id) { return store_->Describe(Key(id))->held.allocated; }

  static std::vector<std::byte> Values(SequenceReader& reader, std::size_t layer,
                                       std::int64_t first) {
    const LayerOutput& out = reader.layers()[layer];
    const std::int64_t tokens = out.first_token + out.tokens - first;
    const auto k_bytes = static_cast<std::size_t>(tokens * out.k_bytes_per_token());
    std::vector<std::byte> values(k_bytes +
                                  static_cast<std::size_t>(tokens * out.v_bytes_per_token()));
    EXPECT_THAT(reader.Fill(layer, first, tokens, values.data(), values.data() + k_bytes), IsOk());
    return values;
  }
  // That what a read within windows has of `data` is what a store that keeps all has of it, up to
  // the same token. `length`: of the sequence; with KIVI it says what is codes.
  void ExpectSame(SequenceReader reader, const KvData& data, std::int64_t length) {
    all_store_.AppendAtOnce("all", all_->model(), data, length);
    const std::int64_t end = reader.pins().first_token + reader.pins().tokens;
    SequenceReader all = all_store_.Read("all", {}, {.tokens = end});
    for (std::size_t layer = 0; layer < 3; ++layer) {
      const LayerOutput& out = reader.layers()[layer];
      const int window = model().layers[layer].spec.window;
      EXPECT_EQ(out.first_token, window == 0 ? 0 : std::max<std::int64_t>(0, end - window));
      EXPECT_EQ(out.first_token + out.tokens, end);
      EXPECT_EQ(Values(reader, layer, out.first_token), Values(all, layer, out.first_token));
    }
    EXPECT_THAT(all_store_->Remove(Key("all")), IsOk());
  }

  kvtier::testing::SeededRandom random_;
  TestStore store_, all_store_;
  std::shared_ptr<ModelEntry> entry_, all_;
  KvData one_, other_;
};

TEST_P(WindowTest, HoldsWhatIsPlannedToTheByte) {
  for (int i = 0; i < 10; ++i) {
    const std::int64_t tokens = random_.Between(1, kTokens);
    SCOPED_TRACE(tokens);
    Append("a", tokens);
    const MemoryHeld plan = PlanSequence(model(), tokens);
    EXPECT_EQ(store_->Describe(Key("a"))->held, plan);
    EXPECT_EQ(store_->memory().use, plan.use);
    EXPECT_EQ(store_->memory().free, kMemory - plan.allocated);
    EXPECT_LE(plan.allocated, PlanMostAllocated(model(), tokens));
    ASSERT_THAT(store_->Seal(Key("a"), tokens), IsOk());
    EXPECT_EQ(store_->Describe(Key("a"))->held, PlanSealed(model(), tokens));
    ASSERT_THAT(store_->Remove(Key("a")), IsOk());
    EXPECT_EQ(store_->memory().free, kMemory);
    EXPECT_EQ(entry_->totals().behind_windows_bytes, 0);
  }
  EXPECT_LT(PlanSequence(model(), kTokens).allocated,
            PlanSequence(all_->model(), kTokens).allocated);
}

TEST_P(WindowTest, AsManyTokensFitOneByOneAsArePlanned) {
  const std::int64_t least = OnePageOfEveryLayer(model());
  const std::int64_t most = PlanMostAllocated(model(), kTokens - 64);
  const std::int64_t budget = AlignUp(random_.Between(least, most));
  const std::int64_t fit = TokensThatFit(model(), budget);
  TestStore small(budget);
  const Model& own = small.Register(Request(GetParam(), Retention::kWindow))->model();
  const auto writer = small.OpenWriter("a", own);
  for (std::int64_t token = 0; token < fit; ++token) AppendSpan(*writer, one_, {token, 1});
  absl::Status status;
  for (std::int64_t token = fit; status.ok() && token < fit + 64; ++token) {
    Message message(one_, writer->shard(), {}, {0, 1, 2}, {token, 1});
    status = writer->Append(message.chunk()).status();
  }
  EXPECT_THAT(status, Refuses(Reason::kBudget, HasSubstr(std::to_string(budget)))) << fit;
}

TEST_P(WindowTest, TheRightTokensAreKeptAtTheWindowsEdges) {
  std::vector<std::int64_t> lengths = {1, 10, kTokens};
  for (const std::int64_t edge : {kNarrow, kWindow, 256 + kWindow, 256 + kWindow + 16})
    lengths.insert(lengths.end(), {edge - 1, edge, edge + 1});
  for (const std::int64_t tokens : lengths) {
    SCOPED_TRACE(tokens);
    Append("a", tokens);
    ExpectSame(store_.Read("a", {}, {.within_windows = true}), one_, tokens);
    ASSERT_THAT(store_->Remove(Key("a")), IsOk());
  }
}

TEST_P(WindowTest, WhatWentIsNotFoundByLayerAndRange) {
  Append("a", kTokens);
  const auto read = [&](const ReadRange& range) {
    return store_->OpenReader(Key("a"), "", range, {}).status();
  };
  const std::int64_t pages = testing::SharablePages(model(), kTokens);
  const std::int64_t kept = model().windows[0].FirstKeptPage(kTokens, pages, kPage) * kPage;
  EXPECT_THAT(read({.first_token = 70}),
              Refuses(Reason::kBehindWindow,
                      AllOf(HasSubstr("tokens before " + std::to_string(kept) + " of layer 1"),
                            HasSubstr("its window is 150"), HasSubstr("set within_windows"))));
  EXPECT_THAT(read({.tokens = 100, .within_windows = true}),
              Refuses(Reason::kBehindWindow,
                      HasSubstr("read up to token " + std::to_string(kept + kWindow))));
  EXPECT_THAT(read({.shard = {.first_layer = 2}}),
              Refuses(Reason::kBehindWindow, HasSubstr("layer 2")));
  EXPECT_THAT(read({.shard = {.first_layer = 0, .num_layers = 1}}), IsOk());
  EXPECT_THAT(read({.shard = {.first_layer = 1, .num_layers = 1}, .first_token = kept}), IsOk());
  // Whole blocks of the reader's, of a read as stored whole pages.
  SequenceReader blocks = store_.Read("a", {.block_tokens = 48}, {.within_windows = true});
  EXPECT_EQ(blocks.layers()[1].first_token, (kTokens - kWindow) / 48 * 48);
  SequenceReader stored = store_.Read("a", {.stored = true}, {.within_windows = true});
  EXPECT_EQ(stored.layers()[1].first_token, (kTokens - kWindow) / kPage * kPage);
}

TEST_P(WindowTest, HitsOnlyWhereTheWindowsAreKept) {
  Append("a", kTokens);
  EXPECT_EQ(Hit(PromptFrom(0, kTokens)), kTokens / 16 * 16);
  EXPECT_EQ(Hit(PromptFrom(0, kTokens - 16)), (kTokens - 16) / 16 * 16)
      << "who asks again computes the last token anew";
  EXPECT_EQ(Hit(PromptFrom(0, 400)), 0);
  // Who begins alike, and ends where nothing is kept, brings all of it, and then it is there.
  const Prompt shorter = PromptFrom(0, 400);
  AppendTo("b", one_, shorter, 400);
  EXPECT_EQ(store_->Describe(Key("b"))->held, PlanSequence(model(), 400));
  EXPECT_EQ(Hit(shorter), 400);
  Prompt parts = PromptFrom(0, 800);
  std::iota(parts.token_ids.begin() + 400, parts.token_ids.end(), 5000u);
  const auto writer = testing::OpenWithPrompt(store_, "c", model(), parts);
  EXPECT_EQ(writer->standing().received_tokens, testing::SharablePages(model(), 400) * kPage);
}

TEST_P(WindowTest, ALeaseKeepsItsWindowWhileTheSequenceMovesOn) {
  const Prompt prompt = PromptFrom(0, kTokens);
  AppendTo("a", one_, prompt, 420);
  const Grant lease = store_->Acquire(Key("a"), absl::Minutes(1)).value();
  const Grant prefix = store_->Acquire(kSpace, model().id, PromptFrom(0, 200), {}).value();
  EXPECT_EQ(prefix.id, 0u) << "that far back nothing is kept";
  AppendTo("a", one_, prompt, kTokens);
  EXPECT_GT(Bytes("a"), PlanSequence(model(), kTokens).allocated);
  auto reader = store_->OpenReader(kSpace, lease.id, "", {.within_windows = true}, {});
  ASSERT_THAT(reader.status(), IsOk());
  EXPECT_EQ(reader->pins().tokens, 420);
  // What was to become codes has by now.
  ExpectSame(*std::move(reader), one_, kTokens);
  store_->Release(kSpace, lease.id);
  EXPECT_EQ(store_->Describe(Key("a"))->held, PlanSequence(model(), kTokens));
}

TEST_P(WindowTest, APinOfAPromptKeepsItHit) {
  const Prompt prompt = PromptFrom(0, kTokens);
  AppendTo("a", one_, prompt, 420);
  const Prompt asked = PromptFrom(0, 420);
  const Grant pin = store_->AddPin(kSpace, model().id, asked, {PinKind::kHard, {}}).value();
  EXPECT_EQ(pin.tokens, 416);
  AppendTo("a", one_, prompt, kTokens);
  EXPECT_EQ(Hit(asked), 416);
  store_->Unpin(kSpace, pin.id);
  EXPECT_EQ(Hit(asked), 0);
  EXPECT_EQ(store_->Describe(Key("a"))->held, PlanSequence(model(), kTokens));
}

TEST_P(WindowTest, AForkGoesOnWhereTheWindowsAre) {
  Append("a", 420);
  ASSERT_EQ(store_->Fork(Key("a"), "b", -1).value(), 420);
  Append("a", kTokens);
  EXPECT_THAT(store_->Fork(Key("a"), "c", 128),
              Refuses(Reason::kBehindWindow, AllOf(HasSubstr("tokens is 128"), HasSubstr("900"),
                                                   HasSubstr("want 0, or"))));
  EXPECT_EQ(store_->Fork(Key("a"), "c", 10).value(), 0);
  // The fork's window stays though its source's moved on, and the other way.
  ExpectSame(store_.Read("b", {}, {.within_windows = true}), one_, 420);
  const KvData both = Diverge(one_, other_, 420);
  AppendTo("b", both, {}, kTokens);
  ExpectSame(store_.Read("b", {}, {.within_windows = true}), both, kTokens);
  ExpectSame(store_.Read("a", {}, {.within_windows = true}), one_, kTokens);
  for (const char* id : {"a", "b", "c"}) EXPECT_THAT(store_->Remove(Key(id)), IsOk());
  EXPECT_EQ(store_->memory().free, kMemory);
}

TEST_P(WindowTest, ATruncateReachesBackAsFarAsTheWindowsDo) {
  Append("a", kTokens);
  // No rejected speculation cuts a group of KIVI's.
  const std::int64_t cut = kTokens / 32 * 32;
  ASSERT_THAT(store_->Truncate(Key("a"), cut, 1), IsOk());
  EXPECT_THAT(store_->Truncate(Key("a"), 320, 1),
              Refuses(Reason::kTruncateTooShort,
                      AllOf(HasSubstr("tokens is 320"), HasSubstr(std::to_string(cut)))));
  EXPECT_EQ(store_->Describe(Key("a"))->committed_tokens, cut);
  WriterRequest request;
  request.key = Key("a");
  request.model_id = model().id;
  request.epoch = 2;
  const auto writer = store_->OpenWriter(std::move(request)).value();
  const KvData both = Diverge(one_, other_, cut);
  AppendSpan(*writer, both, {cut, kTokens - cut});
  SequenceReader reader = store_.Read("a", {}, {.within_windows = true});
  EXPECT_EQ(reader.pins().tokens, kTokens);
  ASSERT_THAT(store_->Truncate(Key("a"), 0, 2), IsOk());
  EXPECT_EQ(store_->Describe(Key("a"))->held.use.total(), 0);
}

TEST_P(WindowTest, WhoFollowsMissesNothing) {
  const auto writer = testing::OpenWithPrompt(store_, "a", model(), {});
  auto follower = store_->Follow({Key("a"), "", [] {}}, {}, {}).value();
  AppendSpan(*writer, one_, {0, 500});
  AppendSpan(*writer, one_, {500, kTokens - 500});
  ASSERT_THAT(store_->Seal(Key("a"), kTokens), IsOk());
  std::vector<std::int64_t> given(3, 0);
  for (;;) {
    auto piece = follower.Next(10'000);
    ASSERT_THAT(piece.status(), IsOk());
    if (!piece->has_value()) break;
    given[static_cast<std::size_t>((*piece)->layers()[0].layer)] += (*piece)->pins().tokens;
  }
  EXPECT_TRUE(follower.done());
  EXPECT_THAT(given, ::testing::Each(kTokens));
  { const SequenceFollower over = std::move(follower); }
  EXPECT_EQ(store_->Describe(Key("a"))->held, PlanSealed(model(), kTokens));
}

// Once its last page was evicted a sequence's window is not whole any more: nothing hits, nothing
// that is not there is read.
TEST_P(WindowTest, WhatEvictionLeavesOfASequenceDoesNotHit) {
  TestStore small(AlignUp(PlanSealed(model(), kTokens).allocated * 9 / 8));
  small.Register(Request(GetParam(), Retention::kWindow));
  const Prompt prompt = PromptFrom(0, kTokens);
  {
    const auto writer = testing::OpenWithPrompt(small, "a", model(), prompt);
    for (std::int64_t at = 0; at < kTokens; at += 30) AppendSpan(*writer, one_, {at, 30});
  }
  ASSERT_THAT(small->Seal(Key("a"), kTokens), IsOk());
  const auto left = [&] { return small->Describe(Key("a"))->committed_tokens; };
  const auto writer = testing::OpenWithPrompt(small, "b", model(), PromptFrom(7000, kTokens));
  for (std::int64_t at = 0; at < kTokens && left() > 512; at += 30)
    AppendSpan(*writer, other_, {at, 30});
  ASSERT_THAT(left(), AllOf(::testing::Gt(0), ::testing::Le(512)));
  EXPECT_EQ(small->Lookup(kSpace, model().id, {prompt}).value()[0], 0);
  EXPECT_THAT(small->OpenReader(Key("a"), "", {.tokens = left()}, {}).status(),
              Refuses(Reason::kEvicted, HasSubstr("append it anew")));
  EXPECT_THAT(small->Fork(Key("a"), "c", -1).status(),
              Refuses(Reason::kEvicted, HasSubstr("append it anew")));
}

INSTANTIATE_TEST_SUITE_P(Formats, WindowTest,
                         ::testing::Values("auto", "int8_per_token_head", "kivi2",
                                           "fp8(scale=page)"),
                         [](const auto& instance) { return testing::TestNameOf(instance.param); });

}  // namespace
}  // namespace kvtier::cachestore
