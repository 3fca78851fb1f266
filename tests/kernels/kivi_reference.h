#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/kernels/codec_cases.h"
#include "tests/kernels/rounding_reference.h"

// KIVI written from its definition, one element after the other, fp16 by looking values up.
namespace kvtier::kernels::testing {

struct QuantizedGroup {
  std::vector<std::uint32_t> codes;
  StoredScale scaling;
};

// The published arithmetic: each line rounds to fp16. x are fp16 values.
inline QuantizedGroup QuantizeAsPublished(const std::vector<float>& x, int bits) {
  const double largest = (1 << bits) - 1;
  const double mn = *std::min_element(x.begin(), x.end()) + 0.0;
  const double mx = *std::max_element(x.begin(), x.end()) + 0.0;
  const double d = Half(mx - mn);
  const double s = Half(d / largest);
  QuantizedGroup group{{}, {HalfBits(s), HalfBits(mn)}};
  for (const float value : x) {
    const double t = Half(value - mn);
    const double u = s == 0 ? 0 : Half(t / s);
    group.codes.push_back(static_cast<std::uint32_t>(std::nearbyint(std::clamp(u, 0.0, largest))));
  }
  return group;
}

// kvtier's own: fp32 operations on an fp16 scale and minimum.
inline QuantizedGroup QuantizeInFp32(const std::vector<float>& x, int bits) {
  const float largest = static_cast<float>((1 << bits) - 1);
  const float least = *std::min_element(x.begin(), x.end()) + 0.0f;
  const float mx = *std::max_element(x.begin(), x.end()) + 0.0f;
  const auto mn = static_cast<float>(Half(least));
  const float range = mx - mn;
  const float quotient = (range > 0 ? range : 0.0f) / largest;
  const auto s = static_cast<float>(Half(quotient));
  QuantizedGroup group{{}, {HalfBits(quotient), HalfBits(least)}};
  const float inv = s == 0 ? 0 : 1.0f / s;
  for (const float value : x) {
    const float difference = value - mn;
    const float steps = difference * inv;
    group.codes.push_back(
        static_cast<std::uint32_t>(std::nearbyint(std::clamp(steps, 0.0f, largest))));
  }
  return group;
}

inline QuantizedGroup Quantize(ElementType source, const std::vector<float>& x, int bits) {
  return source == ElementType::kFp16 ? QuantizeAsPublished(x, bits) : QuantizeInFp32(x, bits);
}

// Element 0 in the lowest bits.
inline StoredGroup Pack(const QuantizedGroup& group, int bits) {
  StoredGroup stored{{}, group.scaling};
  stored.codes.resize(group.codes.size() * static_cast<std::size_t>(bits) / 8);
  for (std::size_t i = 0; i < group.codes.size(); ++i) {
    const std::size_t bit = i * static_cast<std::size_t>(bits);
    stored.codes[bit / 8] =
        static_cast<std::uint8_t>(stored.codes[bit / 8] | group.codes[i] << bit % 8);
  }
  return stored;
}

}  // namespace kvtier::kernels::testing
