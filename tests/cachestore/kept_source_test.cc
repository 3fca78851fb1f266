// Sources that are quantized already are kept byte for byte, and read as what they stand for.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/host_codec.h"
#include "tests/cachestore/test_store.h"
#include "tests/support/seed.h"

namespace kvtier::cachestore {
namespace {

using kernels::ElementType;
using kvtier::testing::IsOk;
using kvtier::testing::KvData;
using kvtier::testing::Refuses;
using kvtier::testing::SeededRandom;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Message;
using testing::TestStore;

constexpr int kHeads = 2, kDim = 64, kTokens = 70;

// Random bytes as rows of the source, [heads, tokens, row].
KvData RandomBytes(ElementType source, SeededRandom& random) {
  KvData data{.tokens = kTokens, .layers = {}};
  const auto row = static_cast<int>(kernels::RowElements(source, kDim));
  kvtier::testing::KvTensor tensor{.type = source, .heads = kHeads, .tokens = kTokens, .dim = row};
  tensor.bytes.resize(static_cast<std::size_t>(kHeads * kTokens * row));
  for (std::byte& byte : tensor.bytes) byte = static_cast<std::byte>(random.Between(0, 255));
  data.layers.push_back({tensor, tensor});
  return data;
}

// The blocks' scales, at most 2.
void MakeScalesFinite(KvData& data, int block_bytes) {
  for (kvtier::testing::KvTensor* tensor : {&data.layers[0].k, &data.layers[0].v}) {
    for (std::size_t at = 1; at < tensor->bytes.size(); at += static_cast<std::size_t>(block_bytes))
      tensor->bytes[at] &= std::byte{0xbf};
  }
}

ModelRequest RequestFor(ElementType source, const std::string& format,
                        const std::vector<float>& scale) {
  ModelRequest request =
      testing::RequestOf(testing::UniformSpec({.heads = kHeads, .dim = kDim}, source), format, 32);
  if (!scale.empty()) request.scales = {{.layer = 0, .k = scale, .v = scale}};
  return request;
}

std::vector<std::byte> ReadK(TestStore& store, const ReadFormat& format) {
  SequenceReader reader = store.Read("s", format);
  const LayerOutput& layer = reader.layers()[0];
  std::vector<std::byte> k(static_cast<std::size_t>(kTokens * layer.k_bytes_per_token()));
  std::vector<std::byte> v = k;
  EXPECT_THAT(reader.Fill(0, 0, kTokens, k.data(), v.data()), IsOk());
  EXPECT_EQ(std::memcmp(k.data(), v.data(), k.size()), 0) << "K and V were given alike";
  return k;
}

TEST(KeptSource, Fp8BytesAllOfThemComeBackAsTheyCame) {
  SeededRandom random;
  for (const ElementType source : {ElementType::kE4m3, ElementType::kE5m2}) {
    for (const std::string& format : {std::string("auto"), std::string(ElementName(source))}) {
      TestStore store(std::int64_t{1} << 20);
      const Model& model = store.Register(RequestFor(source, format, {0.25f}))->model();
      EXPECT_EQ(model.format, ElementName(source)) << "what auto comes to";
      KvData data = RandomBytes(source, random);
      for (int code = 0; code < 256; ++code) {
        data.layers[0].k.bytes[static_cast<std::size_t>(code)] = static_cast<std::byte>(code);
        data.layers[0].v.bytes[static_cast<std::size_t>(code)] = static_cast<std::byte>(code);
      }
      store.AppendAtOnce("s", model, data, kTokens);
      EXPECT_EQ(ReadK(store, {.layout = TokenLayout::kHnd}), data.layers[0].k.bytes);
      EXPECT_EQ(ReadK(store, {.as = source, .layout = TokenLayout::kHnd}), data.layers[0].k.bytes);
      EXPECT_EQ(store.Read("s").layers()[0].k_scales, std::vector<float>{0.25f});

      // NaN codes are kept, and counted. So are the infinities of E5M2.
      std::int64_t non_finite = 0;
      for (const std::byte byte : data.layers[0].k.bytes) {
        const int magnitude = static_cast<int>(byte) & 0x7f;
        non_finite += magnitude >= (source == ElementType::kE4m3 ? 0x7f : 0x7c) ? 1 : 0;
      }
      EXPECT_EQ(store->Describe({"default", "s"})->saturated_values, 2 * non_finite);

      const auto floats = ReadK(store, {.as = ElementType::kFp32, .layout = TokenLayout::kHnd});
      float second = 0;
      std::memcpy(&second, floats.data() + 4 * 0x31, sizeof second);
      EXPECT_EQ(second, 0.25f * (source == ElementType::kE4m3 ? ToFloat(kernels::E4m3{0x31})
                                                              : ToFloat(kernels::E5m2{0x31})));
    }
  }
}

TEST(KeptSource, BlocksOfLlamaComeBackAsTheyCameAndAsValues) {
  SeededRandom random;
  for (const ElementType source : {ElementType::kQ8, ElementType::kQ4}) {
    TestStore store(std::int64_t{1} << 20);
    const Model& model = store.Register(RequestFor(source, "auto", {}))->model();
    EXPECT_EQ(model.format, ElementName(source));
    KvData data = RandomBytes(source, random);
    MakeScalesFinite(data, source == ElementType::kQ8 ? 34 : 18);
    store.AppendAtOnce("s", model, data, kTokens);
    for (const int block_tokens : {0, 16}) {
      const ReadFormat nhd{.block_tokens = block_tokens};
      const auto bytes = ReadK(store, nhd);
      const auto row = static_cast<std::size_t>(data.layers[0].k.dim);
      ASSERT_EQ(bytes.size(), data.layers[0].k.bytes.size());
      for (int token = 0; token < kTokens; ++token) {
        for (int head = 0; head < kHeads; ++head) {
          ASSERT_EQ(
              std::memcmp(bytes.data() + static_cast<std::size_t>(token * kHeads + head) * row,
                          data.layers[0].k.Row(head, token), row),
              0);
        }
      }
    }
    std::vector<float> want(std::size_t{kHeads} * kTokens * kDim);
    kernels::DecodeOnHost(
        {.codec = model.layers[0].k.layout.codec,
         .dim = kDim,
         .in = data.layers[0].k.bytes.data(),
         .tokens = std::int64_t{kHeads} * kTokens,
         .out = {reinterpret_cast<std::byte*>(want.data()), ElementType::kFp32, kDim}});
    const auto floats = ReadK(store, {.as = ElementType::kFp32, .layout = TokenLayout::kHnd});
    EXPECT_EQ(std::memcmp(floats.data(), want.data(), floats.size()), 0);
  }
}

TEST(KeptSource, ABlockWhoseScaleIsNoNumberIsRefusedByItsPlace) {
  SeededRandom random;
  TestStore store(std::int64_t{1} << 20);
  const Model& model = store.Register(RequestFor(ElementType::kQ8, "q8_0", {}))->model();
  KvData data = RandomBytes(ElementType::kQ8, random);
  MakeScalesFinite(data, 34);
  const std::uint16_t nan = 0x7e00;
  std::memcpy(data.layers[0].v.Row(1, 33) + 34, &nan, sizeof nan);
  const auto writer = store.OpenWriter("s", model);
  Message message(data, writer->shard(), {}, {0}, {0, kTokens});
  EXPECT_THAT(writer->Append(message.chunk()),
              Refuses(Reason::kNonFiniteValue,
                      HasSubstr("v of layer 0, head 1, token 33, channel 32 is nan")));
}

TEST(KeptSource, AnotherFormatIsRefused) {
  TestStore store(std::int64_t{1} << 20);
  for (const ElementType source :
       {ElementType::kE4m3, ElementType::kE5m2, ElementType::kQ8, ElementType::kQ4}) {
    const std::string own = ElementName(source);
    for (const char* format : {"kivi2", "float16", "int8_per_token_head", "fp8(scale=page)"}) {
      EXPECT_THAT(
          store->RegisterModel(RequestFor(source, format, {})),
          Refuses(Reason::kFormatRefused, AllOf(HasSubstr("policy.kv_cache_dtype is "),
                                                HasSubstr("a source of " + own + " is kept"),
                                                HasSubstr("want auto or " + own))));
    }
  }
  ModelRequest odd = RequestFor(ElementType::kQ8, "auto", {});
  odd.spec.layers[0].v_head_dim = 100;
  EXPECT_THAT(
      store->RegisterModel(odd),
      Refuses(Reason::kFormatRefused, HasSubstr("v_head_dim is 100; q8_0 needs a multiple")));
}

}  // namespace
}  // namespace kvtier::cachestore
