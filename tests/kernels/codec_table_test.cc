#include "kernels/codec_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kernels/host_codec.h"
#include "tests/kernels/codec_cases.h"

namespace kvtier::kernels {
namespace {

using testing::AllCodecs;
using testing::Encode;
using testing::NameOf;
using testing::SourceRows;

constexpr int kDims[] = {64, 80, 96, 100, 112, 128, 192, 256, 512, 576};
constexpr ElementType kSources[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};

bool Takes(const Codec& codec, int dim) { return dim % DimMultiple(codec) == 0; }

TEST(CodecTable, EveryRowHasANameOfItsOwnAndACaseHere) {
  std::set<CodecId> ids;
  std::set<std::string> names;
  for (const Codec& codec : AllCodecs()) {
    EXPECT_EQ(RowOf(codec.id).id, codec.id);
    ids.insert(codec.id);
    names.insert(RowOf(codec.id).name);
  }
  EXPECT_EQ(names.size(), ids.size());
  EXPECT_EQ(static_cast<std::size_t>(*ids.rbegin()), ids.size()) << "ids count from 1";
  EXPECT_DEATH(RowOf(static_cast<CodecId>(ids.size() + 1)), "")
      << "a row was added: add its codecs to AllCodecs()";
}

struct SizeCase {
  Codec codec;
  int dim = 0, unit_tokens = 0;
  std::int64_t codes = 0, scales = 0;
};
const SizeCase kSizes[] = {
    {{.id = CodecId::kRaw, .element = ElementType::kBf16}, 128, 1, 256, 0},
    {{.id = CodecId::kRaw, .element = ElementType::kFp32}, 100, 1, 400, 0},
    {{.id = CodecId::kRaw, .element = ElementType::kE5m2}, 576, 1, 576, 0},
    {{.id = CodecId::kFp8, .element = ElementType::kE4m3}, 128, 1, 128, 0},
    {{.id = CodecId::kInt8PerTokenHead}, 128, 1, 128, 4},
    {{.id = CodecId::kFp8PerTokenHead}, 96, 1, 96, 4},
    {{.id = CodecId::kLlamaQ8}, 128, 1, 128, 8},
    {{.id = CodecId::kLlamaQ4}, 96, 1, 48, 6},
    {{.id = CodecId::kNvfp4}, 128, 1, 64, 8},
    {{.id = CodecId::kNvfp4FourOverSix}, 80, 1, 40, 5},
    {{.id = CodecId::kInt4PerTokenHead}, 128, 1, 64, 4},
    {{.id = CodecId::kMlaFp8}, 576, 1, 640, 16},
    {{.id = CodecId::kMlaFp8}, 0, 1, 0, 0},
    {{.id = CodecId::kFp8Page, .element = ElementType::kE4m3, .group = 128}, 64, 128, 8192, 4},
    {{.id = CodecId::kKiviChannel, .bits = 2, .group = 32}, 128, 32, 1024, 512},
    {{.id = CodecId::kKiviChannel, .element = ElementType::kE4m3, .bits = 2, .group = 32},
     128,
     32,
     1024,
     256},
    {{.id = CodecId::kKiviToken, .element = ElementType::kE4m3, .bits = 4, .group = 32},
     128,
     1,
     64,
     8},
    {{.id = CodecId::kKiviChannel, .bits = 4, .group = 4}, 80, 4, 160, 320},
    {{.id = CodecId::kKiviChannel, .bits = 8, .group = 64}, 576, 64, 36864, 2304},
    {{.id = CodecId::kKiviToken, .bits = 2, .group = 32}, 128, 1, 32, 16},
    {{.id = CodecId::kKiviToken, .bits = 4, .group = 16}, 112, 1, 56, 28},
};
TEST(CodecTable, Sizes) {
  for (const SizeCase& want : kSizes) {
    const UnitSize size = UnitSizeOf(want.codec, want.dim);
    EXPECT_EQ(UnitTokens(want.codec), want.unit_tokens) << NameOf(want.codec);
    EXPECT_EQ(size.codes, want.codes) << NameOf(want.codec);
    EXPECT_EQ(size.scales, want.scales) << NameOf(want.codec);
  }
}

TEST(CodecTable, DimMultiples) {
  EXPECT_FALSE(Takes({.id = CodecId::kInt8PerTokenHead}, 98));
  EXPECT_TRUE(Takes({.id = CodecId::kInt8PerTokenHead}, 100));
  EXPECT_FALSE(Takes({.id = CodecId::kLlamaQ8}, 100));
  EXPECT_TRUE(Takes({.id = CodecId::kLlamaQ4}, 96));
  EXPECT_FALSE(Takes({.id = CodecId::kKiviToken, .bits = 2, .group = 64}, 96));
  EXPECT_TRUE(Takes({.id = CodecId::kKiviToken, .bits = 2, .group = 32}, 96));
  EXPECT_TRUE(Takes({.id = CodecId::kKiviChannel, .bits = 2, .group = 64}, 100));
  EXPECT_FALSE(Takes({.id = CodecId::kNvfp4}, 100));
  EXPECT_TRUE(Takes({.id = CodecId::kNvfp4}, 80));
  EXPECT_TRUE(Takes({.id = CodecId::kInt4PerTokenHead}, 100));
  EXPECT_FALSE(Takes({.id = CodecId::kMlaFp8}, 512));
  EXPECT_TRUE(Takes({.id = CodecId::kMlaFp8}, 576));
  EXPECT_FALSE(Takes({.id = CodecId::kFp8, .rotation = Rotation::kHadamard}, 3));
}

// Magnitudes of many sizes, without NaN, saturation or subnormal fp16 values.
SourceRows RandomRows(ElementType type, int dim, std::int64_t tokens, std::int64_t stride) {
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  return SourceRows(type, dim, tokens, stride).Fill([&](std::int64_t, int c) {
    const float offset = c % 16 == 5 ? 30.0f : (c % 16 == 13 ? -30.0f : 0.0f);
    return std::clamp((normal(random) + offset) * static_cast<float>(1 << c % 4), -440.0f, 440.0f);
  });
}

struct Scaling {
  float scale = 0.0f;
  float minimum = 0.0f;
};

Scaling ScalingOf(const Codec& codec, int dim, const std::vector<std::byte>& stored,
                  std::int64_t token, int channel) {
  const std::byte* unit =
      stored.data() + token / UnitTokens(codec) * UnitSizeOf(codec, dim).total();
  if (testing::IsKivi(codec)) {
    const int lane = codec.id == CodecId::kKiviChannel ? channel : channel / codec.group;
    const auto words = testing::ScaleIn(codec, dim, unit, lane);
    if (codec.element == ElementType::kE4m3) {
      const auto byte = [](std::uint16_t word) {
        return ToFloat(E4m3{static_cast<std::uint8_t>(word)});
      };
      return {byte(words.scale), byte(words.minimum)};
    }
    return {ToFloat(Fp16{words.scale}), ToFloat(Fp16{words.minimum})};
  }
  Scaling scaling;
  if (codec.id == CodecId::kLlamaQ8 || codec.id == CodecId::kLlamaQ4) {
    Fp16 d{};
    std::memcpy(&d, unit + channel / 32 * (codec.id == CodecId::kLlamaQ8 ? 34 : 18), 2);
    return {std::fabs(ToFloat(d)), 0.0f};
  }
  if (codec.id == CodecId::kNvfp4 || codec.id == CodecId::kNvfp4FourOverSix) {
    return {ToFloat(E4m3{static_cast<std::uint8_t>(unit[dim / 2 + channel / 16])}), 0.0f};
  }
  if (codec.id == CodecId::kFp8Page) return scaling;  // the budget is of the value
  const UnitSize size = UnitSizeOf(codec, dim);
  if (size.scales == 4) std::memcpy(&scaling.scale, unit + size.codes, 4);
  return scaling;
}

// The largest error of the rows, as the table's column counts it.
double LargestError(const Codec& codec, const SourceRows& source,
                    const std::vector<std::byte>& stored) {
  const int dim = source.dim();
  const auto values = testing::Decode(codec, dim, stored, 0, source.tokens());
  double largest = 0;
  for (std::int64_t token = 0; token < source.tokens(); ++token) {
    for (int c = 0; c < dim; ++c) {
      const double x = source.Get(token, c);
      const double error = std::fabs(values[static_cast<std::size_t>(token * dim + c)] - x);
      const Scaling scaling = ScalingOf(codec, dim, stored, token, c);
      const double besides =
          source.type() == ElementType::kFp32 ? std::fabs(scaling.minimum) * 0x1p-11 : 0.0;
      if (scaling.scale == 0.0f && std::fabs(x) < 0x1p-6) continue;  // subnormal in E4M3
      const double unit = scaling.scale > 0.0f ? scaling.scale : std::fabs(x);
      largest = std::max(largest, std::max(0.0, error - besides) / unit);
    }
  }
  return largest;
}

std::int64_t SomeTokens(const Codec& codec) {
  return UnitTokens(codec) == 1 ? 9 : (codec.group < 64 ? 2 * codec.group : codec.group);
}

// Over all dims and sources no error exceeds the budget, and some comes near it, so that the budget
// is no larger than it must be.
TEST(CodecTable, ErrorsFillTheBudgetAndNoMore) {
  for (const Codec& codec : AllCodecs()) {
    SCOPED_TRACE(NameOf(codec));
    if (codec.rotation != Rotation::kNone) continue;  // errors are of the rotated row
    const double budget = RowOf(codec.id).error_budget(codec);
    double largest = 0;
    for (const int dim : kDims) {
      if (!Takes(codec, dim)) continue;
      for (const ElementType type : kSources) {
        const auto source = RandomRows(type, dim, SomeTokens(codec), dim);
        const double error = LargestError(codec, source, Encode(codec, source));
        ASSERT_LE(error, budget) << "dim " << dim << ", " << ElementName(type);
        largest = std::max(largest, error);
      }
    }
    // Turned back, each error is a mean of many: no plain row comes near the worst case.
    if (codec.id == CodecId::kInt4PerTokenHead) continue;
    EXPECT_GE(largest, 0.7 * budget);
  }
}

// Tokens of other heads between the rows (NHD) or none (HND): the same bytes.
TEST(CodecTable, StrideOfTheSourceIsNotInTheBytes) {
  for (const Codec& codec : AllCodecs()) {
    for (const int dim : kDims) {
      if (!Takes(codec, dim)) continue;
      for (const ElementType type : kSources) {
        const std::int64_t tokens = SomeTokens(codec);
        const auto hnd = Encode(codec, RandomRows(type, dim, tokens, dim));
        const auto nhd = Encode(codec, RandomRows(type, dim, tokens, 3 * dim));
        ASSERT_EQ(hnd, nhd) << NameOf(codec) << ", dim " << dim << ", " << ElementName(type);
      }
    }
  }
}

}  // namespace
}  // namespace kvtier::kernels
