#include "tests/kernels/kivi_reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kernels/kivi.h"
#include "tests/kernels/codec_cases.h"

// Whole units of random data, byte for byte against the definition.
namespace kvtier::kernels {
namespace {

using testing::Encode;
using testing::GroupIn;
using testing::SourceRows;
using testing::StoredGroup;

constexpr int kDims[] = {64, 80, 96, 128, 256, 576};
constexpr ElementType kSources[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};

// Groups of every kind: wide, narrow around a large value, subnormal, constant, both zeros, up to
// the limit. `kind` is that of the channel (K) or of the run of channels (V).
float RandomValue(std::mt19937& random, int kind) {
  const float normal = std::normal_distribution<float>()(random);
  switch (kind % 8) {
    case 0:
      return 100.0f + normal;
    case 1:
      return normal * 1e-6f;  // scales and minima are subnormal in fp16
    case 2:
      return -3.75f;
    case 3:
      return random() % 2 == 0 ? -0.0f : (random() % 4 == 0 ? normal : 0.0f);
    case 4:
      return std::clamp(normal * 2e4f, -32640.0f, 32640.0f);
    case 5:
      return normal * normal * normal;
    case 6:
      return 5.0f + std::fabs(normal);
    default:
      return normal;
  }
}

SourceRows RandomRows(ElementType type, int dim, int tokens, std::uint32_t seed) {
  std::mt19937 random(seed);
  return SourceRows(type, dim, tokens).Fill([&](std::int64_t, int c) {
    return RandomValue(random, c / 4);
  });
}

std::vector<Codec> Codecs(CodecId id) {
  std::vector<Codec> codecs;
  for (const Codec& codec : testing::AllCodecs()) {
    if (codec.id == id && codec.element == ElementType::kFp16 && codec.rotation == Rotation::kNone)
      codecs.push_back(codec);
  }
  return codecs;
}

// Compares the group of `lane` with the definition's for values x, then what is read with what the
// stored numbers mean.
void ExpectGroup(ElementType type, const Codec& codec, const StoredGroup& stored,
                 const std::vector<float>& x, const std::vector<float>& reads) {
  const auto want = testing::Quantize(type, x, codec.bits);
  ASSERT_EQ(stored, testing::Pack(want, codec.bits));
  const double scale = ToFloat(Fp16{want.scaling.scale});
  const double minimum = ToFloat(Fp16{want.scaling.minimum});
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(reads[i], static_cast<float>(want.codes[i] * scale + minimum)) << "element " << i;
  }
}

TEST(KiviReference, ChannelsOfK) {
  for (const Codec& codec : Codecs(CodecId::kKiviChannel)) {
    for (const int dim : kDims) {
      for (const ElementType type : kSources) {
        SCOPED_TRACE(testing::NameOf(codec) + ", dim " + std::to_string(dim) + ", " +
                     ElementName(type));
        const int units = codec.group > 32 ? 1 : 2;
        const auto source = RandomRows(type, dim, units * codec.group, 7);
        const auto stored = Encode(codec, source);
        const auto values = testing::Decode(codec, dim, stored, 0, source.tokens());
        for (int lane = 0; lane < units * dim; ++lane) {
          const int unit = lane / dim, channel = lane % dim;
          std::vector<float> x, reads;
          for (int i = 0; i < codec.group; ++i) {
            const int token = unit * codec.group + i;
            x.push_back(source.Get(token, channel));
            reads.push_back(values[static_cast<std::size_t>(token * dim + channel)]);
          }
          const auto* bytes = stored.data() + unit * UnitSizeOf(codec, dim).total();
          ASSERT_NO_FATAL_FAILURE(
              ExpectGroup(type, codec, GroupIn(codec, dim, bytes, channel), x, reads))
              << "unit " << unit << ", channel " << channel;
        }
      }
    }
  }
}

TEST(KiviReference, TokensOfV) {
  constexpr int kTokens = 8;
  for (const Codec& codec : Codecs(CodecId::kKiviToken)) {
    for (const int dim : kDims) {
      if (dim % codec.group != 0) continue;
      for (const ElementType type : kSources) {
        SCOPED_TRACE(testing::NameOf(codec) + ", dim " + std::to_string(dim) + ", " +
                     ElementName(type));
        const auto source = RandomRows(type, dim, kTokens, 8);
        const auto stored = Encode(codec, source);
        const auto values = testing::Decode(codec, dim, stored, 0, kTokens);
        const int groups = dim / codec.group;
        for (int lane = 0; lane < kTokens * groups; ++lane) {
          const int token = lane / groups, group = lane % groups;
          std::vector<float> x, reads;
          for (int i = 0; i < codec.group; ++i) {
            const int channel = group * codec.group + i;
            x.push_back(source.Get(token, channel));
            reads.push_back(values[static_cast<std::size_t>(token * dim + channel)]);
          }
          const auto* bytes = stored.data() + token * UnitSizeOf(codec, dim).total();
          ASSERT_NO_FATAL_FAILURE(
              ExpectGroup(type, codec, GroupIn(codec, dim, bytes, group), x, reads))
              << "token " << token << ", group " << group;
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvtier::kernels
