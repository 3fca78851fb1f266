// The stored bytes of a sequence depend on its values, its length and its policy alone: a sequence
// fed by random streams equals, at every length looked at, one that came in a single message; its
// memory is what the planner says; and what it reads is what the codecs alone make of the values.

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "tests/cachestore/naive_sequence.h"
#include "tests/cachestore/random_streams.h"
#include "tests/cachestore/stored_bytes.h"
#include "tests/cachestore/test_store.h"

namespace kvtier::cachestore {
namespace {

using kernels::ElementType;
using kvtier::testing::SeededRandom;
using testing::NaiveSequence;
using testing::RandomStreams;
using testing::ReadCheck;
using testing::StoredTensor;
using testing::TestStore;

constexpr std::int64_t kMemory = 8 << 20;
constexpr std::int64_t kLongest = 512;
constexpr testing::Shape kShape{.layers = 3, .heads = 3, .dim = 32};

struct Case {
  const char* format;
  int page_tokens;
  bool per_head_scales = false;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.format << ", pages of " << c.page_tokens;
}

constexpr Case kCases[] = {
    {"auto", 128},
    {"auto", 48},
    {"bfloat16", 96},
    {"float16", 64},
    {"fp8", 64},
    {"fp8", 128, true},
    {"fp8_e5m2", 48, true},
    {"int8_per_token_head", 96},
    {"fp8_per_token_head", 64},
    {"fp8(scale=page)", 64},
    {"fp8(scale=page)", 128},
    {"int4_per_token_head", 48},
    {"nvfp4", 128},
    {"nvfp4_4over6", 64, true},
    {"fp8_ds_mla", 64},
    {"q8_0", 32},
    {"q4_0", 64},
    {"q4_0(k_rotation=hadamard)", 64},
    {"fp8(scale=page,k_rotation=hadamard)", 128},
    {"kivi2", 128},
    {"kivi2", 96},
    {"kivi4", 64},
    {"k4v2", 96},
    {"kivi(4,2,4,4)", 48},
    {"kivi(2,2,32,0)", 96},
    {"kivi(8,8,16,48)", 64},
    {"kivi(8,8,16,48)", 128},
    {"kivi2(scales=fp8_e4m3)", 128},
    {"kivi(4,2,4,4,scales=fp8_e4m3,k_rotation=hadamard)", 48},
};

class StorePathIndependence : public ::testing::TestWithParam<std::tuple<Case, ElementType>> {
 protected:
  static Case TheCase() { return std::get<0>(GetParam()); }

  // Scales of many sizes, some of which saturate.
  static void AddScales(ModelRequest& request) {
    if (!TheCase().per_head_scales) return;
    for (std::size_t i = 0; i < request.spec.layers.size(); ++i) {
      LayerScales scales{.layer = static_cast<int>(i), .k = {}, .v = {0.03f}};
      for (int head = 0; head < request.spec.layers[i].kv_heads; ++head)
        scales.k.push_back(0.01f * static_cast<float>(1 + head));
      request.scales.push_back(scales);
    }
  }

  const Model& Register(const ModelSpec& spec) {
    ModelRequest request = testing::RequestOf(spec, TheCase().format, TheCase().page_tokens);
    AddScales(request);
    return store_.Register(std::move(request))->model();
  }

  // Lengths in rising order, most of them where something begins or ends.
  std::vector<std::int64_t> SomeLengths(int count) {
    const Format format = ParseFormat(TheCase().format).value();
    const std::int64_t g = std::max(format.group, 1), r = std::max(format.residual_tokens, 1);
    const std::int64_t page = TheCase().page_tokens;
    std::vector<std::int64_t> lengths{random_.OneIn(2) ? 500 : 512, kLongest};
    for (int i = 0; i < count; ++i) {
      const std::int64_t edge =
          random_.Pick<std::int64_t>({g, r, r + g, 2 * r, page, page + r, 2 * page});
      lengths.push_back(std::clamp<std::int64_t>(edge + random_.Between(-1, 1), 1, kLongest));
    }
    std::sort(lengths.begin(), lengths.end());
    return lengths;
  }

  // A sequence of its own that takes `tokens` in as few messages as there can be.
  std::vector<StoredTensor> BytesAtOnce(const Model& model, const testing::KvData& data,
                                        std::int64_t tokens) {
    store_.AppendAtOnce("at-once", model, data, tokens);
    auto bytes = testing::StoredBytesOf(store_.device, store_.Read("at-once").pins());
    saturated_ = store_->Describe({"default", "at-once"})->saturated_values;
    EXPECT_THAT(store_->Remove({"default", "at-once"}), kvtier::testing::IsOk());
    return bytes;
  }

  void ExpectStoredAlike(const Model& model, const testing::KvData& data, std::int64_t tokens) {
    const SequenceDescription description = store_->Describe({"default", "cut"}).value();
    EXPECT_EQ(description.committed_tokens, tokens);
    EXPECT_EQ(description.held, PlanSequence(model, tokens));
    const MemoryParts parts = store_->memory();
    EXPECT_EQ(testing::SumOf(parts), kMemory);
    EXPECT_EQ(parts.use, description.held.use);  // the only sequence
    EXPECT_EQ(parts.slack, description.held.slack());
    const auto cut = testing::StoredBytesOf(store_.device, store_.Read("cut").pins());
    ASSERT_EQ(testing::DifferenceOf(cut, BytesAtOnce(model, data, tokens)), "")
        << "at " << tokens << " tokens";
    EXPECT_EQ(description.saturated_values, saturated_);
  }

  ReadFormat SomeFormat(ElementType as) {
    ReadFormat format{.as = as};
    if (random_.OneIn(3)) format.as.reset();
    format.layout = random_.OneIn(2) ? TokenLayout::kNhd : TokenLayout::kHnd;
    format.block_tokens = random_.Pick<int>({0, 1, 16, 24});
    if (random_.OneIn(2)) format.k_scale = 0.02f;
    if (random_.OneIn(2)) format.v_scale = 0.5f;
    return format;
  }

  void ExpectReads(const Model& model, const testing::KvData& data, std::int64_t tokens) {
    const NaiveSequence naive(model, data, tokens);
    for (const ElementType as : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32,
                                 ElementType::kE4m3, ElementType::kE5m2}) {
      const ReadFormat format = SomeFormat(as);
      SequenceReader reader = store_.Read("cut", format);
      ReadCheck(reader, format, naive).Run(random_);
    }
  }

  void Run(ModelSpec spec, int lengths) {
    testing::SuitTo(TheCase().format, spec);
    const Model& model = Register(spec);
    const testing::KvData data = kvtier::testing::MakeKvData(
        spec, kLongest, random_, testing::LargestFor(TheCase().format, spec));
    RandomStreams streams(*store_, {"default", "cut"}, model, data, random_);
    std::optional<NaiveSequence> before;
    std::optional<SequenceReader> held;  // goes on in a copy of the residual while this lives
    const ReadFormat format{.as = ElementType::kFp32};
    for (const std::int64_t tokens : SomeLengths(lengths)) {
      ASSERT_NO_FATAL_FAILURE(streams.FeedTo(tokens));
      if (held.has_value()) ReadCheck(*held, format, *before).Run(random_);
      held.reset();
      ASSERT_NO_FATAL_FAILURE(ExpectStoredAlike(model, data, tokens));
      if (!random_.OneIn(2)) continue;
      before.emplace(model, data, tokens);
      held.emplace(store_.Read("cut", format));
    }
    held.reset();
    ExpectReads(model, data, kLongest);
  }

  SeededRandom random_;
  TestStore store_{kMemory};
  std::int64_t saturated_ = 0;  // of the sequence that came at once
};

TEST_P(StorePathIndependence, UniformModel) {
  Run(testing::UniformSpec(kShape, std::get<1>(GetParam())), 5);
}

TEST_P(StorePathIndependence, LayersThatDiffer) {
  Run(testing::IrregularSpec(std::get<1>(GetParam())), 2);
}

INSTANTIATE_TEST_SUITE_P(
    Formats, StorePathIndependence,
    ::testing::Combine(::testing::ValuesIn(kCases),
                       ::testing::Values(ElementType::kBf16, ElementType::kFp16,
                                         ElementType::kFp32)),
    [](const auto& instance) {
      const Case c = std::get<0>(instance.param);
      std::string name = std::string(c.format) + "_pages_of_" + std::to_string(c.page_tokens) +
                         (c.per_head_scales ? "_scaled" : "") + "_from_" +
                         kernels::ElementName(std::get<1>(instance.param));
      std::replace_if(
          name.begin(), name.end(),
          [](char x) { return std::string("(,=)").find(x) != std::string::npos; }, '_');
      return name;
    });

}  // namespace
}  // namespace kvtier::cachestore
