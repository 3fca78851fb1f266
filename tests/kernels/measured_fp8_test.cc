// FP8 with scales that are measured: DeepSeek's cell and kvtier's page.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/fp8_page.h"
#include "kernels/mla_fp8.h"
#include "tests/kernels/codec_cases.h"
#include "tests/kernels/golden.h"

namespace kvtier::kernels {
namespace {

using testing::Encode;
using testing::GoldenValue;
using testing::SourceRows;

constexpr Codec kMla{.id = CodecId::kMlaFp8};
constexpr Codec kPage{.id = CodecId::kFp8Page, .element = ElementType::kE4m3, .group = 16};

float FloatAt(const std::vector<std::byte>& bytes, std::size_t at) {
  float value = 0;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

TEST(MlaFp8, TheCellOf656Bytes) {
  // Tile t's largest magnitude is 448 * 2^t, its scale so 2^t; the last is a hair above and takes
  // the next power of two.
  const auto source = SourceRows(ElementType::kFp32, 576, 1).Fill([](std::int64_t, int c) {
    if (c >= 512) return GoldenValue(c - 512);
    const int tile = c / 128;
    if (c % 128 == 5) return std::ldexp(tile == 3 ? 448.001f : 448.0f, tile);
    return std::ldexp(GoldenValue(c % 128), tile);
  });
  const auto cell = Encode(kMla, source);
  ASSERT_EQ(cell.size(), 656u);
  EXPECT_EQ(FloatAt(cell, 512), 1.0f);
  EXPECT_EQ(FloatAt(cell, 516), 2.0f);
  EXPECT_EQ(FloatAt(cell, 520), 4.0f);
  EXPECT_EQ(FloatAt(cell, 524), 16.0f);
  for (int c = 0; c < 512; ++c) {
    if (c % 128 == 5) continue;
    const float y = c < 384 ? GoldenValue(c % 128) : GoldenValue(c % 128) / 2;
    ASSERT_EQ(static_cast<std::uint8_t>(cell[static_cast<std::size_t>(c)]), FromFloat<E4m3>(y).bits)
        << c;
  }
  for (int c = 0; c < 64; ++c) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, cell.data() + 528 + 2 * c, 2);
    ASSERT_EQ(bits, FromFloat<Bf16>(GoldenValue(c)).bits) << "rotary channels are kept";
  }
}

TEST(MlaFp8, SmallTilesHaveTheSmallestScale) {
  const auto zeros =
      SourceRows(ElementType::kBf16, 576, 1).Fill([](std::int64_t, int) { return 0.0f; });
  const auto cell = Encode(kMla, zeros);
  EXPECT_EQ(FloatAt(cell, 512), 0x1p-13f) << "1e-4, rounded up to a power of two";
  for (const float value : testing::Decode(kMla, 576, cell, 0, 1)) EXPECT_EQ(value, 0.0f);
}

// Each unit is measured alone and nothing in it saturates, whatever its size.
TEST(Fp8Page, EachPageHasItsScale) {
  for (const int power : {-140, -20, 0, 9, 120}) {
    const auto source = SourceRows(ElementType::kFp32, 64, 48).Fill([&](std::int64_t token, int c) {
      const float page = token < 16 ? 1.0f : (token < 32 ? 8.0f : 0.0f);
      return page * std::ldexp(GoldenValue(static_cast<int>(token % 16) * 64 + c), power);
    });
    std::vector<std::byte> out(3 * (16 * 64 + 4));
    EXPECT_EQ(EncodeOnHost({kPage, 64, 1.0f, source.View(), 3, out.data()}), 0u);
    const float largest = std::ldexp(3.125f, power);
    EXPECT_EQ(FloatAt(out, 1024), std::max(largest / 448.0f, 0x1p-126f));
    EXPECT_EQ(FloatAt(out, 1028 + 1024), std::max(8 * largest / 448.0f, 0x1p-126f));
    EXPECT_EQ(FloatAt(out, 2 * 1028 + 1024), 1.0f) << "a page of zeros";
    const auto read = testing::Decode(kPage, 64, out, 0, 48);
    for (int i = 0; i < 48 * 64; ++i) {
      const float x = source.Get(i / 64, i % 64);
      const float step = i < 1024 ? largest : 8 * largest;  // subnormal codes err by half of theirs
      ASSERT_NEAR(read[static_cast<std::size_t>(i)], x,
                  std::fabs(x) / 16 + step / 448 * 0x1p-10f + 0x1p-136f)
          << i;
    }
  }
}

}  // namespace
}  // namespace kvtier::kernels
