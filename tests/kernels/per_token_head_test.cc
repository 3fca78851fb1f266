#include "kernels/per_token_head.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tests/kernels/codec_cases.h"
#include "tests/kernels/golden.h"

namespace kvtier::kernels {
namespace {

using testing::Encode;
using testing::GoldenRow;
using testing::Hex;
using testing::SourceRows;

constexpr Codec kInt8{.id = CodecId::kInt8PerTokenHead};
constexpr Codec kFp8{.id = CodecId::kFp8PerTokenHead};

std::uint32_t ScaleBits(const std::vector<std::byte>& stored, int dim, int row) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, stored.data() + std::ptrdiff_t{row} * (dim + 4) + dim, 4);
  return bits;
}
int Int8At(const std::vector<std::byte>& stored, std::size_t at) {
  return static_cast<std::int8_t>(stored[at]);
}

TEST(Int8PerTokenHead, GoldenBytes) {
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
    const auto row = Encode(kInt8, GoldenRow(type));
    ASSERT_EQ(row.size(), 132u);
    EXPECT_EQ(ScaleBits(row, 128, 0), 0x3cc99326u);
    std::vector<int> codes;
    int sum = 0;
    for (std::size_t c = 0; c < 128; ++c) {
      sum += Int8At(row, c);
      if (c < 16) codes.push_back(Int8At(row, c));
    }
    EXPECT_THAT(codes, ::testing::ElementsAre(-127, -33, 61, -102, -8, 86, -76, 18, 112, -51, 43,
                                              -119, -25, 69, -94, 0));
    EXPECT_EQ(sum, -201);
  }
}

TEST(Fp8PerTokenHead, GoldenBytes) {
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
    const auto row = Encode(kFp8, GoldenRow(type));
    ASSERT_EQ(row.size(), 132u);
    EXPECT_EQ(ScaleBits(row, 128, 0), 0x3be49249u);
    EXPECT_EQ(Hex(row, 0, 16), "feef75fbdd7af8687cf372fdeb77fa00");
    EXPECT_EQ(testing::Sum(row, 0, 128), 22707);
  }
}

TEST(PerTokenHead, ZeroRowsStayZero) {
  for (const Codec& codec : {kInt8, kFp8}) {
    const auto zeros =
        SourceRows(ElementType::kBf16, 64, 1).Fill([](std::int64_t, int) { return 0.0f; });
    const auto row = Encode(codec, zeros);
    EXPECT_EQ(FromBits(ScaleBits(row, 64, 0)), 1e-6f);
    EXPECT_EQ(testing::Sum(row, 0, 64), 0);
    EXPECT_THAT(testing::Decode(codec, 64, row, 0, 1), ::testing::Each(0.0f));
  }
}

// A row's scale stands behind its own codes, little endian, and is its own: row r has the largest
// magnitude 127 * 2^r (int8) or 448 * 2^r.
TEST(PerTokenHead, EachRowHasItsScaleInline) {
  for (const Codec& codec : {kInt8, kFp8}) {
    const float largest = codec == kInt8 ? 127.0f : 448.0f;
    const auto source = SourceRows(ElementType::kFp32, 100, 5).Fill([&](std::int64_t token, int c) {
      return std::ldexp(c == 99 ? -largest : 1.0f, static_cast<int>(token));
    });
    const auto stored = Encode(codec, source);
    ASSERT_EQ(stored.size(), 5u * 104u);
    for (int row = 0; row < 5; ++row) {
      EXPECT_EQ(FromBits(ScaleBits(stored, 100, row)), std::ldexp(1.0f, row));
    }
    EXPECT_EQ(Hex(stored, 104 + 100, 4), "00000040");  // 2.0f
    const auto values = testing::Decode(codec, 100, stored, 0, 5);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto row = static_cast<std::int64_t>(i / 100);
      ASSERT_EQ(values[i], source.Get(row, static_cast<int>(i % 100)));
    }
  }
}

// With a scale of 1, codes show how values round.
std::vector<std::byte> EncodeBehind(const Codec& codec, float largest,
                                    const std::vector<float>& values) {
  const auto source = SourceRows(ElementType::kFp32, 16, 1).Fill([&](std::int64_t, int c) {
    const auto at = static_cast<std::size_t>(c);
    return at < values.size() ? values[at] : largest;
  });
  const auto row = Encode(codec, source);
  EXPECT_EQ(FromBits(ScaleBits(row, 16, 0)), 1.0f);
  return row;
}

TEST(Int8PerTokenHead, RoundsHalfAwayFromZero) {
  const auto row = EncodeBehind(
      kInt8, 127.0f, {0.5f, -0.5f, 2.5f, -2.5f, 2.49f, -2.49f, 126.5f, -126.5f, 0.49f, -127.0f});
  std::vector<int> codes;
  for (std::size_t c = 0; c < 10; ++c) codes.push_back(Int8At(row, c));
  EXPECT_THAT(codes, ::testing::ElementsAre(1, -1, 3, -3, 2, -2, 127, -127, 0, -127));
}

TEST(Fp8PerTokenHead, RoundsHalfToEven) {
  const auto row = EncodeBehind(kFp8, 448.0f, {1.0625f, 1.1875f, -1.0625f, 0x1p-10f, -0.0f});
  EXPECT_EQ(Hex(row, 0, 5), "383ab80080");
}

// Dividing by the scale would give another code for some value.
TEST(Int8PerTokenHead, MultipliesByTheReciprocal) {
  std::mt19937 random(5);
  int apart = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const float amax = 1.0f + static_cast<float>(random() % 1000) / 997.0f;
    const float scale = amax / 127.0f;
    const float inverse = 1.0f / scale;
    // Next to the ties of this scale.
    const auto source = SourceRows(ElementType::kFp32, 256, 1).Fill([&](std::int64_t, int c) {
      if (c == 0) return amax;
      const float tie = (static_cast<float>(c % 126) + 0.5f) * scale;
      return c < 126 ? tie : std::nextafter(tie, 0.0f);
    });
    const auto row = Encode(kInt8, source);
    for (int c = 0; c < 256; ++c) {
      const float x = source.Get(0, c);
      const int code = Int8At(row, static_cast<std::size_t>(c));
      ASSERT_EQ(code, std::min(127, static_cast<int>(x * inverse + 0.5f)));
      apart += code != std::min(127, static_cast<int>(x / scale + 0.5f)) ? 1 : 0;
    }
  }
  EXPECT_GT(apart, 0) << "no value tells a multiplication from a division";
}

// A floor of the scale that is too high would turn small rows into zeros.
TEST(PerTokenHead, SmallRowsKeepTheirRelativePrecision) {
  for (const Codec& codec : {kInt8, kFp8}) {
    const auto source = SourceRows(ElementType::kFp32, 64, 1).Fill([](std::int64_t, int c) {
      return 1e-3f * std::sin(static_cast<float>(c));
    });
    const auto values = testing::Decode(codec, 64, Encode(codec, source), 0, 1);
    for (int c = 0; c < 64; ++c) {
      EXPECT_NEAR(values[static_cast<std::size_t>(c)], source.Get(0, c), 1e-3 / 25);
    }
  }
}

}  // namespace
}  // namespace kvtier::kernels
