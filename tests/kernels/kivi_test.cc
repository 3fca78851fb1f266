#include "kernels/kivi.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tests/kernels/codec_cases.h"
#include "tests/kernels/golden.h"
#include "tests/kernels/rounding_reference.h"

namespace kvtier::kernels {
namespace {

using testing::GoldenValue;
using testing::GroupIn;
using testing::Half;
using testing::Hex;
using testing::SourceRows;
using testing::StoredGroup;

// One group as it is stored, and what is read from it as fp32.
struct Written {
  StoredGroup group;
  std::vector<float> reads;
};

// x as a channel of K, between two other channels.
Written WriteAsK(ElementType type, const std::vector<float>& x, std::uint8_t bits) {
  const Codec codec{
      .id = CodecId::kKiviChannel, .bits = bits, .group = static_cast<std::uint16_t>(x.size())};
  const auto source = SourceRows(type, 3, codec.group).Fill([&](std::int64_t token, int c) {
    return c == 1 ? x[static_cast<std::size_t>(token)] : static_cast<float>(token * c - 7);
  });
  const auto stored = Encode(codec, source);
  const auto values = testing::Decode(codec, 3, stored, 0, codec.group);
  Written written{GroupIn(codec, 3, stored.data(), 1), {}};
  for (std::size_t i = 0; i < x.size(); ++i) written.reads.push_back(values[3 * i + 1]);
  return written;
}

// x as the second of three groups of a row of V.
Written WriteAsV(ElementType type, const std::vector<float>& x, std::uint8_t bits) {
  const Codec codec{
      .id = CodecId::kKiviToken, .bits = bits, .group = static_cast<std::uint16_t>(x.size())};
  const int group = codec.group;
  const auto source = SourceRows(type, 3 * group, 1).Fill([&](std::int64_t, int c) {
    return c / group == 1 ? x[static_cast<std::size_t>(c % group)] : static_cast<float>(c - 40);
  });
  const auto stored = Encode(codec, source);
  const auto values = testing::Decode(codec, 3 * group, stored, 0, 1);
  return {GroupIn(codec, 3 * group, stored.data(), 1),
          {values.begin() + group, values.begin() + 2 * group}};
}

std::vector<float> Values(const std::function<double(int)>& value) {
  std::vector<float> values;
  for (int i = 0; i < 32; ++i) values.push_back(static_cast<float>(value(i)));
  return values;
}

// Calls check(written) for x as a group of K and as a group of V.
void ForBothDirections(ElementType type, const std::vector<float>& x, std::uint8_t bits,
                       const std::function<void(const Written&)>& check) {
  {
    SCOPED_TRACE("as K, bits " + std::to_string(bits));
    check(WriteAsK(type, x, bits));
  }
  {
    SCOPED_TRACE("as V, bits " + std::to_string(bits));
    check(WriteAsV(type, x, bits));
  }
}

struct Golden {
  std::uint8_t bits;
  std::vector<float> x;
  const char* codes;  // bytes in order
  std::uint16_t scale, minimum;
  std::vector<std::string> reads;
};

std::string Printed(float x) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", x);
  return text;
}

void ExpectGolden(ElementType type, const Golden& golden) {
  ForBothDirections(type, golden.x, golden.bits, [&](const Written& written) {
    EXPECT_EQ(Hex(written.group.codes), golden.codes);
    EXPECT_EQ(written.group.scaling.scale, golden.scale);
    EXPECT_EQ(written.group.scaling.minimum, golden.minimum);
    for (std::size_t i = 0; i < golden.reads.size(); ++i) {
      EXPECT_EQ(Printed(written.reads[i]), golden.reads[i]) << i;
    }
  });
}

// From the authors' quant/new_pack.py.
TEST(KiviAsPublished, GoldenGroups) {
  const auto line = Values([](int i) { return 0.25 * i - 3.0; });
  const auto sine = Values([](int i) { return 2 * std::sin(i); });
  const Golden goldens[] = {
      {2, line, "00505555aaaafaff", 0x412b, 0xc200, {"-3", "-3"}},
      {2, sine, "be901bb9811ff446", 0x3d4f, 0xc000, {}},
      {4, sine, "e89e02c5bf03b3cf0592ee1771fd3a40", 0x343f, 0xc000, {}},
      {8,
       sine,
       "80ecf5921f055cd4ffb53a003bb6ffd45b052093f5eb7f140c6fe2fba32b024c",
       0x23fe,
       0xc000,
       {}},
  };
  for (const Golden& golden : goldens) ExpectGolden(ElementType::kFp16, golden);
}

// The reference's own read rounds to fp16 twice: of the stored group it gives its golden values,
// and kvtier's read lies within a unit of the last place.
TEST(KiviAsPublished, ReferencesReadOfAStoredGroup) {
  const auto sine = Values([](int i) { return 2 * std::sin(i); });
  const Written written = WriteAsV(ElementType::kFp16, sine, 2);
  const double scale = ToFloat(Fp16{written.group.scaling.scale});
  const double minimum = ToFloat(Fp16{written.group.scaling.minimum});
  const double want[] = {0.6543, 1.9805, 1.9805, 0.6543, -2, -2};
  for (std::size_t i = 0; i < std::size(want); ++i) {
    const int code = written.group.codes[i / 4] >> (2 * (i % 4)) & 3;
    EXPECT_NEAR(Half(Half(code * scale) + minimum), want[i], 5e-5);
    EXPECT_NEAR(written.reads[i], want[i], 2e-3);
    EXPECT_EQ(written.reads[i], static_cast<float>(code * scale + minimum));
  }
}

float InBf16(double x) { return ToFloat(FromFloat<Bf16>(static_cast<float>(x))); }

TEST(KiviInFp32, GoldenGroups) {
  const auto steps = Values(GoldenValue);
  const auto shifted = Values([](int i) { return InBf16(100 + 2 * std::sin(i)); });
  const auto constant = Values([](int) { return 1.5; });
  const auto growing =
      Values([](int i) { return InBf16(3 * std::pow(std::sin(i), 3) * std::exp(i / 16.0)); });
  const Golden goldens[] = {
      {2, steps, "249d2749e749e279", 0x402b, 0xc240, {"-3.125", "-1.04102", "1.04297", "-3.125"}},
      {4,
       steps,
       "601bd7934e0ac6723df9a5612cd8945f",
       0x36ab,
       0xc240,
       {"-3.125", "-0.624512", "1.45923", "-2.70825"}},
      {2,
       shifted,
       "bed01bf9812ff442",
       0x3d55,
       0x5620,
       {"100.666", "101.999", "101.999", "100.666"}},
      {4,
       shifted,
       "d89f02d6bf04b4df0692df2860fd2940",
       0x3444,
       0x5620,
       {"100.133", "101.466", "101.999", "100.399"}},
      {2, constant, "0000000000000000", 0x0000, 0x3e00, {"1.5", "1.5", "1.5", "1.5"}},
      {2,
       growing,
       "aaa66aaa966ae986",
       0x4983,
       0xccb8,
       {"3.17188", "3.17188", "3.17188", "3.17188"}},
      {4,
       growing,
       "999a78999b6898ac5897cc5994fc6980",
       0x4069,
       0xccb8,
       {"0.970703", "0.970703", "3.17578", "0.970703"}},
  };
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp32}) {
    for (const Golden& golden : goldens) ExpectGolden(type, golden);
  }
}

constexpr ElementType kSources[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};

TEST(Kivi, ConstantGroupReadsItsValueExactly) {
  for (const ElementType type : kSources) {
    for (const std::uint8_t bits : testing::kKiviBits) {
      for (const double value : {1.5, -0.0078125, 32752.0, -32752.0, 0.0}) {
        const auto x = Values([&](int) { return value; });
        const auto expected = static_cast<float>(
            type == ElementType::kBf16 ? static_cast<double>(InBf16(value)) : value);
        if (std::fabs(expected) > kKiviLimit) continue;
        ForBothDirections(type, x, bits, [&](const Written& written) {
          EXPECT_EQ(written.group.scaling.scale, 0);
          EXPECT_THAT(written.group.codes, ::testing::Each(0));
          EXPECT_THAT(written.reads, ::testing::Each(expected));
        });
      }
    }
  }
}

TEST(Kivi, NegativeZeroIsZero) {
  for (const ElementType type : kSources) {
    ForBothDirections(type, Values([](int) { return -0.0; }), 2, [](const Written& written) {
      EXPECT_EQ(written.group.scaling.scale, 0);
      EXPECT_EQ(written.group.scaling.minimum, 0);
      for (const float read : written.reads) EXPECT_FALSE(std::signbit(read));
    });
    for (const int first : {0, 1}) {  // whichever zero comes first
      const auto mixed =
          Values([&](int i) { return i == 9 ? 3.0 : (i % 2 == first ? -0.0 : 0.0); });
      ForBothDirections(type, mixed, 2, [](const Written& written) {
        EXPECT_EQ(written.group.scaling.minimum, 0);
      });
    }
  }
}

TEST(KiviAsPublished, TwoNeighboursAreExact) {
  const auto x = Values([](int i) { return i == 5 ? 1 + 0x1p-10 : 1.0; });
  ForBothDirections(ElementType::kFp16, x, 2, [&](const Written& written) {
    EXPECT_NEAR(ToFloat(Fp16{written.group.scaling.scale}), 3.2544e-4, 1e-8);
    for (std::size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(RoundToFp16(written.reads[i]), x[i]) << i;
    }
  });
}

// A range whose third underflows: the scale is 0 and so are all codes, where the reference stores
// code 3 beside a scale of 0.
TEST(Kivi, ScaleThatUnderflowsStoresCodeZero) {
  const auto x = Values([](int i) { return i == 0 ? 0x1p-24 : 0.0; });
  for (const ElementType type : kSources) {
    ForBothDirections(type, x, 2, [](const Written& written) {
      EXPECT_EQ(written.group.scaling.scale, 0);
      EXPECT_EQ(Hex(written.group.codes), "0000000000000000");
      EXPECT_THAT(written.reads, ::testing::Each(0.0f));
    });
  }
}

TEST(Kivi, LargestRangeHasAFiniteScale) {
  for (const ElementType type : {ElementType::kFp16, ElementType::kFp32}) {
    for (const std::uint8_t bits : testing::kKiviBits) {
      const auto x = Values([](int i) { return i % 2 == 0 ? kKiviLimit : -kKiviLimit; });
      ForBothDirections(type, x, bits, [&](const Written& written) {
        const float scale = ToFloat(Fp16{written.group.scaling.scale});
        ASSERT_TRUE(IsFinite(scale));
        for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(written.reads[i], x[i], scale / 2);
      });
    }
  }
}

// A minimum is the data's, not a zero that some padding brought in.
TEST(Kivi, PositiveDataHasAPositiveMinimum) {
  for (const int dim : {80, 96, 112}) {
    for (const CodecId id : {CodecId::kKiviChannel, CodecId::kKiviToken}) {
      const Codec codec{.id = id, .bits = 4, .group = 16};
      const auto source =
          SourceRows(ElementType::kBf16, dim, 16).Fill([](std::int64_t token, int c) {
            return 5.0f + static_cast<float>((token + c) % 16) / 16;
          });
      const auto stored = Encode(codec, source);
      const int lanes = id == CodecId::kKiviChannel ? dim : dim / 16;
      for (int lane = 0; lane < lanes; ++lane) {
        EXPECT_EQ(testing::ScaleIn(codec, dim, stored.data(), lane).minimum, 0x4500)
            << dim << " " << lane;
      }
    }
  }
}

// code * scale + minimum is exact in fp64 for all codes and fp16 words, so rounding that sum once
// is what a fused operation gives.
TEST(Kivi, ReadRoundsOnce) {
  std::mt19937 random(3);
  const auto any_half = [&] {
    const float half = ToFloat(Fp16{static_cast<std::uint16_t>(random() % 0x7c00u)});
    return random() % 2 == 0 ? half : -half;
  };
  for (int i = 0; i < 1'000'000; ++i) {
    const auto code = static_cast<std::uint32_t>(random() % 256u);
    const float scale = std::fabs(any_half()), minimum = any_half();
    const double exact = static_cast<double>(code) * scale + minimum;
    ASSERT_EQ(KiviValue(code, scale, minimum), static_cast<float>(exact))
        << code << " * " << scale << " + " << minimum;
  }
}

// How far the two levels of arithmetic lie apart on the same values, by share of codes.
struct Range {
  std::uint8_t bits;
  double least, most;
};
TEST(Kivi, LevelsDifferInFewCodesAndByOne) {
  constexpr int kTokens = 977, kDim = 1024;
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  const auto halves = SourceRows(ElementType::kFp16, kDim, kTokens).Fill([&](std::int64_t, int) {
    return normal(random);
  });
  const auto floats =
      SourceRows(ElementType::kFp32, kDim, kTokens).Fill([&](std::int64_t token, int c) {
        return halves.Get(token, c);
      });
  for (const Range& range : {Range{2, 0.0003, 0.0008}, Range{4, 0.002, 0.004}}) {
    const Codec codec{.id = CodecId::kKiviToken, .bits = range.bits, .group = 32};
    const auto a = Encode(codec, halves), b = Encode(codec, floats);
    const auto row_bytes = static_cast<std::size_t>(UnitSizeOf(codec, kDim).total());
    const auto code_bytes = static_cast<std::size_t>(UnitSizeOf(codec, kDim).codes);
    int apart = 0, largest = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (i % row_bytes >= code_bytes) continue;
      for (int shift = 0; shift < 8; shift += range.bits) {
        const int mask = (1 << range.bits) - 1;
        const int difference = std::abs((static_cast<int>(a[i]) >> shift & mask) -
                                        (static_cast<int>(b[i]) >> shift & mask));
        apart += difference != 0 ? 1 : 0;
        largest = std::max(largest, difference);
      }
    }
    const double share = static_cast<double>(apart) / (kTokens * kDim);
    EXPECT_GE(share, range.least) << int{range.bits};
    EXPECT_LE(share, range.most) << int{range.bits};
    EXPECT_EQ(largest, 1) << int{range.bits};
  }
}

}  // namespace
}  // namespace kvtier::kernels
