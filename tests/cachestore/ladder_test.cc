// What pressure does where a namespace takes the ladder: pages that nobody uses are stored in fewer
// bits, all of them one step before one takes the next, and only then do tokens go.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cachestore/model/rungs.h"
#include "tests/cachestore/shared_sequence.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::KvData;
using kvtier::testing::Refuses;
using testing::AppendSpan;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Key;
using testing::OpenWithPrompt;
using testing::PromptFrom;
using testing::RequestOf;
using testing::TestStore;
using testing::UniformSpec;

constexpr char kSpace[] = "default";
constexpr int kPage = 128;
constexpr std::int64_t kPages = 3;
constexpr std::int64_t kTokens = kPages * kPage;
constexpr std::int64_t kMemory = 4 << 20;

ModelSpec Spec(ElementType source = ElementType::kBf16) {
  ModelSpec spec = UniformSpec({.layers = 2, .heads = 2, .dim = 64});
  spec.source = source;
  return spec;
}

using Rows = std::vector<float>;

class LadderTest : public ::testing::Test {
 protected:
  LadderTest() : store_(kMemory), entry_(store_.Register(RequestOf(Spec(), "auto", kPage))) {
    data_ = kvtier::testing::MakeKvData(Spec(), kTokens, random_, 10.0f);
    EXPECT_THAT(store_->SetPressure(kSpace, Pressure::kLadder), IsOk());
  }

  void Write(const std::string& id) {
    const auto writer = store_.OpenWriter(id, entry_->model());
    AppendSpan(*writer, data_, {0, kTokens});
  }
  void WriteSealed(const std::string& id) {
    Write(id);
    ASSERT_THAT(store_->Seal(Key(id), kTokens), IsOk());
    store_.clock.Advance(absl::Seconds(1));
  }
  std::int64_t Held() { return store_->GetQuota(kSpace).held; }
  // Takes away a byte, so that one column has to take one step.
  void Press() { ASSERT_THAT(store_->SetQuota(kSpace, Held() - 1), IsOk()); }
  std::vector<std::int64_t> Lowered(const std::string& id) {
    return store_->Describe(Key(id)).value().lowered_pages;
  }
  std::int64_t Tokens(const std::string& id) {
    return store_->Describe(Key(id)).value().committed_tokens;
  }
  std::int64_t Evictions() {
    std::int64_t evictions = 0;
    for (const EvictionCount& count : store_->evictions()) evictions += count.evictions;
    return evictions;
  }

  // All K and V of a sequence, head by head.
  static Rows ReadAll(TestStore& store, const std::string& id) {
    SequenceReader reader = Open(store, id);
    return Drain(reader);
  }
  static SequenceReader Open(TestStore& store, const std::string& id) {
    return store.Read(id, {.as = ElementType::kFp32, .layout = TokenLayout::kHnd},
                      {.first_token = 0, .tokens = kTokens});
  }
  static Rows Drain(SequenceReader& reader) {
    Rows all;
    for (std::size_t layer = 0; layer < reader.layers().size(); ++layer) {
      const LayerOutput& out = reader.layers()[layer];
      const std::int64_t tokens = reader.pins().tokens;
      Rows k(static_cast<std::size_t>(out.heads * tokens * out.k_dim)), v(k.size());
      EXPECT_THAT(reader.Fill(layer, 0, tokens, reinterpret_cast<std::byte*>(k.data()),
                              reinterpret_cast<std::byte*>(v.data())),
                  IsOk());
      all.insert(all.end(), k.begin(), k.end());
      all.insert(all.end(), v.begin(), v.end());
    }
    return all;
  }
  // What a store of that format gives back of these rows, when they were appended to it.
  Rows StoredAs(const std::string& format, const Rows& rows) {
    TestStore store(kMemory);
    const ModelSpec spec = Spec(ElementType::kFp32);
    const auto entry = store.Register(RequestOf(spec, format, kPage));
    // More tokens behind them, so that none of them is left in the residual.
    KvData data = kvtier::testing::MakeKvData(spec, kTokens + 256, random_, 1.0f);
    const auto* from = reinterpret_cast<const std::byte*>(rows.data());
    for (KvData::Layer& layer : data.layers) {
      for (auto* tensor : {&layer.k, &layer.v}) {
        const std::int64_t bytes = kTokens * tensor->row_bytes();
        for (int head = 0; head < tensor->heads; ++head, from += bytes)
          std::memcpy(tensor->Row(head, 0), from, static_cast<std::size_t>(bytes));
      }
    }
    AppendSpan(*store.OpenWriter("a", entry->model()), data, {0, data.tokens});
    return ReadAll(store, "a");
  }

  kvtier::testing::SeededRandom random_;
  TestStore store_;
  std::shared_ptr<ModelEntry> entry_;
  KvData data_;
};

TEST_F(LadderTest, EachRungIsSmallerThanTheOneBefore) {
  std::vector<std::string> formats;
  for (const auto& rung : entry_->rungs()) formats.push_back(rung->format);
  EXPECT_THAT(formats, ElementsAre("fp8_e4m3(scale=page)", "k4v2", "kivi2"));
  const auto eight = store_.Register(RequestOf(Spec(), "int8_per_token_head", kPage));
  std::int64_t bytes = ColumnBytes(eight->model());
  for (const auto& rung : eight->rungs()) {
    EXPECT_LT(ColumnBytes(*rung), bytes);
    bytes = ColumnBytes(*rung);
  }
  const auto two = store_.Register(RequestOf(Spec(), "kivi2", kPage));
  EXPECT_TRUE(two->rungs().empty());
  // Codes as they came stay as they came.
  const auto kept = store_.Register(RequestOf(Spec(ElementType::kQ8), "auto", kPage));
  EXPECT_TRUE(kept->rungs().empty());
}

TEST_F(LadderTest, AllTakeAStepBeforeOneTakesTheNextTheColdestFirst) {
  WriteSealed("cold");
  WriteSealed("warm");
  ASSERT_EQ(store_.Read("cold").pins().tokens, kTokens);  // now it is the warmer one
  for (int i = 0; i < 3; ++i) Press();
  EXPECT_THAT(Lowered("warm"), ElementsAre(3, 0, 0));
  EXPECT_THAT(Lowered("cold"), ElementsAre(0, 0, 0));
  for (int i = 0; i < 4; ++i) Press();
  EXPECT_THAT(Lowered("warm"), ElementsAre(2, 1, 0));
  EXPECT_THAT(Lowered("cold"), ElementsAre(3, 0, 0));
  for (int i = 0; i < 11; ++i) Press();
  EXPECT_THAT(Lowered("warm"), ElementsAre(0, 0, 3));
  EXPECT_THAT(Lowered("cold"), ElementsAre(0, 0, 3));
  EXPECT_EQ(Evictions(), 0);
  EXPECT_THAT(store_->lowered(), ElementsAre(std::pair("fp8_e4m3(scale=page)", 6),
                                             std::pair("k4v2", 6), std::pair("kivi2", 6)));
  EXPECT_EQ(Tokens("warm"), kTokens);
  Press();
  EXPECT_GT(Evictions(), 0) << "nothing is left to lower";
}

// What is read after a step is what that format would have stored of what was read before it.
TEST_F(LadderTest, ValuesAreThoseOfTheFormatsOneAfterTheOther) {
  WriteSealed("a");
  Rows rows = ReadAll(store_, "a");
  for (const auto& rung : entry_->rungs()) {
    const std::int64_t held = Held();
    for (std::int64_t page = 0; page < kPages; ++page) Press();
    EXPECT_LT(Held(), held);
    const Rows want = StoredAs(rung->format, rows);
    EXPECT_NE(want, rows) << "the rung changes nothing";
    rows = ReadAll(store_, "a");
    EXPECT_EQ(rows, want) << rung->format;
  }
}

TEST_F(LadderTest, WhatIsInUseStaysAsItIs) {
  Write("open");
  WriteSealed("leased");
  WriteSealed("pinned");
  WriteSealed("softly");
  ASSERT_THAT(store_->Acquire(Key("leased"), absl::Seconds(30)), IsOk());
  ASSERT_THAT(store_->AddPin(Key("pinned"), {PinKind::kHard, absl::Minutes(1)}), IsOk());
  ASSERT_THAT(store_->AddPin(Key("softly"), {PinKind::kSoft, absl::Minutes(1)}), IsOk());
  WriteSealed("free");
  ASSERT_THAT(store_->SetQuota(kSpace, Held() * 9 / 10), IsOk());
  for (const char* id : {"open", "leased", "pinned", "softly"})
    EXPECT_THAT(Lowered(id), ElementsAre(0, 0, 0)) << id;
  EXPECT_NE(Lowered("free"), std::vector<std::int64_t>(3)) << "that was to go first";
}

TEST_F(LadderTest, ColumnsThatAreSharedStayAsLongAsTheyAre) {
  const Prompt prompt = PromptFrom(0, kTokens);
  for (const char* id : {"one", "other"}) {
    const auto writer = OpenWithPrompt(store_, id, entry_->model(), prompt);
    AppendSpan(*writer, data_,
               {writer->standing().received_tokens, kTokens - writer->standing().received_tokens});
  }
  for (const char* id : {"one", "other"}) ASSERT_THAT(store_->Seal(Key(id), kTokens), IsOk());
  ASSERT_THAT(store_->Acquire(Key("other"), absl::Seconds(30)), IsOk());
  Press();
  EXPECT_THAT(Lowered("one"), ElementsAre(0, 0, 0)) << "the other is leased";
  EXPECT_EQ(Evictions(), 0);
  ASSERT_THAT(store_->SetQuota(kSpace, 0), IsOk());
  const std::int64_t held = Held();
  ASSERT_THAT(store_->Remove(Key("one")), IsOk());
  store_.clock.Advance(absl::Minutes(1));
  store_->Sweep();
  ASSERT_EQ(Held(), held);
  for (int i = 0; i < 3; ++i) Press();
  EXPECT_THAT(Lowered("other"), ElementsAre(3, 0, 0));
}

TEST_F(LadderTest, AValueThatARungDoesNotTakeStaysWhereItIs) {
  data_.layers[0].k.Set(0, 5, 3, 40000.0f);  // of 2-bit KIVI a group's range must fit fp16
  WriteSealed("a");
  const Rows rows = ReadAll(store_, "a");
  for (std::int64_t step = 0; step < 3 * kPages; ++step) Press();
  EXPECT_THAT(Lowered("a"), ElementsAre(0, 0, 3));
  EXPECT_NEAR(ReadAll(store_, "a")[5 * 64 + 3], 40000.0f, 40000.0f / 16) << "of FP8";
}

TEST_F(LadderTest, NothingIsLoweredUnasked) {
  ASSERT_THAT(store_->SetPressure(kSpace, Pressure::kEvict), IsOk());
  EXPECT_EQ(store_->GetPressure(kSpace), Pressure::kEvict);
  WriteSealed("a");
  Press();
  EXPECT_EQ(Evictions(), 1);
  ASSERT_THAT(store_->SetPressure(kSpace, Pressure::kLadder), IsOk());
  EXPECT_EQ(store_->GetPressure(kSpace), Pressure::kLadder);
  Press();
  EXPECT_THAT(Lowered("a"), ElementsAre(1, 0, 0)) << "what was sealed before can be lowered, too";
  EXPECT_EQ(Evictions(), 1);
}

TEST_F(LadderTest, AnotherNamespacesPagesStayWhole) {
  WriteSealed("a");
  WriterRequest request;
  request.key = {"other", "b"};
  request.model_id = entry_->model().id;
  AppendSpan(*store_->OpenWriter(std::move(request)).value(), data_, {0, kTokens});
  ASSERT_THAT(store_->Seal({"other", "b"}, kTokens), IsOk());
  ASSERT_THAT(store_->SetQuota("other", store_->GetQuota("other").held - 1), IsOk());
  EXPECT_EQ(Evictions(), 1) << "it takes no ladder";
  EXPECT_THAT(Lowered("a"), ElementsAre(0, 0, 0));
}

// More tokens stay than the memory would hold at source precision, and it's all accounted for.
TEST_F(LadderTest, AFullMemoryHoldsMoreTokens) {
  const std::int64_t at_source = store_->budget() / (kPages * ColumnBytes(entry_->model()));
  int written = 0;
  for (; Evictions() == 0; ++written) {
    WriteSealed("s" + std::to_string(written));
    ASSERT_LT(written, 100);
    EXPECT_EQ(testing::SumOf(store_->memory()), store_->budget());
  }
  EXPECT_GT(written - 1, 3 * at_source);
  std::int64_t tokens = 0;
  for (const SequenceDescription& each : store_->List({kSpace, ""}, 100))
    tokens += each.committed_tokens;
  EXPECT_EQ(tokens, entry_->totals().tokens_held);
  EXPECT_GT(store_->memory().staging, 0) << "room for a step is kept";
  for (int i = 0; i < written; ++i) (void)store_->Remove(Key("s" + std::to_string(i)));
  EXPECT_EQ(Held(), 0);
  EXPECT_EQ(entry_->totals().held.allocated, 0);
  EXPECT_EQ(store_->memory().free + store_->memory().staging, store_->budget());
  ASSERT_THAT(store_->SetPressure(kSpace, Pressure::kEvict), IsOk());
  EXPECT_EQ(store_->memory().free, store_->budget()) << "nobody needs room for a step any more";
}

// The one that lowers is not the only one that works.
TEST_F(LadderTest, ManyAppendAtOnce) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 15; ++i) {
        const std::string id = std::to_string(t) + "-" + std::to_string(i);
        AppendSpan(*store_.OpenWriter(id, entry_->model()), data_, {0, kTokens});
        ASSERT_THAT(store_->Seal(Key(id), kTokens), IsOk());
        if (i > 0) (void)store_->OpenReader(Key(std::to_string(t) + "-0"), "", {}, {});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(testing::SumOf(store_->memory()), store_->budget());
  EXPECT_GT(store_->lowered().at("kivi2"), 0);
  std::int64_t held = 0;
  for (const SequenceDescription& each : store_->List({kSpace, ""}, 100)) {
    held += each.held.allocated;
    const auto lowered = store_->Describe(Key(each.id))->lowered_pages;
    const std::int64_t pages = each.committed_tokens / kPage;
    std::int64_t bytes = pages * ColumnBytes(entry_->model());
    for (std::size_t rung = 0; rung < lowered.size(); ++rung)
      bytes -= lowered[rung] * (ColumnBytes(entry_->model()) - ColumnBytes(*entry_->rungs()[rung]));
    EXPECT_EQ(each.held.allocated, bytes) << each.id;
  }
  EXPECT_EQ(held, Held());
}

TEST_F(LadderTest, DamageIsNotHidden) {
  WriteSealed("a");
  {
    const SequenceReader reader = Open(store_, "a");
    const Part& part = *reader.pinned(0, Side::kK).parts[0].part;
    kvtier::testing::FlipBit(store_.device, part.SliceAt(1));
  }
  for (int i = 0; i < 3; ++i) Press();
  EXPECT_THAT(Lowered("a"), ElementsAre(3, 0, 0));
  SequenceReader reader = Open(store_, "a");
  Rows rows(static_cast<std::size_t>(kTokens * 2 * 64));
  EXPECT_THAT(reader.Fill(0, 0, kTokens, reinterpret_cast<std::byte*>(rows.data()),
                          reinterpret_cast<std::byte*>(rows.data())),
              Refuses(Reason::kChecksum, HasSubstr("page 0")));
}

TEST_F(LadderTest, WhatWasLoweredIsSharedAndForkedButNotCut) {
  const Prompt prompt = PromptFrom(0, kTokens);
  AppendSpan(*OpenWithPrompt(store_, "a", entry_->model(), prompt), data_, {0, kTokens});
  ASSERT_THAT(store_->Seal(Key("a"), kTokens), IsOk());
  for (int i = 0; i < 6; ++i) Press();
  ASSERT_THAT(Lowered("a"), ElementsAre(0, 3, 0));
  const Rows rows = ReadAll(store_, "a");
  ASSERT_THAT(store_->SetQuota(kSpace, 0), IsOk());
  ASSERT_EQ(store_->Fork(Key("a"), "fork", kTokens).value(), kTokens);
  EXPECT_EQ(ReadAll(store_, "fork"), rows);
  const auto writer = OpenWithPrompt(store_, "again", entry_->model(), prompt);
  EXPECT_EQ(writer->standing().received_tokens, kTokens);
  EXPECT_THAT(store_->Truncate(Key("fork"), kTokens - 1, 0),
              Refuses(Reason::kGroupBound, HasSubstr("256 and 384 are its bounds")));
  ASSERT_THAT(store_->Truncate(Key("fork"), 256, 0), IsOk());
  AppendSpan(*store_.OpenWriter("fork", entry_->model()), data_, {256, 128});
  const Rows mixed = ReadAll(store_, "fork");
  EXPECT_EQ(mixed[0], rows[0]);
  EXPECT_NE(mixed, rows) << "its last page is at source precision";
  EXPECT_THAT(store_->OpenReader(Key("a"), "", {}, {.stored = true}),
              Refuses(Reason::kFormatRefused, HasSubstr("k of layer 0")));
}

}  // namespace
}  // namespace kvtier::cachestore
