#include "kernels/llama_block.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/kernels/codec_cases.h"
#include "tests/kernels/golden.h"
#include "tests/support/seed.h"

namespace kvtier::kernels {
namespace {

using kvtier::testing::SeededRandom;
using testing::Encode;
using testing::GoldenRow;
using testing::Hex;
using testing::SourceRows;

constexpr Codec kQ8{.id = CodecId::kLlamaQ8};
constexpr Codec kQ4{.id = CodecId::kLlamaQ4};

// What gguf 0.19's quantize() gives, which says of itself that it equals ggml-quants.c bit by bit.
TEST(LlamaBlock, GoldenBytes) {
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
    const SourceRows source = GoldenRow(type);
    EXPECT_EQ(Hex(Encode(kQ8, source), 0, 136),
              "4d2681df3d9af856b41270cd2b89e745a2005ebb1977d53390ee4caa0866c3217fdc"
              "2c263c96f656b0106fca2984e3439efd5db71777d1318beb4ba50565bf1f7fd93993"
              "2c26f353ad0d6dc72781e1419bfb5bb51575cf2f89e949a30362bd1d7cd73691f050"
              "4d26ac0a68c62481df3d9af856b41270cd2b89e745a2005ebb1977d53390ee4caa08")
        << ElementName(type);
    EXPECT_EQ(Hex(Encode(kQ4, source), 0, 72),
              "4036e046acf258bd1379df358be046acf268"
              "20b6740fb953fd9731eb852fca640ea842fd"
              "203657bd0379df248ae046acf258be1379df"
              "40360369cf248ae046acf258bd1379df358b")
        << ElementName(type);
  }
}

// ggml-quants.c, written again from its formulas.
std::vector<std::uint8_t> ReferenceQ8(const float* x) {
  float amax = 0;
  for (int i = 0; i < 32; ++i) amax = std::max(amax, std::fabs(x[i]));
  const float d = amax / 127;
  const float id = d != 0 ? 1.0f / d : 0.0f;
  const Fp16 stored = FromFloat<Fp16>(d);
  std::vector<std::uint8_t> out = {static_cast<std::uint8_t>(stored.bits & 255),
                                   static_cast<std::uint8_t>(stored.bits >> 8)};
  for (int i = 0; i < 32; ++i)
    out.push_back(static_cast<std::uint8_t>(static_cast<int>(std::round(x[i] * id))));
  return out;
}
std::vector<std::uint8_t> ReferenceQ4(const float* x) {
  float amax = 0, max = 0;
  for (int i = 0; i < 32; ++i) {
    if (amax < std::fabs(x[i])) amax = std::fabs(max = x[i]);
  }
  const float d = max / -8;
  const float id = d != 0 ? 1.0f / d : 0.0f;
  const Fp16 stored = FromFloat<Fp16>(d);
  std::vector<std::uint8_t> out = {static_cast<std::uint8_t>(stored.bits & 255),
                                   static_cast<std::uint8_t>(stored.bits >> 8)};
  const auto code = [&](int i) { return std::min(15, static_cast<int>(x[i] * id + 8.5f)); };
  for (int j = 0; j < 16; ++j)
    out.push_back(static_cast<std::uint8_t>(code(j) | code(j + 16) << 4));
  return out;
}

TEST(LlamaBlock, EqualsTheReferenceOnBlocksOfAllSizes) {
  SeededRandom random;
  for (int run = 0; run < 20'000; ++run) {
    const auto size = run == 0 ? 0.0f : std::ldexp(1.0f, static_cast<int>(random.Between(-40, 18)));
    const auto source = SourceRows(ElementType::kFp32, 32, 1).Fill([&](std::int64_t, int) {
      // Few values, so that ties of magnitude and halves of a step come up.
      return size * static_cast<float>(random.Between(-254, 254)) / 254.0f;
    });
    std::vector<float> x;
    for (int i = 0; i < 32; ++i) x.push_back(source.Get(0, i));
    for (const auto& [codec, want] :
         {std::pair{kQ8, ReferenceQ8(x.data())}, {kQ4, ReferenceQ4(x.data())}}) {
      const auto got = Encode(codec, source);
      ASSERT_TRUE(std::equal(want.begin(), want.end(), got.begin(), got.end(),
                             [](std::uint8_t a, std::byte b) { return std::byte{a} == b; }))
          << testing::NameOf(codec) << ", size " << size << ", run " << run;
    }
  }
}

TEST(LlamaBlock, TheLargestMagnitudeIsKeptAndTheSmallestGiveNoNan) {
  for (const auto& [codec, largest] :
       {std::pair{kQ8, LlamaQ8::kLargestMagnitude}, {kQ4, LlamaQ4::kLargestMagnitude}}) {
    for (const float magnitude : {largest, 1e-40f}) {
      const auto source = SourceRows(ElementType::kFp32, 32, 1).Fill([&](std::int64_t, int c) {
        return c % 2 == 0 ? -magnitude : magnitude / 3;
      });
      const auto values = testing::Decode(codec, 32, Encode(codec, source), 0, 1);
      EXPECT_EQ(values[0], magnitude == largest ? -largest : 0.0f);
      for (const float value : values) EXPECT_TRUE(std::isfinite(value));
    }
  }
}

}  // namespace
}  // namespace kvtier::kernels
