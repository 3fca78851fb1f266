#pragma once

#include <cstdint>

#include "kernels/codec.h"

// KIVI (arXiv 2402.02750): asymmetric min/max quantization, K per channel over groups of tokens, V
// per token over groups of channels. A group stores an fp16 scale and an fp16 minimum (a value, not
// a zero point); a read is round(fma(code, scale, minimum)). Two levels of arithmetic:
//   fp16  every step rounded to fp16, bit for bit as the authors' quant/new_pack.py (but for a
//   scale that underflows to 0,
//         which stores code 0); taken for fp16 sources;
//   fp32  kvtier's own for bf16 and fp32 sources, which the published code does not take.
// Both read -0 as +0 before minimum and maximum, and need |x| <= kKiviLimit.
namespace kvtier::kernels {

struct KiviGroup {
  Fp16 scale;
  Fp16 minimum;
};

// fp32 level: how to turn values of a group into codes. 0 where the scale is 0.
KVT_HD float KiviInverse(KiviGroup group) {
  const float scale = ToFloat(group.scale);
  return scale > 0.0f ? 1.0f / scale : 0.0f;
}

template <bool kFp16Arithmetic>
KVT_HD KiviGroup KiviGroupOf(float minimum, float maximum, float largest_code) {
  const Fp16 stored = RoundInRange<Fp16>(minimum);
  if constexpr (kFp16Arithmetic) {
    return {RoundInRange<Fp16>(RoundToFp16(maximum - minimum) / largest_code), stored};
  } else {
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
