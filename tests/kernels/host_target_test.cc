// Every instruction set gives the same bytes as the plain build of the same loops: encoding,
// decoding to every type, and what they count, at head dims that fill vectors and that don't.
#include "kernels/host_target.h"

#include <gtest/gtest.h>

#include "tests/kernels/codec_cases.h"
#include "tests/kernels/hard_rows.h"
#include "tests/support/seed.h"

namespace kvtier::kernels {
namespace {

using kvtier::testing::SeededRandom;
using testing::AddExtremes;
using testing::CodecsAndExtremes;
using testing::HardRows;
using testing::kDims;
using testing::kOutputs;
using testing::kScales;
using testing::kSources;
using testing::NameOf;
using testing::SourceRows;

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
