#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "kernels/hadamard.h"
#include "kernels/int4_per_token_head.h"
#include "tests/kernels/codec_cases.h"
#include "tests/kernels/golden.h"
#include "tests/support/seed.h"

namespace kvtier::kernels {
namespace {

using kvtier::testing::SeededRandom;
using testing::Encode;
using testing::GoldenRow;
using testing::GoldenValue;
using testing::Hex;
using testing::SourceRows;

constexpr Codec kInt4{.id = CodecId::kInt4PerTokenHead};
constexpr int kDims[] = {2, 6, 64, 80, 96, 100, 112, 128, 192, 256, 512, 576, 1024};

// Row i, column j of Sylvester's matrix: the parity of the bits that i and j share.
double HadamardSign(int i, int j) {
  return __builtin_parity(static_cast<unsigned>(i & j)) ? -1 : 1;
}

TEST(Hadamard, IsSylvestersMatrixBlockByBlock) {
  for (const int dim : kDims) {
    const int block = HadamardBlock(dim);
    EXPECT_EQ(dim % block, 0);
    EXPECT_EQ(dim / block % 2, 1) << "the largest power of two";
    std::vector<float> x(static_cast<std::size_t>(dim));
    for (int c = 0; c < dim; ++c) x[static_cast<std::size_t>(c)] = GoldenValue(c);
    std::vector<float> y = x, rotated = x;
    Hadamard(y.data(), dim);
    RotateRow(rotated.data(), dim);
    for (int c = 0; c < dim; ++c) {
      double want = 0;
      const int first = c / block * block;
      for (int j = 0; j < block; ++j)
        want += HadamardSign(c - first, j) * x[static_cast<std::size_t>(first + j)];
      ASSERT_EQ(y[static_cast<std::size_t>(c)], want) << "dim " << dim << ", channel " << c;
      ASSERT_NEAR(rotated[static_cast<std::size_t>(c)], want / std::sqrt(block), 1e-4);
    }
    RotateRow(rotated.data(), dim);
    for (int c = 0; c < dim; ++c) {
      const auto at = static_cast<std::size_t>(c);
      ASSERT_NEAR(rotated[at], x[at], 1e-5) << "its own inverse, dim " << dim;
    }
  }
}

// A codec with a rotation stores what the codec alone stores of the rotated rows.
TEST(Rotation, StoresTheCodesOfRotatedRows) {
  SeededRandom random;
  std::normal_distribution<float> normal(1.0f, 3.0f);
  for (Codec codec : testing::AllCodecs()) {
    if (codec.rotation == Rotation::kNone) continue;
    for (const ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
      const std::int64_t tokens = UnitTokens(codec) * 3;
      const auto source = SourceRows(type, 96, tokens).Fill([&](std::int64_t, int) {
        return normal(random.engine());
      });
      auto rotated = SourceRows(ElementType::kFp32, 96, tokens);
      for (std::int64_t token = 0; token < tokens; ++token) {
        float row[96];
        for (int c = 0; c < 96; ++c) row[c] = source.Get(token, c);
        RotateRow(row, 96);
        for (int c = 0; c < 96; ++c) rotated.Set(token, c, row[c]);
      }
      codec.rotation = Rotation::kHadamard;
      const auto stored = Encode(codec, source);
      const auto read = testing::Decode(codec, 96, stored, 0, tokens);
      codec.rotation = Rotation::kNone;
      EXPECT_EQ(stored, Encode(codec, rotated)) << testing::NameOf(codec);
      auto want = testing::Decode(codec, 96, stored, 0, tokens);
      for (std::int64_t token = 0; token < tokens; ++token) RotateRow(want.data() + token * 96, 96);
      EXPECT_EQ(read, want) << testing::NameOf(codec);
    }
  }
}

// One channel that dwarfs the others spoils a row's scale; rotated, it's spread over all.
TEST(Rotation, SpreadsAnOutlier) {
  const auto source = SourceRows(ElementType::kFp32, 128, 1).Fill([](std::int64_t, int c) {
    return c == 77 ? 60.0f : GoldenValue(c) / 3.0f;
  });
  const auto error = [&](Codec codec) {
    const auto read = testing::Decode(codec, 128, Encode(codec, source), 0, 1);
    double sum = 0;
    for (int c = 64; c < 96; ++c)
      sum += std::pow(read[static_cast<std::size_t>(c)] - source.Get(0, c), 2);
    return std::sqrt(sum);
  };
  EXPECT_LT(error({.id = CodecId::kLlamaQ4, .rotation = Rotation::kHadamard}),
            0.6 * error({.id = CodecId::kLlamaQ4}));
}

std::uint32_t Word(const std::vector<std::byte>& row, int dim) {
  std::uint32_t word = 0;
  std::memcpy(&word, row.data() + dim / 2, sizeof word);
  return word;
}

// Signs as torch 2.15 draws them, the first in the highest bit.
TEST(Int4PerTokenHead, Signs) {
  std::vector<std::uint8_t> bytes(32);
  for (int c = 0; c < 256; ++c) {
    if (RotationSign(c))
      bytes[static_cast<std::size_t>(c / 8)] |= static_cast<std::uint8_t>(0x80 >> c % 8);
  }
  EXPECT_EQ(Hex(bytes), "b09acea68dac010136bc22651c2afed681d125528223f5d51219d04c05c2045f");
}

TEST(Int4PerTokenHead, GoldenBytes) {
  const SourceRows source = GoldenRow(ElementType::kBf16);
  const auto row = Encode(kInt4, source);
  ASSERT_EQ(row.size(), 68u);
  EXPECT_EQ(Hex(row, 0, 16), "c18eeb7c7467839576b72c5fab64788e");
  EXPECT_EQ(testing::Sum(row, 0, 64), 8041);
  EXPECT_EQ(Word(row, 128), 0x40c77778u) << "scale 6.233, zero point 8";
  double error = 0, size = 0;
  const auto read = testing::Decode(kInt4, 128, row, 0, 1);
  for (int c = 0; c < 128; ++c) {
    error += std::pow(read[static_cast<std::size_t>(c)] - GoldenValue(c), 2);
    size += std::pow(GoldenValue(c), 2);
  }
  EXPECT_NEAR(std::sqrt(error / size), 0.0885, 5e-5);
}

// A row whose transform is all on one side of 0: the zero point stops at 0 or 15 and codes
// saturate. That is the format; it's counted.
TEST(Int4PerTokenHead, OneSidedRowsSaturateAndAreCounted) {
  for (const float side : {1.0f, -1.0f}) {
    float x[128] = {side * 500.0f};  // the transform of a lone first channel is a constant
    for (int c = 1; c < 128; ++c) x[c] = 0.25f * GoldenValue(c);
    ApplyRotationSigns(x, 128);
    const auto source =
        SourceRows(ElementType::kFp32, 128, 1).Fill([&](std::int64_t, int c) { return x[c]; });
    std::vector<std::byte> out(68);
    const std::uint64_t saturated = EncodeOnHost({kInt4, 128, 1.0f, source.View(), 1, out.data()});
    EXPECT_GT(saturated, 100u);
    EXPECT_EQ(Word(out, 128) & 15u, side > 0 ? 0u : 15u);
  }
}

TEST(Int4PerTokenHead, Fp16RowsThatOverflowInTheTransformSaturate) {
  const auto source = SourceRows(ElementType::kFp16, 64, 1).Fill([](std::int64_t, int c) {
    return RotationSign(c) ? 60000.0f : -60000.0f;
  });
  std::vector<std::byte> out(36);
  EXPECT_EQ(EncodeOnHost({kInt4, 64, 1.0f, source.View(), 1, out.data()}), 1u);
  for (const float value : testing::Decode(kInt4, 64, out, 0, 1)) EXPECT_TRUE(std::isfinite(value));
}

TEST(MagnitudeLimit, LeavesRoomForTheRotation) {
  const Codec kivi{
      .id = CodecId::kKiviChannel, .bits = 2, .group = 32, .rotation = Rotation::kHadamard};
  EXPECT_EQ(MagnitudeLimit({.id = CodecId::kKiviChannel}, 64), kKiviLimit);
  EXPECT_EQ(MagnitudeLimit(kivi, 64), kKiviLimit / 8);
  EXPECT_EQ(MagnitudeLimit(kivi, 192), kKiviLimit / 8) << "blocks of 64";
  for (const Codec& codec : testing::AllCodecs()) {
    if (codec.rotation == Rotation::kNone && codec.id != CodecId::kInt4PerTokenHead) continue;
    const int dim = 576;
    const auto source =
        SourceRows(ElementType::kFp32, dim, UnitTokens(codec)).Fill([&](std::int64_t, int c) {
          return (c % 3 == 0 ? -1.0f : 1.0f) * MagnitudeLimit(codec, dim);
        });
    for (const float value :
         testing::Decode(codec, dim, Encode(codec, source), 0, UnitTokens(codec)))
      ASSERT_TRUE(std::isfinite(value)) << testing::NameOf(codec);
  }
}

}  // namespace
}  // namespace kvtier::kernels
