#pragma once

#include <cstdint>

#include "kernels/float_bits.h"
#include "kernels/row.h"

// `nvfp4`: E2M1 codes in blocks of 16 channels, each block with an E4M3 scale, all of them with one
// fp32 scale known beforehand (vLLM's csrc/nvfp4_kv_cache_kernels.cu, which uses approximate
// reciprocals: its codes may differ at ties). A row is [dim / 2] bytes of codes, the even channel
// in the low bits, then [dim / 16] scales, linear. dim must be a multiple of 16.
namespace kvtier::kernels {

inline constexpr std::uint32_t kE2m1LargestBits = 0x40c00000u;  // 6.0

// 0, 0.5, 1, 1.5, 2, 3, 4, 6, and bit 3 for the sign; nearest, ties to the even code, saturating.
KVT_HD std::uint32_t E2m1Code(float x) {
  const std::uint32_t a = Bits(x) & 0x7fffffffu;
  const std::uint32_t code =
      SmallFloatMagnitude<1, 127>(a < kE2m1LargestBits ? a : kE2m1LargestBits);
  return code | (Bits(x) >> 28 & 8u);
}

KVT_HD float E2m1Value(std::uint32_t code) {
  const std::uint32_t magnitude = (code & 7u) << 22;
  const float normal = FromBits(magnitude + (126u << 23));
  const float small = FromBits(magnitude + (127u << 23)) - 1.0f;  // 0 and 0.5
  return FromBits((code & 8u) << 28 | Bits(magnitude < (1u << 23) ? small : normal));
}

struct Nvfp4Block {  // NOLINT(cppcoreguidelines-pro-type-member-init): Encode fills it
  static constexpr int kValues = 16;
  static constexpr float kLargest = 6.0f;

  E4m3 scale;
  std::uint32_t saturated = 0;  // beyond 7, where the next step would lie
  float error = 0.0f;           // sum of squares; only where it is asked for
  std::uint8_t codes[kValues];

  KVT_HD static bool Saturates(float y) { return FromBits(Bits(y) & 0x7fffffffu) > 7.0f; }

  // `divisor`: the code value that the block's largest magnitude is to become.
  KVT_HD static E4m3 ScaleOf(float largest, float divisor, float scale_of_all) {
    return FromFloat<E4m3>(1.0f / scale_of_all * (largest * (1.0f / divisor)));
  }
  template <bool kMeasured>
  KVT_HD void Encode(const float* x, float largest, float divisor, float scale_of_all) {
    scale = ScaleOf(largest, divisor, scale_of_all);
    const float step = ToFloat(scale) * scale_of_all;
    const float inverse = FiniteOrZero(1.0f / step);
    saturated = 0;
    error = 0.0f;
    for (int i = 0; i < kValues; ++i) {
      const float y = x[i] * inverse;
      codes[i] = static_cast<std::uint8_t>(E2m1Code(y));
      saturated += Saturates(y) ? 1u : 0u;
    }
    if constexpr (kMeasured) {
      // Pairs, then pairs of pairs: an order that vectors can keep.
      float squares[kValues];
      for (int i = 0; i < kValues; ++i) {
        const float off = x[i] - E2m1Value(codes[i]) * step;
        squares[i] = off * off;
      }
      for (int n = kValues / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; ++i) squares[i] = squares[2 * i] + squares[2 * i + 1];
      }
      error = squares[0];
    }
  }
};

// kFourOverSix: a block whose values then err less, in squares, gets the scale that makes its
// largest magnitude 4 instead of 6, where steps are finer. Returns how many values saturated.
template <bool kFourOverSix>
KVT_HD std::uint32_t EncodeNvfp4Row(const float* x, int dim, float scale, std::uint8_t* row) {
  const int blocks = dim / Nvfp4Block::kValues;
  std::uint32_t saturated = 0;
  for (int b = 0; b < blocks; ++b) {
    const float* values = x + b * Nvfp4Block::kValues;
    const float largest = Integer<float>::Value(LargestMagnitudeOf(values, Nvfp4Block::kValues));
    Nvfp4Block block;
    block.Encode<kFourOverSix>(values, largest, Nvfp4Block::kLargest, scale);
    if constexpr (kFourOverSix) {
      Nvfp4Block other;
      other.Encode<true>(values, largest, 4.0f, scale);
      if (other.error < block.error) block = other;
    }
    for (int i = 0; i < Nvfp4Block::kValues / 2; ++i) {
      row[b * Nvfp4Block::kValues / 2 + i] =
          static_cast<std::uint8_t>(block.codes[2 * i] | block.codes[2 * i + 1] << 4);
    }
    row[dim / 2 + b] = block.scale.bits;
    saturated += block.saturated;
  }
  return saturated;
}

KVT_HD void DecodeNvfp4Row(const std::uint8_t* row, int dim, float scale, float* out) {
  for (int b = 0; b < dim / Nvfp4Block::kValues; ++b) {
    const float step = ToFloat(E4m3{row[dim / 2 + b]}) * scale;
    const std::uint8_t* codes = row + b * Nvfp4Block::kValues / 2;
    float* values = out + b * Nvfp4Block::kValues;
    for (int i = 0; i < Nvfp4Block::kValues / 2; ++i) {
      values[2 * i] = E2m1Value(codes[i] & 15u) * step;
      values[2 * i + 1] = E2m1Value(codes[i] >> 4) * step;
    }
  }
}

}  // namespace kvtier::kernels
