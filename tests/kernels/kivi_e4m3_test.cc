// KIVI with scales and minima in E4M3, kvtier's own: half the bytes, and the codes reach from the
// least to the largest value all the same.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/kivi.h"
#include "tests/kernels/codec_cases.h"
#include "tests/kernels/rounding_reference.h"
#include "tests/support/seed.h"

namespace kvtier::kernels {
namespace {

using kvtier::testing::SeededRandom;
using testing::NearestValue;
using testing::SourceRows;

const NearestValue& E4m3s() {
  static const NearestValue values(3, 7, 0x7e);
  return values;
}

// The least E4M3 value that is not below x >= 0, and the largest that is not above.
std::uint32_t CodeAbove(double x) {
  std::uint32_t code = 0;
  while (E4m3s().value(code) < x) ++code;
  return code;
}
std::uint32_t CodeBelow(double x) {
  std::uint32_t code = 0;
  while (code < 0x7e && E4m3s().value(code + 1) <= x) ++code;
  return code;
}

TEST(KiviE4m3, MinimumDownScaleUp) {
  SeededRandom random;
  for (int run = 0; run < 4'000; ++run) {
    const double size = std::ldexp(1.0, static_cast<int>(random.Between(-12, 8)));
    const auto value = [&] {
      return static_cast<float>(
          std::clamp(size * static_cast<double>(random.Between(-1000, 1000)) / 500, -448.0, 448.0));
    };
    const float a = value(), b = random.OneIn(10) ? a : value();
    const float low = std::min(a, b) + 0.0f, high = std::max(a, b) + 0.0f;
    const KiviGroup<E4m3> group = KiviGroupInE4m3(low, high, 3.0f);
    const std::uint32_t minimum = low < 0 ? CodeAbove(-low) | 0x80u : CodeBelow(low);
    ASSERT_EQ(group.minimum.bits, minimum) << low;
    const double stored = low < 0 ? -E4m3s().value(minimum & 0x7fu) : E4m3s().value(minimum);
    ASSERT_EQ(group.scale.bits, CodeAbove(static_cast<float>(high - stored) / 3.0f))
        << low << " to " << high;
  }
}

TEST(KiviE4m3, ErrsByHalfAStepWhereverTheGroupLies) {
  SeededRandom random;
  for (const CodecId id : {CodecId::kKiviChannel, CodecId::kKiviToken}) {
    for (const std::uint8_t bits : testing::kKiviBits) {
      const Codec codec{.id = id, .element = ElementType::kE4m3, .bits = bits, .group = 32};
      const int dim = id == CodecId::kKiviChannel ? 20 : 640;
      const std::int64_t tokens = id == CodecId::kKiviChannel ? 32 : 1;
      const auto lane_of = [&](int c) { return id == CodecId::kKiviChannel ? c : c / 32; };
      // Lane 3 lies around 100 with a range of 4: far from 0, for its range.
      const auto source =
          SourceRows(ElementType::kBf16, dim, tokens).Fill([&](std::int64_t, int c) {
            const float unit = static_cast<float>(random.Between(-64, 64)) / 64;
            return lane_of(c) == 3 ? 100 + 2 * unit : std::ldexp(unit, lane_of(c) % 9);
          });
      const auto stored = testing::Encode(codec, source);
      const auto read = testing::Decode(codec, dim, stored, 0, tokens);
      for (std::int64_t token = 0; token < tokens; ++token) {
        for (int c = 0; c < dim; ++c) {
          const auto words = testing::ScaleIn(codec, dim, stored.data(), lane_of(c));
          const float step = ToFloat(E4m3{static_cast<std::uint8_t>(words.scale)});
          ASSERT_NEAR(read[static_cast<std::size_t>(token * dim + c)], source.Get(token, c),
                      0.5001f * step)
              << testing::NameOf(codec) << ", channel " << c;
        }
      }
    }
  }
}

TEST(KiviE4m3, ConstantGroupsThatE4m3HoldsAreExact) {
  const Codec codec{
      .id = CodecId::kKiviChannel, .element = ElementType::kE4m3, .bits = 2, .group = 16};
  const float constants[] = {0.0f, -0.0f, 1.5f, -448.0f, 448.0f, 0x1p-9f};
  const auto source =
      SourceRows(ElementType::kFp16, 6, 16).Fill([&](std::int64_t, int c) { return constants[c]; });
  const auto read = testing::Decode(codec, 6, testing::Encode(codec, source), 0, 16);
  for (std::size_t i = 0; i < read.size(); ++i) EXPECT_EQ(read[i], constants[i % 6]);
}

}  // namespace
}  // namespace kvtier::kernels
