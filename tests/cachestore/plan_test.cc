// The planner against the store, to the byte, and against sums done by hand.

#include "cachestore/model/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/cachestore/test_store.h"
#include "tests/support/seed.h"

namespace kvtier::cachestore {
namespace {

using kernels::ElementType;
using kvtier::testing::IsOk;
using kvtier::testing::Refuses;
using kvtier::testing::SeededRandom;
using testing::Message;
using testing::TestStore;

constexpr std::int64_t kGib = std::int64_t{1} << 30;

const std::vector<std::string>& AllFormats() {
  static const std::vector<std::string> formats = {"auto",
                                                   "float16",
                                                   "bfloat16",
                                                   "fp8_e4m3",
                                                   "fp8_e5m2",
                                                   "int8_per_token_head",
                                                   "kivi2",
                                                   "kivi4",
                                                   "k4v2",
                                                   "kivi(2,2,32,0)",
                                                   "kivi(4,2,4,16)",
                                                   "fp8_per_token_head",
                                                   "nvfp4",
                                                   "int4_per_token_head",
                                                   "fp8(scale=page)",
                                                   "kivi2(scales=fp8_e4m3)"};
  return formats;
}

std::shared_ptr<const Model> Resolve(const ModelSpec& spec, const std::string& format,
                                     int page_tokens = 0) {
  return ResolveModel(testing::RequestOf(spec, format, page_tokens), 128).value();
}

// Llama-3-8B's shape.
const ModelSpec& Big() {
  static const ModelSpec spec = testing::UniformSpec({.layers = 32, .heads = 8, .dim = 128});
  return spec;
}

TEST(Plan, CodesOf32LayersOf8HeadsOf128At32768Tokens) {
  const auto codes = [](const std::string& format) {
    return PlanSequence(*Resolve(Big(), format), 32768).use.codes;
  };
  EXPECT_EQ(codes("auto"), 4 * kGib);
  EXPECT_EQ(codes("fp8"), 2 * kGib);
  EXPECT_EQ(codes("int8_per_token_head"), 2 * kGib);
  EXPECT_EQ(codes("kivi(2,2,32,0)"), kGib / 2);
  EXPECT_EQ(codes("kivi(4,4,32,0)"), kGib);
  // V's 128 newest tokens are residual.
  const std::int64_t v_residual = std::int64_t{32} * 8 * 128 * 128;
  EXPECT_EQ(codes("kivi2"), kGib / 2 - v_residual / 4);
  EXPECT_EQ(PlanSequence(*Resolve(Big(), "kivi2"), 32768).use.residual, v_residual * 2);
  EXPECT_EQ(PlanSequence(*Resolve(Big(), "int8_per_token_head"), 32768).use.scales,
            std::int64_t{64} * 8 * 32768 * 4);
  EXPECT_EQ(PlanSequence(*Resolve(Big(), "kivi(2,2,32,0)"), 32768).use.scales,
            std::int64_t{64} * 8 * 32768 * 128 / 32 * 4);
}

TEST(Plan, AllocatedIsUseAndSlack) {
  // A part of 128 tokens: 64 bytes of header and 16 a head, then 8 slices.
  const auto model = Resolve(Big(), "auto");
  const std::int64_t part = 64 + 8 * 16 + 8 * 128 * 128 * 2;
  for (const std::int64_t tokens : {1, 127, 128, 129, 32768}) {
    const MemoryHeld held = PlanSequence(*model, tokens);
    EXPECT_EQ(held.allocated, 64 * part * ((tokens + 127) / 128));
    EXPECT_EQ(held.slack(), 64 * 8 * 128 * 2 * ((tokens + 127) / 128 * 128 - tokens));
  }
  EXPECT_EQ(PlanSequence(*model, 0), MemoryHeld{});
}

TEST(Plan, CapacityLineInVllmsWords) {
  const auto model = Resolve(Big(), "auto");
  const std::int64_t sequence = std::int64_t{64} * (64 + 8 * 16 + 8 * 128 * 128 * 2) * 256;
  const CapacityFigures figures = PlanCapacity(*model, sequence * 5 / 2);
  EXPECT_EQ(figures.line,
            "KV cache size: 81,920 tokens, Maximum concurrency for 32,768 tokens per request: "
            "2.50x");
  EXPECT_EQ(figures.tokens, 81920);
  EXPECT_DOUBLE_EQ(figures.concurrency, 2.5);

  ModelRequest request = testing::RequestOf(Big(), "auto");
  request.max_tokens = 128;
  const auto shorter = ResolveModel(request, 128).value();
  EXPECT_EQ(PlanCapacity(*shorter, sequence).line,
            "KV cache size: 32,768 tokens, Maximum concurrency for 128 tokens per request: "
            "256.00x");
  EXPECT_EQ(PlanCapacity(*model, sequence, 128).line, PlanCapacity(*shorter, sequence).line);
  EXPECT_EQ(PlanCapacity(*shorter, sequence / 1024).line,
            "KV cache size: 32 tokens, Maximum concurrency for 128 tokens per request: 0.25x");
}

TEST(Plan, CompressionRatioIsSourceOverAllThatIsTaken) {
  const auto model = Resolve(Big(), "fp8");
  const double part = 64 + 8 * 16 + 8 * 128 * 128;
  EXPECT_DOUBLE_EQ(CompressionRatio(*model, 32768), 8 * 128 * 128 * 2 / part);
  EXPECT_EQ(CompressionRatio(*model, 0), 0.0);
}

TEST(Plan, EqualsTheStoreToTheByte) {
  SeededRandom random;
  for (const std::string& format : AllFormats()) {
    for (const ElementType source : {ElementType::kBf16, ElementType::kFp32}) {
      for (const bool uniform : {true, false}) {
        SCOPED_TRACE(format + " from " + kernels::ElementName(source));
        ModelSpec spec = uniform
                             ? testing::UniformSpec({.layers = 2, .heads = 3, .dim = 32}, source)
                             : testing::IrregularSpec(source);
        testing::SuitTo(format, spec);
        TestStore store(std::int64_t{4} << 20);
        const Model& model =
            store.Register(testing::RequestOf(spec, format, random.Pick<int>({0, 32, 96})))
                ->model();
        const testing::KvData data =
            kvtier::testing::MakeKvData(spec, 400, random, testing::LargestFor(format, spec));
        for (int i = 0; i < 6; ++i) {
          const std::int64_t tokens = random.OneIn(3)
                                          ? random.Pick<std::int64_t>({32, 96, 128, 256, 384})
                                          : random.Between(1, 400);
          store.AppendAtOnce("s", model, data, tokens);
          const MemoryHeld plan = PlanSequence(model, tokens);
          EXPECT_EQ(store->Describe({"default", "s"})->held, plan) << tokens << " tokens";
          const MemoryParts parts = store->memory();
          EXPECT_EQ(parts.use, plan.use);
          EXPECT_EQ(parts.slack, plan.slack());
          EXPECT_EQ(parts.free, store->budget() - plan.allocated);
          EXPECT_THAT(store->Seal({"default", "s"}, tokens), IsOk());
          EXPECT_EQ(store->Describe({"default", "s"})->held, PlanSealed(model, tokens));
          EXPECT_THAT(store->Remove({"default", "s"}), IsOk());
        }
      }
    }
  }
}

// Appends to "s" in messages of `step` tokens, the last as short as need be.
absl::Status AppendTo(TestStore& store, const Model& model, const testing::KvData& data,
                      std::int64_t tokens, std::int64_t step) {
  const auto writer = store.OpenWriter("s", model);
  std::vector<int> layers(model.layers.size());
  for (std::size_t i = 0; i < layers.size(); ++i) layers[i] = static_cast<int>(i);
  for (std::int64_t first = writer->standing().received_tokens; first < tokens; first += step) {
    Message message(data, writer->shard(), {}, layers, {first, std::min(step, tokens - first)});
    if (const auto ack = writer->Append(message.chunk()); !ack.ok()) return ack.status();
  }
  return absl::OkStatus();
}

class PlanOfFormat : public ::testing::TestWithParam<std::string> {};

// A budget of any size: the tokens that are said to fit do, however they are cut, and a page more
// does not.
TEST_P(PlanOfFormat, TokensThatFitAreThoseThatFit) {
  SeededRandom random;
  const ModelSpec spec = testing::UniformSpec({.layers = 4, .heads = 2, .dim = 32});
  const auto model = Resolve(spec, GetParam(), 64);
  const testing::KvData data =
      kvtier::testing::MakeKvData(spec, 3000, random, testing::LargestFor(GetParam(), spec));
  for (const std::int64_t step : {1, 37, 300}) {
    SCOPED_TRACE(step);
    const std::int64_t budget =
        AlignUp(random.Between(OnePageOfEveryLayer(*model), PlanSequence(*model, 2500).allocated));
    const std::int64_t fit = TokensThatFit(*model, budget);
    TestStore store(budget);
    const Model& own = store.Register(testing::RequestOf(spec, GetParam(), 64))->model();
    ASSERT_THAT(AppendTo(store, own, data, fit, step), IsOk()) << fit << " tokens";
    EXPECT_EQ(store->memory().free, budget - PlanSequence(own, fit).allocated);
    EXPECT_THAT(AppendTo(store, own, data, fit + 64, step),
                Refuses(Reason::kBudget, ::testing::HasSubstr(std::to_string(budget))));
  }
}

TEST_P(PlanOfFormat, SequencesThatFitAreThoseThatFit) {
  SeededRandom random;
  const ModelSpec spec = testing::UniformSpec({.layers = 2, .heads = 2, .dim = 32});
  const testing::KvData data =
      kvtier::testing::MakeKvData(spec, 400, random, testing::LargestFor(GetParam(), spec));
  const std::int64_t budget = random.Between(1 << 20, 2 << 20);
  TestStore store(budget);
  const Model& model = store.Register(testing::RequestOf(spec, GetParam(), 64))->model();
  const std::int64_t tokens = random.Between(1, 400);
  const std::int64_t fit = SequencesThatFit(model, tokens, budget);
  ASSERT_GT(fit, 0);
  for (std::int64_t i = 0; i < fit; ++i)
    store.AppendAtOnce("s" + std::to_string(i), model, data, tokens);
  EXPECT_LT(store->memory().free, PlanSequence(model, tokens).allocated);
  EXPECT_EQ(SequencesThatFit(model, tokens, store->memory().free), 0);
}

INSTANTIATE_TEST_SUITE_P(
    Formats, PlanOfFormat, ::testing::ValuesIn(AllFormats()), [](const auto& instance) {
      std::string name = instance.param;
      std::replace_if(
          name.begin(), name.end(),
          [](char c) { return std::string("(,=)").find(c) != std::string::npos; }, '_');
      return name;
    });

TEST(Plan, NothingFitsIntoNothing) {
  const auto model = Resolve(Big(), "kivi2");
  EXPECT_EQ(TokensThatFit(*model, 0), 0);
  EXPECT_EQ(TokensThatFit(*model, -1), 0);
  EXPECT_EQ(SequencesThatFit(*model, 100, OnePageOfEveryLayer(*model) / 2), 0);
  EXPECT_EQ(SequencesThatFit(*model, 0, kGib), 0);
}

}  // namespace
}  // namespace kvtier::cachestore
