#include "kernels/element_row.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/codec_cases.h"
#include "tests/kernels/golden.h"

namespace kvtier::kernels {
namespace {

using testing::Encode;
using testing::GoldenRow;
using testing::Hex;
using testing::SourceRows;

constexpr Codec kE4m3Codec{.id = CodecId::kFp8, .element = ElementType::kE4m3};
constexpr Codec kE5m2Codec{.id = CodecId::kFp8, .element = ElementType::kE5m2};

struct Golden {
  Codec codec;
  float scale = 1.0f;
  const char* first_bytes = nullptr;
  int sum = 0;
};
const Golden kGolden[] = {
    {kE4m3Codec, 1.0f, "c4b53cc2a440bf2e43ba38c4b23ec100", 15489},
    {kE4m3Codec, 0.01f, "faea71f8d975f46379f06df9e873f600", 22189},
    {kE4m3Codec, 0.005f, "fef279fee17dfc6b7ef875fef07bfe00", 23113},
    {kE5m2Codec, 1.0f, "c2ba3ec1b240c03742bd3cc2b93fc100", 15875},
};

TEST(Fp8, GoldenBytes) {
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
    const SourceRows source = GoldenRow(type);
    for (const Golden& golden : kGolden) {
      const std::vector<std::byte> row = Encode(golden.codec, source, golden.scale);
      ASSERT_EQ(row.size(), 128u);
      EXPECT_EQ(Hex(row, 0, 16), golden.first_bytes) << ElementName(type) << " " << golden.scale;
      EXPECT_EQ(testing::Sum(row, 0, 128), golden.sum) << ElementName(type) << " " << golden.scale;
    }
  }
}

TEST(Fp8, ReadsTheCodeTimesTheScale) {
  const SourceRows source = GoldenRow(ElementType::kBf16);
  for (const Golden& golden : kGolden) {
    const auto row = Encode(golden.codec, source, golden.scale);
    const auto values = testing::Decode(golden.codec, 128, row, 0, 1, golden.scale);
    for (std::size_t c = 0; c < 128; ++c) {
      const auto bits = static_cast<std::uint8_t>(row[c]);
      const float code = golden.codec == kE4m3Codec ? ToFloat(E4m3{bits}) : ToFloat(E5m2{bits});
      ASSERT_EQ(values[c], code * golden.scale);
    }
  }
}

std::uint64_t Saturated(const Codec& codec, const SourceRows& source, float scale) {
  std::vector<std::byte> out(static_cast<std::size_t>(source.dim() * source.tokens()));
  return EncodeOnHost(
      {codec, source.dim(), scale, source.View(), static_cast<int>(source.tokens()), out.data()});
}

TEST(Fp8, CountsWhatSaturates) {
  const SourceRows source = GoldenRow(ElementType::kBf16);
  std::uint64_t beyond = 0;
  for (int c = 0; c < 128; ++c) beyond += std::fabs(source.Get(0, c)) > 464 * 0.005 ? 1 : 0;
  EXPECT_EQ(Saturated(kE4m3Codec, source, 0.005f), beyond);
  EXPECT_GT(beyond, 0u);
  EXPECT_EQ(Saturated(kE4m3Codec, source, 1.0f), 0u);
}

TEST(Fp8, AttentionSinkChannelsSaturateAtScaleOneAndFitACalibratedOne) {
  const auto source = SourceRows(ElementType::kBf16, 64, 2).Fill([](std::int64_t, int c) {
    return c % 16 == 3 ? (c % 32 == 3 ? 600.0f : -600.0f) : 1.0f;
  });
  EXPECT_EQ(Saturated(kE4m3Codec, source, 1.0f), 8u);
  EXPECT_EQ(Saturated(kE4m3Codec, source, 600.0f / 448), 0u);
  EXPECT_EQ(Saturated(kE5m2Codec, source, 1.0f), 0u);
}

TEST(Fp8, NanIs7fAndNoSaturationAndInfinityTheLargestValue) {
  auto source = SourceRows(ElementType::kFp32, 4, 1).Fill([](std::int64_t, int) { return 0.0f; });
  source.Set(0, 0, -std::numeric_limits<float>::quiet_NaN());
  source.Set(0, 1, std::numeric_limits<float>::infinity());
  source.Set(0, 2, -std::numeric_limits<float>::infinity());
  source.Set(0, 3, -0.0f);
  EXPECT_EQ(Hex(Encode(kE4m3Codec, source), 0, 4), "7f7efe80");
  EXPECT_EQ(Hex(Encode(kE5m2Codec, source), 0, 4), "7f7bfb80");
  EXPECT_EQ(Saturated(kE4m3Codec, source, 1.0f), 2u);
}

// Multiplying by 1 / scale would put some values on the other side of a tie.
TEST(Fp8, DividesByTheScale) {
  int apart = 0;
  for (const float scale : {0.07f, 0.3f, 1.7f}) {
    // The ties between 16 and 32, and the fp32 values beside them.
    const auto source = SourceRows(ElementType::kFp32, 24, 1).Fill([&](std::int64_t, int c) {
      const int step = c / 3;
      const float tie = static_cast<float>(17 + 2 * step) * scale;
      return c % 3 == 0 ? tie : std::nextafter(tie, c % 3 == 1 ? 0.0f : 100.0f);
    });
    const auto codes = Encode(kE4m3Codec, source, scale);
    const float inverse = 1.0f / scale;
    for (int c = 0; c < 24; ++c) {
      const float x = source.Get(0, c);
      const auto code = static_cast<std::uint8_t>(codes[static_cast<std::size_t>(c)]);
      EXPECT_EQ(code, FromFloat<E4m3>(x / scale).bits) << x << " / " << scale;
      apart += code != FromFloat<E4m3>(x * inverse).bits ? 1 : 0;
    }
  }
  EXPECT_GT(apart, 0) << "no value tells a division from a multiplication";
}

TEST(Fp8, AnotherTypesCodesReadWrong) {
  auto source = SourceRows(ElementType::kBf16, 4, 1).Fill([](std::int64_t, int c) {
    return std::vector<float>{1.0f, 2.0f, 3.5f, 0.25f}[static_cast<std::size_t>(c)];
  });
  const auto codes = Encode(kE4m3Codec, source);
  EXPECT_THAT(testing::Decode(kE4m3Codec, 4, codes, 0, 1),
              ::testing::ElementsAre(1.0f, 2.0f, 3.5f, 0.25f));
  EXPECT_THAT(testing::Decode(kE5m2Codec, 4, codes, 0, 1),
              ::testing::ElementsAre(0.5f, 2.0f, 6.0f, 0.03125f));
}

std::vector<std::byte> ReadAs(ElementType type, float out_scale, std::uint64_t* saturated) {
  static const auto stored = Encode(kE4m3Codec, GoldenRow(ElementType::kBf16), 0.01f);
  std::vector<std::byte> out(static_cast<std::size_t>(128 * ElementBytes(type)));
  *saturated = DecodeOnHost({.codec = kE4m3Codec,
                             .dim = 128,
                             .scale = 0.01f,
                             .in = stored.data(),
                             .tokens = 1,
                             .out_scale = out_scale,
                             .out = {out.data(), type, 128}});
  return out;
}

TEST(Fp8, PassesThroughAtItsOwnScaleAndIsRescaledAtAnother) {
  const auto source = GoldenRow(ElementType::kBf16);
  const auto stored = Encode(kE4m3Codec, source, 0.01f);
  std::uint64_t saturated = 0;
  EXPECT_EQ(ReadAs(ElementType::kE4m3, 0.01f, &saturated), stored);
  EXPECT_EQ(saturated, 0u);

  const auto values = testing::Decode(kE4m3Codec, 128, stored, 0, 1, 0.01f);
  const auto rescaled = ReadAs(ElementType::kE4m3, 0.005f, &saturated);
  const auto wider = ReadAs(ElementType::kE5m2, 0.01f, &saturated);
  for (std::size_t c = 0; c < 128; ++c) {
    ASSERT_EQ(static_cast<std::uint8_t>(rescaled[c]), FromFloat<E4m3>(values[c] / 0.005f).bits);
    ASSERT_EQ(static_cast<std::uint8_t>(wider[c]), FromFloat<E5m2>(values[c] / 0.01f).bits);
  }
  ReadAs(ElementType::kE4m3, 0.005f, &saturated);
  EXPECT_GT(saturated, 0u);
}

// 448 times a scale above 146 leaves fp16.
TEST(Fp8, ReadSaturatesAndCountsWhatTheOutputCannotHold) {
  const auto source = SourceRows(ElementType::kFp32, 4, 1).Fill([](std::int64_t, int c) {
    return c % 2 == 0 ? 448.0f * 200.0f : -200.0f;
  });
  const auto stored = Encode(kE4m3Codec, source, 200.0f);
  std::vector<std::uint16_t> out(4);
  const std::uint64_t saturated =
      DecodeOnHost({.codec = kE4m3Codec,
                    .dim = 4,
                    .scale = 200.0f,
                    .in = stored.data(),
                    .tokens = 1,
                    .out = {reinterpret_cast<std::byte*>(out.data()), ElementType::kFp16, 4}});
  EXPECT_EQ(saturated, 2u);
  EXPECT_THAT(out, ::testing::ElementsAre(0x7bff, 0xda40, 0x7bff, 0xda40));
}

// A source that is FP8 already keeps its bytes, those of NaN and infinity with them, and those are
// counted.
TEST(Fp8, Fp8SourcesAreKept) {
  for (const ElementType type : {ElementType::kE4m3, ElementType::kE5m2}) {
    std::vector<std::byte> codes(256);
    for (std::size_t i = 0; i < 256; ++i) codes[i] = static_cast<std::byte>(i);
    for (const CodecId id : {CodecId::kRaw, CodecId::kFp8}) {
      std::vector<std::byte> out(256);
      const Codec codec{.id = id, .element = type};
      EXPECT_EQ(EncodeOnHost({codec, 64, 1.0f, {codes.data(), type, 64}, 4, out.data()}),
                type == ElementType::kE4m3 ? 2u : 8u);
      EXPECT_EQ(out, codes);
    }
  }
}

}  // namespace
}  // namespace kvtier::kernels
