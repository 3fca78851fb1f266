// Every instruction set gives the same bytes as the plain build of the same loops: encoding,
// decoding to every type, and what they count, at head dims that fill vectors and that don't.
#include "kernels/host_target.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

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
constexpr int kDims[] = {1,   3,   4,   6,   33,  60,  64,  80,  96,
                         100, 112, 127, 128, 192, 256, 512, 576, 1024};

// Besides those of AllCodecs(), the shortest and the longest groups.
std::vector<Codec> CodecsAndExtremes() {
  std::vector<Codec> codecs = AllCodecs();
  for (const CodecId id : {CodecId::kKiviChannel, CodecId::kKiviToken}) {
    codecs.push_back({.id = id, .bits = 8, .group = 1});
    codecs.push_back({.id = id, .bits = 8, .group = 256});
    codecs.push_back({.id = id, .bits = 2, .group = 1024});
  }
  return codecs;
}

// Values over many binades, zeros of both signs among them. Some rows hold what E4M3 does not; some
// one value above all others, which a rotation spreads: such a row lies to one side of 0.
SourceRows HardRows(ElementType type, int dim, std::int64_t tokens, SeededRandom& random) {
  int most = 0, below = 0;
  float first = 0;
  return SourceRows(type, dim, tokens, dim + 3).Fill([&](std::int64_t, int c) {
    if (c == 0) {
      most = random.OneIn(2) ? 5 : 13;
      below = random.OneIn(2) ? static_cast<int>(random.Between(3, 8)) : 0;
    }
    const float sign = random.OneIn(2) ? 1.0f : -1.0f;
    if (c > 0 && below > 0) return sign * std::ldexp(first, -below);
    if (c > 0 && random.OneIn(10)) return sign * 0.0f;
    first = sign * std::ldexp(1.0f + static_cast<float>(random.Between(0, 1 << 20)) * 0x1p-20f,
                              static_cast<int>(random.Between(-20, most)));
    return first;
  });
}

// What only codecs with a scale known beforehand, or none, are given.
void AddExtremes(const Codec& codec, SourceRows& source) {
  if (codec.id != CodecId::kRaw && codec.id != CodecId::kFp8) return;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float extremes[] = {70000.0f, -70000.0f, 3.4e38f,
                            -3.4e38f, kInfinity, std::numeric_limits<float>::quiet_NaN()};
  for (int c = 0; c < std::min<int>(source.dim(), std::size(extremes)); ++c)
    source.Set(source.tokens() - 1, c, extremes[c]);
}

// All that a codec makes of one source, one after the other.
std::vector<std::byte> Everything(const Codec& codec, const SourceRows& source, float scale,
                                  float out_scale) {
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
                                                       .out_scale = out_scale,
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
  constexpr float kScales[] = {0.3f, 0.25f, 1.0f, 0x1p-100f, 0x1p127f};
  SeededRandom random;
  int compared = 0;
  for (const Codec& codec : CodecsAndExtremes()) {
    for (const int dim : kDims) {
      if (dim % DimMultiple(codec) != 0) continue;
      for (const ElementType type : kSources) {
        const float scale = kScales[random.Between(0, 4)],
                    out_scale = kScales[random.Between(0, 4)];
        // More rows than V's groups are measured at once.
        const std::int64_t tokens =
            UnitTokens(codec) > 1 ? 2 * UnitTokens(codec) : (dim > 128 ? 3 : 67);
        auto source = HardRows(type, dim, tokens, random);
        AddExtremes(codec, source);
        UseHostTarget(targets.back());
        const auto want = Everything(codec, source, scale, out_scale);
        for (std::size_t i = 0; i + 1 < targets.size(); ++i) {
          UseHostTarget(targets[i]);
          ASSERT_TRUE(Everything(codec, source, scale, out_scale) == want)
              << targets[i] << ", " << NameOf(codec) << ", dim " << dim << ", " << ElementName(type)
              << ", scales " << scale << ", " << out_scale;
          ++compared;
        }
      }
    }
  }
  EXPECT_GT(compared, 1000);
}

TEST_F(HostTarget, TheBestIsTakenUnlessAnotherIsAskedFor) {
  EXPECT_EQ(HostTargetInUse(), HostTargets().front());
  for (const std::string& target : HostTargets()) {
    UseHostTarget(target);
    EXPECT_EQ(HostTargetInUse(), target);
  }
  EXPECT_DEATH(UseHostTarget("PDP-11"), "");
}

}  // namespace
}  // namespace kvtier::kernels
