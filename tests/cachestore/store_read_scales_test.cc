// What a read as FP8 is scaled by: the scales that are asked for, those that are stored, 1.0, or
// what is measured; and scales that are only handed on.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tests/cachestore/naive_sequence.h"
#include "tests/cachestore/test_store.h"

namespace kvtier::cachestore {
namespace {

using kernels::ElementType;
using kvtier::testing::IsOk;
using kvtier::testing::Refuses;
using kvtier::testing::SeededRandom;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::KvData;
using testing::NaiveSequence;
using testing::ReadCheck;
using testing::TestStore;

const ModelSpec& TwoLayers() {
  static const ModelSpec spec = testing::UniformSpec({.layers = 2, .heads = 2, .dim = 32});
  return spec;
}

class StoreReadScales : public ::testing::Test {
 protected:
  const Model& Register(const ModelSpec& spec, const std::string& format) {
    data_ = kvtier::testing::MakeKvData(spec, 600, random_);
    return store_.Register(testing::RequestOf(spec, format, 64))->model();
  }

  SeededRandom random_;
  TestStore store_{2 << 20};
  KvData data_;
};

ModelRequest Fp8Request(const std::string& format, const std::vector<float>& k,
                        const std::vector<float>& v) {
  ModelRequest request = testing::RequestOf(TwoLayers(), format, 64);
  for (int layer = 0; layer < 2; ++layer) request.scales.push_back({layer, k, v});
  return request;
}

TEST_F(StoreReadScales, Fp8ReadOfFp8IsAByteCopy) {
  Register(TwoLayers(), "auto");
  const Model& model = store_.Register(Fp8Request("fp8", {0.02f, 0.3f}, {0.07f}))->model();
  store_.AppendAtOnce("s", model, data_, 100);
  SequenceReader reader = store_.Read("s", {.as = ElementType::kE4m3, .layout = TokenLayout::kHnd});
  EXPECT_THAT(reader.layers()[1].k_scales, ElementsAre(0.02f, 0.3f));
  EXPECT_THAT(reader.layers()[1].v_scales, ElementsAre(0.07f));
  std::vector<std::byte> k(2 * 100 * 32), v(2 * 100 * 32);
  ASSERT_THAT(reader.Fill(1, 0, 100, k.data(), v.data()), IsOk());
  for (int head = 0; head < 2; ++head) {
    for (int token = 0; token < 100; ++token) {
      const auto stored = [&](const TensorPins& pins) {
        const Part& part = *pins.parts[static_cast<std::size_t>(token / 64)].part;
        return kvtier::testing::BytesAt(store_.device, part.UnitAt(head, token % 64), 32);
      };
      const SequencePins::Layer& layer = reader.pins().layers[1];
      const std::size_t row = static_cast<std::size_t>(head * 100 + token) * 32;
      ASSERT_EQ(std::memcmp(k.data() + row, stored(layer.k).data(), 32), 0);
      ASSERT_EQ(std::memcmp(v.data() + row, stored(layer.v).data(), 32), 0);
    }
  }
  EXPECT_EQ(reader.saturated_values(), 0);
  // One head's scale is one scale.
  SequenceReader second =
      store_.Read("s", {.as = ElementType::kE4m3}, {.shard = {.first_head = 1, .num_heads = 1}});
  EXPECT_THAT(second.layers()[0].k_scales, ElementsAre(0.3f));
}

TEST_F(StoreReadScales, Fp8ScalesAsAskedOrAsStoredOrOne) {
  Register(TwoLayers(), "auto");
  const Model& model = store_.Register(Fp8Request("fp8_e5m2", {2}, {4}))->model();
  store_.AppendAtOnce("s", model, data_, 3);
  const auto scales = [&](const ReadFormat& format) {
    const LayerOutput layer = store_.Read("s", format).layers()[0];
    return std::pair(layer.k_scales, layer.v_scales);
  };
  using Scales = std::vector<float>;
  EXPECT_EQ(scales({.as = ElementType::kE5m2}), std::pair(Scales{2}, Scales{4}));
  EXPECT_EQ(scales({.as = ElementType::kE4m3}), std::pair(Scales{1}, Scales{1}));
  EXPECT_EQ(scales({.as = ElementType::kE5m2, .v_scale = 3.0f}), std::pair(Scales{2}, Scales{3}));
  EXPECT_EQ(scales({.as = ElementType::kBf16}), std::pair(Scales{}, Scales{}));
  for (const float bad : {0.0f, -1.0f, std::nanf(""), HUGE_VALF, 1e-40f}) {
    EXPECT_THAT(
        store_->OpenReader({"default", "s"}, "", {}, {.as = ElementType::kE5m2, .k_scale = bad}),
        Refuses(Reason::kInvalidField, HasSubstr("k_scale is ")));
  }
}

// They go to the reader of whatever type, and change no value.
TEST_F(StoreReadScales, QueryScalesAreHandedOnAndNotApplied) {
  Register(TwoLayers(), "auto");
  const Model& plain = store_.Register(Fp8Request("fp8", {2}, {4}))->model();
  ModelRequest request = Fp8Request("fp8", {2}, {4});
  request.scales[0].q = {0.5f, 7};
  request.scales[1].q = {3};
  const Model& with_q = store_.Register(request)->model();
  EXPECT_NE(with_q.id, plain.id);
  store_.AppendAtOnce("plain", plain, data_, 70);
  store_.AppendAtOnce("with q", with_q, data_, 70);
  for (const ElementType as : {ElementType::kE4m3, ElementType::kFp32}) {
    SequenceReader one = store_.Read("plain", {.as = as});
    SequenceReader other = store_.Read("with q", {.as = as}, {.shard = {.first_head = 0}});
    EXPECT_TRUE(one.layers()[0].q_scales.empty());
    EXPECT_THAT(other.layers()[0].q_scales, ElementsAre(0.5f, 7));
    EXPECT_THAT(other.layers()[1].q_scales, ElementsAre(3));
    std::vector<std::byte> k(2 * 70 * 32 * 4), v(k.size()), other_k(k.size()), other_v(k.size());
    ASSERT_THAT(one.Fill(0, 0, 70, k.data(), v.data()), IsOk());
    ASSERT_THAT(other.Fill(0, 0, 70, other_k.data(), other_v.data()), IsOk());
    EXPECT_EQ(k, other_k);
    EXPECT_EQ(v, other_v);
  }
  const SequenceReader second =
      store_.Read("with q", {}, {.shard = {.first_head = 1, .num_heads = 1}});
  EXPECT_THAT(second.layers()[0].q_scales, ElementsAre(7));
}

TEST_F(StoreReadScales, Fp8ScalesMeasuredOverWhatIsRead) {
  const Model& model = Register(TwoLayers(), "kivi4");
  store_.AppendAtOnce("s", model, data_, 300);
  const ReadRange range{.first_token = 10, .tokens = 260};
  const NaiveSequence naive(model, data_, 300);
  const auto largest = [&](Side side, int layer, int head) {
    const auto bytes =
        naive.of(side, layer).Read(head, {range.first_token, range.tokens}, ElementType::kFp32, 1);
    float most = 0;
    for (std::size_t at = 0; at < bytes.size(); at += 4) {
      float value;
      std::memcpy(&value, bytes.data() + at, 4);
      most = std::max(most, std::fabs(value));
    }
    return most;
  };
  for (const auto& [as, limit] :
       {std::pair(ElementType::kE4m3, 448.0f), std::pair(ElementType::kE5m2, 57344.0f)}) {
    SequenceReader reader =
        store_.Read("s", {.as = as, .v_scale = 3.0f, .measure_scales = true}, range);
    int steps = 0;
    while (reader.MeasureScales().value()) ++steps;
    EXPECT_EQ(steps, 2 * 5) << "pages of 64 over 260 tokens, of K in two layers";
    EXPECT_EQ(reader.saturated_values(), 0);
    for (int layer = 0; layer < 2; ++layer) {
      const LayerOutput& out = reader.layers()[static_cast<std::size_t>(layer)];
      EXPECT_THAT(out.k_scales, ElementsAre(largest(Side::kK, layer, 0) / limit,
                                            largest(Side::kK, layer, 1) / limit));
      EXPECT_THAT(out.v_scales, ElementsAre(3.0f));
    }
    std::vector<std::byte> k(260 * 2 * 32), v(k.size());
    EXPECT_THAT(reader.Fill(0, 10, 260, k.data(), v.data()), IsOk());
  }
  SequenceReader one = store_.Read(
      "s", {.as = ElementType::kE4m3, .per_tensor_scales_only = true, .measure_scales = true},
      range);
  while (one.MeasureScales().value()) continue;
  const float most = std::max(largest(Side::kV, 0, 0), largest(Side::kV, 0, 1));
  EXPECT_THAT(one.layers()[0].v_scales, ElementsAre(most / 448));
  SequenceReader nothing = store_.Read("s", {.as = ElementType::kE4m3, .measure_scales = true},
                                       {.first_token = 5, .tokens = 0});
  EXPECT_FALSE(nothing.MeasureScales().value());
  EXPECT_THAT(nothing.layers()[0].k_scales, ElementsAre(1.0f, 1.0f));
}

// A NaN or an Inf among them says nothing of the others, wherever it stands.
TEST_F(StoreReadScales, AMeasuredScaleIsOneWhereAValueIsNotFinite) {
  ModelSpec spec = testing::UniformSpec({.heads = 2, .dim = 32}, ElementType::kE5m2);
  const Model& model = Register(spec, "auto");
  for (const int bad : {0x7c, 0x7f}) {
    KvData data = kvtier::testing::MakeKvData(spec, 200, random_, 100.0f);
    data.layers[0].k.Row(1, 70)[3] = static_cast<std::byte>(bad);
    const std::string id = "not finite " + std::to_string(bad);
    store_.AppendAtOnce(id, model, data, 200);
    for (const bool per_tensor : {false, true}) {
      SequenceReader reader = store_.Read(
          id,
          {.as = ElementType::kE4m3, .per_tensor_scales_only = per_tensor, .measure_scales = true});
      while (reader.MeasureScales().value()) continue;
      const std::vector<float>& scales = reader.layers()[0].k_scales;
      EXPECT_EQ(scales.back(), 1.0f);
      if (!per_tensor) {
        EXPECT_LT(scales.front(), 1.0f);
      }
      EXPECT_LT(reader.layers()[0].v_scales.front(), 1.0f);
    }
  }
}

TEST_F(StoreReadScales, PerHeadScalesAreRefusedToWhoTakesOneOnly) {
  Register(TwoLayers(), "auto");
  const Model& model = store_.Register(Fp8Request("fp8", {2}, {4, 5}))->model();
  store_.AppendAtOnce("s", model, data_, 3);
  ReadFormat format{.as = ElementType::kE4m3, .per_tensor_scales_only = true};
  const auto open = [&] { return store_->OpenReader({"default", "s"}, "", {}, format); };
  EXPECT_THAT(open(), Refuses(Reason::kFormatRefused,
                              AllOf(HasSubstr("per_tensor_scales_only"), HasSubstr("v_scale"))));
  format.v_scale = 1.0f;
  EXPECT_THAT(open(), IsOk());
  format = {.as = ElementType::kE5m2, .per_tensor_scales_only = true};
  EXPECT_THAT(open(), IsOk());
}

TEST_F(StoreReadScales, ValuesTheAskedTypeCannotHoldSaturateAndAreCounted) {
  const ModelSpec spec = testing::UniformSpec({.dim = 32}, ElementType::kFp32);
  const Model& model = Register(spec, "auto");
  for (int i = 0; i < 32; ++i) data_.layers[0].k.Set(0, 0, i, 1.0f);
  for (int i = 0; i < 32; ++i) data_.layers[0].v.Set(0, 0, i, 1.0f);
  data_.layers[0].k.Set(0, 0, 5, 1e6f);
  data_.layers[0].v.Set(0, 0, 6, -1e6f);
  data_.layers[0].v.Set(0, 0, 7, 70000.0f);
  store_.AppendAtOnce("s", model, data_, 1);
  SequenceReader reader = store_.Read("s", {.as = ElementType::kFp16});
  ReadCheck(reader, {.as = ElementType::kFp16}, NaiveSequence(model, data_, 1)).Run(random_);
  EXPECT_EQ(reader.saturated_values(), 3);
}

}  // namespace
}  // namespace kvtier::cachestore
