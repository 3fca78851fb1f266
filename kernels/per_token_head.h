#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/row.h"

// `int8_per_token_head` and `fp8_per_token_head`: a row is [dim] codes, then their fp32 scale, as
// one cell of vLLM's packed cache (v1/attention/ops/triton_reshape_and_cache_flash.py): scale =
// max(amax / QMAX, 1e-6), code = x * (1 / scale), int8 rounding half away from zero. dim must be a
// multiple of 4, so that scales are aligned.
namespace kvtier::kernels {

struct Int8PerTokenHead {
  using Code = std::int8_t;
  static constexpr float kLargest = 127.0f;

  // |y| is below 127.5: a rounding or two above 127 at most.
  KVT_HD static Code Encode(float y) {
    return static_cast<Code>(y + FromBits(0x3f000000u | (Bits(y) & 0x80000000u)));
  }
  KVT_HD static float Decode(Code code) { return static_cast<float>(code); }
};

struct Fp8PerTokenHead {
  using Code = E4m3;
  static constexpr float kLargest = E4m3::kLargest;

  KVT_HD static Code Encode(float y) { return FromFloat<E4m3>(y); }
  KVT_HD static float Decode(Code code) { return ToFloat(code); }
};

template <class Kind>
KVT_HD float PerTokenHeadScale(float largest) {
  const float measured = largest / Kind::kLargest;
  return measured > 1e-6f ? measured : 1e-6f;
}

template <class Kind, class Source>
KVT_HD float PerTokenHeadScale(const Source* x, int dim) {
  return PerTokenHeadScale<Kind>(Integer<Source>::Value(LargestMagnitudeOf(x, dim)));
}

template <class Kind, class Source>
KVT_HD void EncodePerTokenHeadRow(const Source* x, int dim, std::uint8_t* row) {
  const float scale = PerTokenHeadScale<Kind>(x, dim);
  const float inverse = 1.0f / scale;
  auto* __restrict codes = reinterpret_cast<typename Kind::Code*>(row);
  for (int c = 0; c < dim; ++c) codes[c] = Kind::Encode(ToFloat(x[c]) * inverse);
  std::memcpy(row + dim, &scale, sizeof scale);
}

template <class Kind>
KVT_HD void DecodePerTokenHeadRow(const std::uint8_t* row, int dim, float* out) {
  float scale;
  std::memcpy(&scale, row + dim, sizeof scale);
  const auto* codes = reinterpret_cast<const typename Kind::Code*>(row);
  for (int c = 0; c < dim; ++c) out[c] = Kind::Decode(codes[c]) * scale;
}

}  // namespace kvtier::kernels
