#pragma once

#include <cstdint>

#include "kernels/float_bits.h"

namespace kvtier::kernels {

// `fp8_e4m3` and `fp8_e5m2` with a scale known beforehand: a row is [dim] codes of x / scale, an
// fp32 division rounded to nearest even and saturating, as vLLM's reshape_and_cache_flash
// (csrc/quantization/w8a8/fp8). scale: finite, > 0, normal. Returns how many values saturated; NaN
// becomes 0x7F.
template <class Source, class Code>
KVT_HD std::uint32_t EncodeFp8Row(const Source* x, int dim, float scale, Code* row) {
  std::uint32_t saturated = 0;
  for (int c = 0; c < dim; ++c) {
    const float y = ToFloat(x[c]) / scale;
    saturated += Overflows<Code>(y) ? 1u : 0u;
    row[c] = FromFloat<Code>(y);
  }
  return saturated;
}

template <class Code>
KVT_HD void DecodeFp8Row(const Code* row, int dim, float scale, float* out) {
  for (int c = 0; c < dim; ++c) out[c] = ToFloat(row[c]) * scale;
}

}  // namespace kvtier::kernels
