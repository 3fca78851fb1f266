// A reader sees the bytes of the moment it was opened, whatever happens meanwhile; what was
// committed is readable in every shape a reader may ask for; damage is noticed.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tests/cachestore/naive_sequence.h"
#include "tests/cachestore/random_streams.h"
#include "tests/cachestore/test_store.h"

namespace kvtier::cachestore {
namespace {

using kernels::ElementType;
using kvtier::testing::HasCode;
using kvtier::testing::IsOk;
using kvtier::testing::Refuses;
using kvtier::testing::SeededRandom;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::KvData;
using testing::Message;
using testing::NaiveSequence;
using testing::ReadCheck;
using testing::TestStore;

constexpr std::int64_t kMemory = 2 << 20;
constexpr ReadFormat kAsFp32{.as = ElementType::kFp32};

class StoreRead : public ::testing::Test {
 protected:
  const Model& Register(const ModelSpec& spec, const std::string& format, int page_tokens = 64) {
    data_ = kvtier::testing::MakeKvData(spec, 600, random_);
    return store_.Register(testing::RequestOf(spec, format, page_tokens))->model();
  }

  void AppendMore(const Model& model, std::int64_t from, std::int64_t to) {
    const auto writer = store_.OpenWriter("s", model);
    Message message(data_, writer->shard(), {}, {0, 1}, {from, to - from});
    ASSERT_THAT(writer->Append(message.chunk()), IsOk());
  }

  void ExpectReads(SequenceReader& reader, const ReadFormat& format, const NaiveSequence& naive) {
    ReadCheck(reader, format, naive).Run(random_);
  }

  SeededRandom random_;
  TestStore store_{kMemory};
  KvData data_;
};

const ModelSpec& TwoLayers() {
  static const ModelSpec spec = testing::UniformSpec({.layers = 2, .heads = 2, .dim = 32});
  return spec;
}

class StoreReadSnapshot : public StoreRead, public ::testing::WithParamInterface<const char*> {};

// Further appends turn K's residual into codes and overwrite V's oldest residual in place.
TEST_P(StoreReadSnapshot, AppendsAfterItDoNotShow) {
  const Model& model = Register(TwoLayers(), GetParam());
  std::int64_t tokens = random_.Between(1, 150);
  ASSERT_NO_FATAL_FAILURE(AppendMore(model, 0, tokens));
  for (int round = 0; round < 4; ++round) {
    const NaiveSequence naive(model, data_, tokens);
    SequenceReader reader = store_.Read("s", kAsFp32);
    const std::int64_t more = random_.Between(1, 110);
    ASSERT_NO_FATAL_FAILURE(AppendMore(model, tokens, tokens + more));
    ExpectReads(reader, kAsFp32, naive);
    EXPECT_EQ(reader.pins().committed_tokens, tokens);
    tokens += more;
  }
}

// The memory that a removed sequence leaves is written all over by another one; what a reader holds
// is not among it until the reader goes.
TEST_P(StoreReadSnapshot, RemovalAndReuseOfTheMemoryDoNotShow) {
  const Model& model = Register(TwoLayers(), GetParam());
  const std::int64_t tokens = random_.Between(100, 400);
  ASSERT_NO_FATAL_FAILURE(AppendMore(model, 0, tokens));
  const NaiveSequence naive(model, data_, tokens);
  std::optional<SequenceReader> reader = store_.Read("s", kAsFp32);
  ASSERT_THAT(store_->Remove({"default", "s"}), IsOk());
  EXPECT_THAT(store_->OpenReader({"default", "s"}, "", {}, kAsFp32),
              Refuses(Reason::kUnknownSequence, HasSubstr("\"s\" is not held in namespace")));
  EXPECT_EQ(store_->memory().free, kMemory - PlanSequence(model, tokens).allocated);

  const KvData other = kvtier::testing::MakeKvData(TwoLayers(), 600, random_);
  int filled = 0;
  for (; store_->memory().free > 2 * PlanSequence(model, 600).allocated; ++filled)
    store_.AppendAtOnce("fill" + std::to_string(filled), model, other, 600);
  EXPECT_GT(filled, 0);
  ExpectReads(*reader, kAsFp32, naive);
  for (int i = 0; i < filled; ++i)
    EXPECT_THAT(store_->Remove({"default", "fill" + std::to_string(i)}), IsOk());
  reader.reset();
  EXPECT_EQ(store_->memory().free, kMemory);
}

TEST_P(StoreReadSnapshot, DescribeAndReadAgree) {
  const Model& model = Register(TwoLayers(), GetParam());
  testing::RandomStreams streams(*store_, {"default", "s"}, model, data_, random_);
  ASSERT_NO_FATAL_FAILURE(streams.FeedTo(random_.Between(1, 500)));
  const SequenceDescription description = store_->Describe({"default", "s"}).value();
  SequenceReader reader = store_.Read("s");
  EXPECT_EQ(reader.pins().tokens, description.committed_tokens);
  EXPECT_EQ(reader.pins().committed_tokens, streams.Committed());
  EXPECT_FALSE(reader.pins().sealed);
  for (std::size_t i = 0; i < reader.layers().size(); ++i) {
    EXPECT_EQ(reader.layers()[i].k_code_tokens, description.layers[i].k_code_tokens);
    EXPECT_EQ(reader.layers()[i].v_code_tokens, description.layers[i].v_code_tokens);
    EXPECT_EQ(reader.layers()[i].k_code_tokens,
              testing::CodeTokensOf(GetParam(), Side::kK, streams.Committed(), model.page_tokens));
    EXPECT_EQ(reader.layers()[i].v_code_tokens,
              testing::CodeTokensOf(GetParam(), Side::kV, streams.Committed(), model.page_tokens));
  }
  ASSERT_THAT(store_->Seal({"default", "s"}, streams.Committed()), IsOk());
  EXPECT_TRUE(store_.Read("s").pins().sealed);
}

INSTANTIATE_TEST_SUITE_P(Formats, StoreReadSnapshot,
                         ::testing::Values("auto", "fp8", "int8_per_token_head", "kivi2",
                                           "kivi(4,2,32,0)"),
                         [](const auto& instance) {
                           std::string name = instance.param;
                           for (char& c : name)
                             if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
                           return name;
                         });

// Heads that are ahead of the others have other codes and residual; a reader sees what is
// committed.
TEST_F(StoreRead, HeadsThatStandApart) {
  for (const char* format : {"auto", "kivi2", "kivi(4,2,32,0)"}) {
    const Model& model = Register(TwoLayers(), format);
    const std::string id = format;
    const auto first = store_.OpenWriter(id, model, {.num_layers = 2, .num_heads = 1});
    const auto second =
        store_.OpenWriter(id, model, {.num_layers = 2, .first_head = 1, .num_heads = 1});
    Message ahead(data_, first->shard(), {}, {0, 1}, {0, 300});
    Message behind(data_, second->shard(), {}, {0, 1}, {0, 140});
    ASSERT_THAT(first->Append(ahead.chunk()), IsOk());
    EXPECT_EQ(store_.Read(id).pins().tokens, 0);
    ASSERT_THAT(second->Append(behind.chunk()), IsOk());
    SequenceReader reader = store_.Read(id, kAsFp32);
    EXPECT_EQ(reader.pins().tokens, 140);
    const NaiveSequence naive(model, data_, [](int, int head) { return head == 0 ? 300 : 140; });
    ExpectReads(reader, kAsFp32, naive);
  }
}

// Any range of tokens, heads and layers, in any layout and block size.
TEST_F(StoreRead, AnyPartInAnyShape) {
  for (const char* format : {"auto", "fp8_per_token_head", "kivi4"}) {
    const ModelSpec spec = testing::IrregularSpec();
    const Model& model = Register(spec, format, 96);
    const std::string id = format;
    testing::RandomStreams streams(*store_, {"default", id}, model, data_, random_);
    ASSERT_NO_FATAL_FAILURE(streams.FeedTo(420));
    const NaiveSequence naive(model, data_,
                              [&](int layer, int head) { return streams.received(layer, head); });
    for (int i = 0; i < 30; ++i) {
      ReadRange range;
      range.shard.first_layer = static_cast<int>(random_.Between(0, 3));
      range.shard.num_layers = static_cast<int>(random_.Between(1, 4 - range.shard.first_layer));
      if (range.shard.first_layer + range.shard.num_layers < 4 && random_.OneIn(2)) {
        range.shard.first_head = static_cast<int>(random_.Between(0, 1));
        if (range.shard.first_head == 0 || random_.OneIn(2)) range.shard.num_heads = 1;
      }
      range.first_token = random_.Between(0, 419);
      range.tokens = random_.OneIn(4) ? -1 : random_.Between(1, 420 - range.first_token);
      const ReadFormat as{.as = random_.Pick<ElementType>({ElementType::kBf16, ElementType::kFp32}),
                          .layout = random_.OneIn(2) ? TokenLayout::kNhd : TokenLayout::kHnd,
                          .block_tokens = random_.Pick<int>({0, 1, 16, 100})};
      SequenceReader reader = store_.Read(id, as, range);
      EXPECT_EQ(reader.pins().tokens, range.tokens < 0 ? 420 - range.first_token : range.tokens);
      ExpectReads(reader, as, naive);
    }
  }
}

TEST_F(StoreRead, NumHeadsOfZeroMeansToTheLastOfEachLayer) {
  const Model& model = Register(testing::IrregularSpec(), "auto");
  store_.AppendAtOnce("s", model, data_, 10);
  SequenceReader all = store_.Read("s");
  std::vector<int> heads;
  for (const LayerOutput& layer : all.layers()) heads.push_back(layer.heads);
  EXPECT_THAT(heads, ElementsAre(2, 2, 4, 1));
  EXPECT_EQ(all.layers()[3].k_code_tokens, 10);
  EXPECT_EQ(all.layers()[3].v_code_tokens, 0) << "an MLA layer has no V";
  EXPECT_EQ(store_->Describe({"default", "s"})->layers[3].v_code_tokens, 0);
  SequenceReader from_one = store_.Read("s", {}, {.shard = {.num_layers = 3, .first_head = 1}});
  heads.clear();
  for (const LayerOutput& layer : from_one.layers()) heads.push_back(layer.heads);
  EXPECT_THAT(heads, ElementsAre(1, 1, 3));
  EXPECT_EQ(from_one.total_bytes(), 10 * 2 * (1 * (40 + 32) + 1 * (32 + 64) + 3 * (32 + 32)));
  const auto refuses = [&](Shard shard, const char* message) {
    EXPECT_THAT(store_->OpenReader({"default", "s"}, "", {.shard = shard}, {}),
                Refuses(Reason::kInvalidField, HasSubstr(message)));
  };
  refuses({.first_head = 1}, "are outside the 1 KV heads of layer 3");
  refuses({.num_layers = 3, .num_heads = 3}, "are outside the 2 KV heads of layer 0");
  refuses({.first_layer = 4}, "outside the model's 4 layers");
  refuses({.first_layer = 2, .num_layers = 3}, "outside the model's 4 layers");
  refuses({.first_layer = -1}, "outside the model's 4 layers");
  refuses({.first_layer = 2, .num_layers = 1, .first_head = -1}, "first_head -1");
}

TEST_F(StoreRead, PastTheCommittedLengthIsOutOfRangeWithTheLength) {
  const Model& model = Register(TwoLayers(), "kivi2");
  store_.AppendAtOnce("s", model, data_, 77);
  const auto read = [&](std::int64_t first, std::int64_t tokens) {
    return store_->OpenReader({"default", "s"}, "", {.first_token = first, .tokens = tokens}, {});
  };
  EXPECT_THAT(read(0, 77), IsOk());
  EXPECT_THAT(read(77, 0), IsOk());
  EXPECT_THAT(read(77, -1), IsOk());
  for (const auto& [first, tokens] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {0, 78}, {70, 8}, {78, 0}, {78, -1}, {1, INT64_MAX}, {INT64_MAX, 1}}) {
    EXPECT_THAT(
        read(first, tokens),
        Refuses(Reason::kPastCommitted, AllOf(HasSubstr("\"s\""), HasSubstr("77 are committed"))));
  }
}

TEST_F(StoreRead, ABlockFitsAMessage) {
  const Model& model = Register(TwoLayers(), "auto");
  store_.AppendAtOnce("s", model, data_, 1);
  constexpr int kMost = (8 << 20) / (2 * 2 * 32 * 2);  // 8 MiB of K and V
  const auto open = [&](int block_tokens) {
    return store_->OpenReader({"default", "s"}, "", {}, {.block_tokens = block_tokens});
  };
  EXPECT_THAT(open(kMost), IsOk());
  EXPECT_THAT(open(kMost + 1), Refuses(Reason::kInvalidField,
                                       HasSubstr("block_tokens is " + std::to_string(kMost + 1))));
}

TEST_F(StoreRead, AnotherModelIdIsToldTheFieldThatDiffers) {
  const Model& model = Register(TwoLayers(), "kivi2");
  const Model& other = Register(TwoLayers(), "kivi4");
  store_.AppendAtOnce("s", model, data_, 5);
  EXPECT_THAT(store_->OpenReader({"default", "s"}, model.id, {}, {}), IsOk());
  EXPECT_THAT(store_->OpenReader({"default", "s"}, other.id, {}, {}),
              Refuses(Reason::kModelMismatch, HasSubstr("they differ in policy.kv_cache_dtype")));
  EXPECT_THAT(store_->OpenReader({"default", "s"}, "nonsense", {}, {}),
              Refuses(Reason::kUnknownModel, HasSubstr("\"nonsense\"")));
  EXPECT_THAT(store_->OpenReader({"other", "s"}, "", {}, {}),
              Refuses(Reason::kUnknownSequence, HasSubstr("namespace \"other\"")));
}

// ---- FP8 ----

ModelRequest Fp8Request(const std::string& format, std::vector<float> k, std::vector<float> v) {
  ModelRequest request = testing::RequestOf(TwoLayers(), format, 64);
  for (int layer = 0; layer < 2; ++layer) request.scales.push_back({layer, k, v});
  return request;
}

TEST_F(StoreRead, Fp8ReadOfFp8IsAByteCopy) {
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
        return pins.parts[static_cast<std::size_t>(token / 64)].part->UnitAt(head, token % 64);
      };
      const SequencePins::Layer& layer = reader.pins().layers[1];
      const std::size_t row = static_cast<std::size_t>(head * 100 + token) * 32;
      ASSERT_EQ(std::memcmp(k.data() + row, stored(layer.k), 32), 0);
      ASSERT_EQ(std::memcmp(v.data() + row, stored(layer.v), 32), 0);
    }
  }
  EXPECT_EQ(reader.saturated_values(), 0);
  // One head's scale is one scale.
  SequenceReader second =
      store_.Read("s", {.as = ElementType::kE4m3}, {.shard = {.first_head = 1, .num_heads = 1}});
  EXPECT_THAT(second.layers()[0].k_scales, ElementsAre(0.3f));
}

TEST_F(StoreRead, Fp8ScalesAsAskedOrAsStoredOrOne) {
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
TEST_F(StoreRead, QueryScalesAreHandedOnAndNotApplied) {
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

TEST_F(StoreRead, Fp8ScalesMeasuredOverWhatIsRead) {
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
TEST_F(StoreRead, AMeasuredScaleIsOneWhereAValueIsNotFinite) {
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

TEST_F(StoreRead, PerHeadScalesAreRefusedToWhoTakesOneOnly) {
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

TEST_F(StoreRead, ValuesTheAskedTypeCannotHoldSaturateAndAreCounted) {
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

// ---- damage ----

// Flips one bit of a final part, reads, and flips it back.
class StoreReadDamage : public StoreRead {
 protected:
  void ExpectDataLoss(const std::function<std::byte*(const Part&)>& place, const char* what) {
    SequenceReader reader = store_.Read("s");
    const Part& part = *reader.pins().layers[1].v.parts[1].part;
    std::byte* const at = place(part);
    *at ^= std::byte{0x10};
    EXPECT_THAT(Read(0, 64), IsOk()) << "the page before " << what;
    EXPECT_THAT(Read(64, 64), Refuses(Reason::kChecksum, HasSubstr("page 1 head "))) << what;
    EXPECT_THAT(Read(127, 1), HasCode(absl::StatusCode::kDataLoss)) << what;
    *at ^= std::byte{0x10};
    EXPECT_THAT(Read(64, 64), IsOk()) << what;
  }

  absl::Status Read(std::int64_t first, std::int64_t tokens) {
    SequenceReader reader = store_.Read("s", {}, {.first_token = first, .tokens = tokens});
    std::vector<std::byte> out(1 << 16);
    return reader.Fill(1, first, tokens, out.data(), out.data() + (out.size() / 2));
  }
};

TEST_F(StoreReadDamage, AFlippedBitInAFinalPartIsDataLoss) {
  for (const char* format : {"auto", "fp8", "int8_per_token_head", "kivi(2,2,32,0)"}) {
    SCOPED_TRACE(format);
    const Model& model = Register(TwoLayers(), format);
    store_.AppendAtOnce("s", model, data_, 200);
    const PartLayout& layout = model.layers[1].v.layout;
    const auto begin = [](const Part& part) {
      return part.SliceAt(0) - part.layout().header_bytes;
    };
    for (int head = 0; head < 2; ++head) {
      const std::int64_t somewhere = random_.Between(0, layout.slice_bytes - 1);
      ExpectDataLoss([&](const Part& p) { return p.SliceAt(head) + somewhere; }, "a slice");
      ExpectDataLoss([&](const Part& p) { return p.SliceAt(head) + layout.slice_bytes - 1; },
                     "a slice's last byte");
      ExpectDataLoss([&](const Part& p) { return begin(p) + kPartHeaderBytes + head * 16 + 3; },
                     "a slice's checksum");
      ExpectDataLoss([&](const Part& p) { return begin(p) + kPartHeaderBytes + head * 16 + 10; },
                     "a head's scale");
    }
    const std::int64_t in_header = random_.Between(0, kPartHeaderBytes - 1);
    ExpectDataLoss([&](const Part& p) { return begin(p) + in_header; }, "the header");
    ASSERT_THAT(store_->Remove({"default", "s"}), IsOk());
  }
}

// Damage to one head is not seen by who reads the others.
TEST_F(StoreReadDamage, OnlyTheHeadsReadAreChecked) {
  const Model& model = Register(TwoLayers(), "auto");
  store_.AppendAtOnce("s", model, data_, 64);
  SequenceReader whole = store_.Read("s");
  *whole.pins().layers[0].k.parts[0].part->SliceAt(1) ^= std::byte{1};
  std::vector<std::byte> k(1 << 14), v(1 << 14);
  const auto read_head = [&](int head) {
    SequenceReader reader = store_.Read("s", {}, {.shard = {.first_head = head, .num_heads = 1}});
    return reader.Fill(0, 0, 64, k.data(), v.data());
  };
  EXPECT_THAT(read_head(0), IsOk());
  EXPECT_THAT(read_head(1), Refuses(Reason::kChecksum, HasSubstr("page 0 head 1")));
}

// ---- a device that fails ----

TEST_F(StoreRead, AFailingReadSaysSoAndHarmsNothing) {
  const Model& model = Register(TwoLayers(), "kivi2");
  store_.AppendAtOnce("s", model, data_, 150);
  SequenceReader reader = store_.Read("s");
  std::vector<std::byte> k(1 << 16), v(1 << 16);
  store_.device.FailDecode(1);
  EXPECT_THAT(reader.Fill(0, 0, 150, k.data(), v.data()), HasCode(absl::StatusCode::kUnavailable));
  store_.device.FailDecode(0);
  ExpectReads(reader, {}, NaiveSequence(model, data_, 150));
}

// Residual that was committed may be overwritten when the last batch fails: nothing is left to
// trust, so the sequence goes and its memory comes back.
TEST_F(StoreRead, ADeviceThatFailsAnAppendTakesTheSequenceWithIt) {
  const Model& model = Register(TwoLayers(), "kivi2");
  for (int failing = 1; failing <= 3; ++failing) {
    store_.AppendAtOnce("s", model, data_, 150);
    absl::Status told;
    WriterRequest request;
    request.key = {"default", "s"};
    request.model_id = model.id;
    request.on_end = [&](const absl::Status& why) { told = why; };
    const auto writer = store_->OpenWriter(std::move(request)).value();
    Message message(data_, writer->shard(), {}, {0, 1}, {150, 200});
    store_.device.FailEncode(failing);
    EXPECT_THAT(writer->Append(message.chunk()), HasCode(absl::StatusCode::kUnavailable));
    store_.device.FailEncode(0);
    EXPECT_THAT(told, HasCode(absl::StatusCode::kUnavailable));
    EXPECT_THAT(store_->OpenReader({"default", "s"}, "", {}, {}),
                Refuses(Reason::kUnknownSequence, HasSubstr("\"s\"")));
    EXPECT_EQ(store_->memory().free, kMemory);
  }
}

}  // namespace
}  // namespace kvtier::cachestore
