// Every instruction set gives the same bytes as the plain build of the same loops: encoding,
// decoding to every type, and what they count, at head dims that fill no vector.
#include "kernels/host_target.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/kernels/codec_cases.h"
#include "tests/support/seed.h"

namespace kvtier::kernels {
namespace {

using kvtier::testing::SeededRandom;
using testing::AllCodecs;
using testing::NameOf;
using testing::SourceRows;

constexpr ElementType kSources[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};
constexpr ElementType kOutputs[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32,
                                    ElementType::kE4m3, ElementType::kE5m2};
constexpr int kDims[] = {4, 60, 64, 80, 96, 100, 112, 128, 192, 256, 512, 576};

// Values over many binades, zeros of both signs among them; some beyond what small types hold.
SourceRows HardRows(ElementType type, int dim, std::int64_t tokens, SeededRandom& random) {
  return SourceRows(type, dim, tokens, dim + 3).Fill([&](std::int64_t, int) {
    const auto sign = random.Between(0, 1) == 0 ? 1.0f : -1.0f;
    if (random.Between(0, 9) == 0) return sign * 0.0f;
    return sign * std::ldexp(1.0f + static_cast<float>(random.Between(0, 1 << 20)) * 0x1p-20f,
                             static_cast<int>(random.Between(-20, 13)));
  });
}

// All that a codec makes of one source, one after the other.
std::vector<std::byte> Everything(const Codec& codec, const SourceRows& source, float scale) {
  const auto units = static_cast<int>(source.tokens() / UnitTokens(codec));
  const std::int64_t stored = units * UnitSizeOf(codec, source.dim()).total();
  std::vector<std::byte> out(static_cast<std::size_t>(stored));
  const auto append = [&out](const void* data, std::size_t bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    out.insert(out.end(), from, from + bytes);
  };
  const std::uint64_t saturated =
      EncodeOnHost({codec, source.dim(), scale, source.View(), units, out.data()});
  append(&saturated, sizeof saturated);
  const std::int64_t values = source.tokens() * source.dim();
  for (const ElementType type : kOutputs) {
    std::vector<std::byte> read(static_cast<std::size_t>(values) *
                                static_cast<std::size_t>(ElementBytes(type)));
    const std::uint64_t read_saturated = DecodeOnHost({.codec = codec,
                                                       .dim = source.dim(),
                                                       .scale = scale,
                                                       .in = out.data(),
                                                       .first_token = 0,
                                                       .tokens = source.tokens(),
                                                       .out_scale = 0.3f,
                                                       .out = {read.data(), type, source.dim()}});
    append(read.data(), read.size());
    append(&read_saturated, sizeof read_saturated);
  }
  const float largest = LargestMagnitude(source.View(), source.dim(), source.tokens());
  append(&largest, sizeof largest);
  return out;
}

class HostTarget : public ::testing::Test {
 protected:
  ~HostTarget() override { UseHostTarget(HostTargets().front()); }
};

TEST_F(HostTarget, AllGiveTheSameBytes) {
  const std::vector<std::string> targets = HostTargets();
  if (targets.size() == 1) GTEST_SKIP() << "this CPU runs the plain build only";
  SeededRandom random;
  int compared = 0;
  for (const Codec& codec : AllCodecs()) {
    for (const int dim : kDims) {
      if (dim % DimMultiple(codec) != 0) continue;
      for (const ElementType type : kSources) {
        const float scale = random.Between(0, 1) == 0 ? 0.25f : 0.3f;
        const auto source = HardRows(type, dim, 2 * UnitTokens(codec), random);
        UseHostTarget(targets.back());
        const auto want = Everything(codec, source, scale);
        for (const std::string& target : targets) {
          UseHostTarget(target);
          ASSERT_TRUE(Everything(codec, source, scale) == want)
              << target << ", " << NameOf(codec) << ", dim " << dim << ", " << ElementName(type);
          ++compared;
        }
      }
    }
  }
  RecordProperty("compared", compared);
  EXPECT_GT(compared, 1000);
}

TEST_F(HostTarget, TheBestIsTakenUnlessAnotherIsAskedFor) {
  for (const std::string& target : HostTargets()) EXPECT_FALSE(target.empty());
  EXPECT_DEATH(UseHostTarget("PDP-11"), "");
}

}  // namespace
}  // namespace kvtier::kernels
