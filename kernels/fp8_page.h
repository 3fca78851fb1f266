#pragma once

#include <cstdint>

#include "kernels/float_bits.h"

// `fp8_e4m3(scale=page)`, kvtier's own: E4M3 with one fp32 scale per head and page, measured once
// the page's tokens are all there. A unit is [page_tokens][dim] codes of x / scale, then the scale.
namespace kvtier::kernels {

// amax / E4m3::kLargest, so that nothing saturates; a normal number always.
KVT_HD float Fp8PageScale(float largest) {
  constexpr std::uint32_t kSmallestNormal = 0x00800000u;
  const std::uint32_t scale = Bits(largest == 0.0f ? 1.0f : largest / E4m3::kLargest);
  return FromBits(scale > kSmallestNormal ? scale : kSmallestNormal);
}

}  // namespace kvtier::kernels
