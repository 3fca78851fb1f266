#pragma once

#include <cstdint>

#include "kernels/codec.h"

// KIVI (arXiv 2402.02750): asymmetric min/max quantization, K per channel over groups of tokens, V
// per token over groups of channels. A group stores a scale and a minimum (a value, not a zero
// point), both fp16 as published, or both E4M3; a read is round(fma(code, scale, minimum)). Two
// levels of arithmetic:
//   fp16  every step rounded to fp16, bit for bit as the authors' quant/new_pack.py (but for a
//   scale that underflows to 0,
//         which stores code 0); taken for fp16 sources;
//   fp32  kvtier's own for bf16 and fp32 sources, which the published code does not take.
// Both read -0 as +0 before minimum and maximum, and need |x| <= kKiviLimit.
namespace kvtier::kernels {

// Scale: the type of a stored scale and minimum.
template <class Scale>
struct KiviGroup {
  Scale scale;
  Scale minimum;
};

// fp32 level: how to turn values of a group into codes. 0 where the scale is 0.
KVT_HD float KiviInverse(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

// x in E4M3, away from 0 where `away`, towards it otherwise. x >= 0 and in range.
KVT_HD E4m3 RoundMagnitude(float x, bool away) {
  const std::uint32_t nearest = RoundInRange<E4m3>(x).bits;
  const float value = ToFloat(E4m3{static_cast<std::uint8_t>(nearest)});
  const std::uint32_t up = away && value < x ? 1u : 0u;
  const std::uint32_t down = !away && value > x ? 1u : 0u;
  return {static_cast<std::uint8_t>(nearest + up - down)};
}

// kvtier's own: E4M3 for both, half the bytes. The minimum is rounded down and the scale up, so
// that the codes always reach from the least to the largest value.
KVT_HD KiviGroup<E4m3> KiviGroupInE4m3(float minimum, float maximum, float largest_code) {
  const bool negative = minimum < 0.0f;
  const std::uint32_t magnitude = RoundMagnitude(negative ? -minimum : minimum, negative).bits;
  const E4m3 stored = {static_cast<std::uint8_t>(magnitude | (negative ? 0x80u : 0u))};
  return {RoundMagnitude((maximum - ToFloat(stored)) / largest_code, true), stored};
}

template <class Scale, bool kFp16Arithmetic>
KVT_HD KiviGroup<Scale> KiviGroupOf(float minimum, float maximum, float largest_code) {
  if constexpr (sizeof(Scale) == 1) {
    return KiviGroupInE4m3(minimum, maximum, largest_code);
  } else if constexpr (kFp16Arithmetic) {
    return {RoundInRange<Fp16>(RoundToFp16(maximum - minimum) / largest_code),
            RoundInRange<Fp16>(minimum)};
  } else {
    const Fp16 stored = RoundInRange<Fp16>(minimum);
    const float range = Clamp(maximum - ToFloat(stored), 2.0f * kKiviLimit);
    return {RoundInRange<Fp16>(range / largest_code), stored};
  }
}

// `scale` and `inverse` belong to the group; only the level's own is used.
template <bool kFp16Arithmetic>
KVT_HD std::uint32_t KiviCode(float x, float minimum, float scale, float inverse,
                              float largest_code) {
  float steps;
  if constexpr (kFp16Arithmetic) {
    steps = scale > 0.0f ? RoundToFp16(RoundToFp16(x - minimum) / scale) : 0.0f;
  } else {
    steps = (x - minimum) * inverse;
  }
  return RoundToCode(Clamp(steps, largest_code));
}

// A code has at most 8 bits and a scale 11: their product is exact, and this rounds once.
KVT_HD float KiviValue(std::uint32_t code, float scale, float minimum) {
  return static_cast<float>(static_cast<int>(code)) * scale + minimum;
}

KVT_HD float WithoutNegativeZero(float x) { return x + 0.0f; }

}  // namespace kvtier::kernels
