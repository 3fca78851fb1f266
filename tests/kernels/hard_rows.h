#pragma once

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

#include "tests/kernels/codec_cases.h"
#include "tests/support/seed.h"

// What implementations of the codecs are compared on.
namespace kvtier::kernels::testing {

using kvtier::testing::SeededRandom;

inline constexpr ElementType kSources[] = {ElementType::kBf16, ElementType::kFp16,
                                           ElementType::kFp32};
inline constexpr ElementType kOutputs[] = {ElementType::kBf16, ElementType::kFp16,
                                           ElementType::kFp32, ElementType::kE4m3,
                                           ElementType::kE5m2};
inline constexpr int kDims[] = {1,   3,   4,   6,   33,  60,  64,  80,  96,
                                100, 112, 127, 128, 192, 256, 512, 576, 1024};

// Besides those of AllCodecs(), the shortest and the longest groups.
inline std::vector<Codec> CodecsAndExtremes() {
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
inline SourceRows HardRows(ElementType type, int dim, std::int64_t tokens, SeededRandom& random) {
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
inline void AddExtremes(const Codec& codec, SourceRows& source) {
  if (codec.id != CodecId::kRaw && codec.id != CodecId::kFp8) return;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float extremes[] = {70000.0f, -70000.0f, 3.4e38f,
                            -3.4e38f, kInfinity, std::numeric_limits<float>::quiet_NaN()};
  for (int c = 0; c < std::min<int>(source.dim(), std::size(extremes)); ++c)
    source.Set(source.tokens() - 1, c, extremes[c]);
}

inline constexpr float kScales[] = {0.3f, 0.25f, 1.0f, 0x1p-100f, 0x1p127f};

}  // namespace kvtier::kernels::testing
