#include "kernels/nvfp4.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "tests/kernels/codec_cases.h"
#include "tests/kernels/golden.h"
#include "tests/kernels/rounding_reference.h"
#include "tests/support/seed.h"

namespace kvtier::kernels {
namespace {

using kvtier::testing::SeededRandom;
using testing::Encode;
using testing::GoldenRow;
using testing::Hex;
using testing::NearestValue;
using testing::SourceRows;

constexpr Codec kPlain{.id = CodecId::kNvfp4};
constexpr Codec kFourOverSix{.id = CodecId::kNvfp4FourOverSix};

const NearestValue& E2m1s() {
  static const NearestValue values(1, 1, 7);
  return values;
}

TEST(E2m1, RoundsToTheNearestAndTiesToEven) {
  for (int i = -40'000; i <= 40'000; ++i) {
    const float x = static_cast<float>(i) * 0x1p-12f;
    const std::uint32_t magnitude = std::min(E2m1s().CodeOf(std::fabs(x)), 7u);
    ASSERT_EQ(E2m1Code(x), magnitude | (std::signbit(x) ? 8u : 0u)) << x;
  }
  EXPECT_EQ(E2m1Code(-0.0f), 8u);
  EXPECT_EQ(E2m1Code(1e30f), 7u);
  for (std::uint32_t code = 0; code < 16; ++code) {
    const double value = E2m1s().value(code & 7u);
    EXPECT_EQ(E2m1Value(code), static_cast<float>(code < 8 ? value : -value));
    EXPECT_EQ(std::signbit(E2m1Value(code)), code >= 8);
  }
}

double RelativeError(const SourceRows& source, const std::vector<float>& read) {
  double error = 0, size = 0;
  for (std::size_t c = 0; c < read.size(); ++c) {
    const double x = source.Get(0, static_cast<int>(c));
    error += (read[c] - x) * (read[c] - x);
    size += x * x;
  }
  return std::sqrt(error / size);
}

TEST(Nvfp4, GoldenBytes) {
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
    const SourceRows source = GoldenRow(type);
    const auto row = Encode(kPlain, source);
    ASSERT_EQ(row.size(), 72u);
    EXPECT_EQ(Hex(row, 0, 16), "bfe5692ec7f45a0ed6724cafe6613dc7");
    EXPECT_EQ(Hex(row, 64, 8), "3030303030303030");
    EXPECT_NEAR(RelativeError(source, testing::Decode(kPlain, 128, row, 0, 1)), 0.1029, 5e-5);

    // Blocks 0 to 3 and 5 to 7 err less with their largest magnitude at 4.
    const auto other = Encode(kFourOverSix, source);
    EXPECT_EQ(Hex(other, 64, 8), "3434343430343434");
    EXPECT_NEAR(RelativeError(source, testing::Decode(kFourOverSix, 128, other, 0, 1)), 0.0922,
                5e-5);
  }
}

// The block from its formulas, in doubles.
struct Block {
  std::uint32_t scale = 0;
  std::vector<std::uint32_t> codes;
  double error = 0;
};
Block Reference(const std::vector<float>& x, double scale_of_all, double divisor) {
  static const NearestValue e4m3(3, 7, 0x7e);
  double largest = 0;
  for (const float value : x) largest = std::max(largest, std::fabs(static_cast<double>(value)));
  Block block{std::min(e4m3.CodeOf(largest / divisor / scale_of_all), 0x7eu), {}, 0};
  const double step = e4m3.value(block.scale) * scale_of_all;
  for (const float value : x) {
    const double y = step > 0 ? value / step : 0;
    const std::uint32_t code = std::min(E2m1s().CodeOf(std::fabs(y)), 7u);
    block.codes.push_back(code | (std::signbit(value) ? 8u : 0u));
    block.error += std::pow(std::fabs(value) - E2m1s().value(code) * step, 2);
  }
  return block;
}

// Reciprocals and products round: a tie may fall to the other side, and nothing more.
TEST(Nvfp4, EqualsTheFormulasButAtTies) {
  SeededRandom random;
  int codes = 0, different = 0, choices = 0, others = 0;
  for (int run = 0; run < 3'000; ++run) {
    const float scale = std::ldexp(1.0f + static_cast<float>(random.Between(0, 7)) / 8,
                                   static_cast<int>(random.Between(-6, 2)));
    std::normal_distribution<float> normal(0.0f, static_cast<float>(random.Between(1, 40)));
    const auto source = SourceRows(ElementType::kBf16, 16, 1).Fill([&](std::int64_t, int) {
      return normal(random.engine());
    });
    std::vector<float> x;
    for (int c = 0; c < 16; ++c) x.push_back(source.Get(0, c));
    const Block six = Reference(x, scale, 6), four = Reference(x, scale, 4);
    for (const Codec& codec : {kPlain, kFourOverSix}) {
      const auto row = Encode(codec, source, scale);
      const auto is_of = [&](const Block& block) {
        return std::abs(static_cast<int>(row[8]) - static_cast<int>(block.scale)) <= 1;
      };
      const bool took_four = !is_of(six);
      ASSERT_TRUE(took_four ? is_of(four) : is_of(six));
      const Block& want = took_four ? four : six;
      choices += 1;
      others += took_four != (codec.id == CodecId::kNvfp4FourOverSix && four.error < six.error);
      for (std::size_t c = 0; c < 16; ++c) {
        const auto code = static_cast<std::uint32_t>(row[c / 2]) >> (c % 2 * 4) & 15u;
        ++codes;
        different += code != want.codes[c] ? 1 : 0;
      }
    }
  }
  EXPECT_LE(different, codes / 1000) << "of " << codes;
  EXPECT_LE(others, choices / 200) << "where both err alike";
}

// Without a scale for all, small blocks vanish and large ones saturate; with it neither does.
TEST(Nvfp4, TheScaleOfAllMovesTheRange) {
  const auto row_of = [](float x) {
    return SourceRows(ElementType::kFp32, 16, 1).Fill([x](std::int64_t, int) { return x; });
  };
  for (const auto& [x, scale] : {std::pair{0.005f, 1e-3f}, std::pair{5000.0f, 4.0f}}) {
    const SourceRows source = row_of(x);
    std::vector<std::byte> out(9);
    EXPECT_EQ(EncodeOnHost({kPlain, 16, 1.0f, source.View(), 1, out.data()}), x > 1 ? 16u : 0u);
    EXPECT_EQ(testing::Decode(kPlain, 16, out, 0, 1)[3], x > 1 ? 2688.0f : 0.0f);
    EXPECT_EQ(EncodeOnHost({kPlain, 16, scale, source.View(), 1, out.data()}), 0u);
    EXPECT_NEAR(testing::Decode(kPlain, 16, out, 0, 1, scale)[3], x, 0.07f * x);
  }
}

}  // namespace
}  // namespace kvtier::kernels
