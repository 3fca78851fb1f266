#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/codec.h"
#include "kernels/hadamard.h"
#include "kernels/row.h"

// `int4_per_token_head`, vLLM's rotated 4-bit cell (v1/attention/ops/int4_per_token_head.py): the
// row times fixed random signs, through a Hadamard transform without a factor, rounded to the
// source type; then asymmetric 4-bit codes with a scale a row, whose lowest 4 mantissa bits hold
// the zero point. A row is [dim / 2] bytes of codes, the even channel in the low bits, then the
// fp32 word. A GPU's transform adds in another order: bytes are equal within the error bound only.
namespace kvtier::kernels {

// 32 channels from a multiple of 32 on, +1 where a channel's bit is set, the first in the lowest:
// bit 23 of each output of the Mersenne twister seeded with 0x9e3779b9, inverted, which is how
// torch's CPU generator draws Bernoulli(0.5).
struct RotationSignWords {
  std::uint32_t words[kMaxHeadDim / 32];
};
inline constexpr RotationSignWords kRotationSigns = {
    {0x6573590du, 0x808035b1u, 0xa6443d6cu, 0x6b7f5438u, 0x4aa48b81u, 0xabafc441u, 0x320b9848u,
     0xfa2043a0u, 0x4d6e1c33u, 0xa8a9c7cbu, 0x1b951ddau, 0x9803b359u, 0x3038796eu, 0xcd26200eu,
     0xc9a02476u, 0x8a9dacb9u, 0x99751b1cu, 0x26308c56u, 0x14ff7d49u, 0xf35c904bu, 0x1d618cccu,
     0x5af2c8c0u, 0xf0c30314u, 0xe2abe201u, 0x4d1b30fau, 0xe1cd2a78u, 0xdc888e53u, 0x3878d702u,
     0xb411a56fu, 0xa95bf25fu, 0x446bab0fu, 0x0997f98bu}};
inline std::uint32_t RotationSigns(int first_channel) {
  return kRotationSigns.words[first_channel / 32];
}
inline bool RotationSign(int channel) {
  return (RotationSigns(channel) >> (channel % 32) & 1u) != 0;
}

inline void ApplyRotationSigns(float* x, int dim) {
  for (int first = 0; first < dim; first += 32) {
    const std::uint32_t signs = ~RotationSigns(first);
    const int count = dim - first < 32 ? dim - first : 32;
    for (int i = 0; i < count; ++i)
      x[first + i] = FromBits(Bits(x[first + i]) ^ (signs >> i) << 31);
  }
}

struct Int4PerTokenHead {
  static constexpr std::uint32_t kZeroPointBits = 0xfu;

  // Rounds a row to T, saturating; returns how many values did.
  template <class T>
  KVT_HD static std::uint32_t RoundRow(float* y, int dim) {
    if (static_cast<std::uint32_t>(LargestMagnitudeOf(y, dim)) <= kLargestBits<T>) {
      for (int c = 0; c < dim; ++c) y[c] = ToFloat(RoundInRange<T>(y[c]));
      return 0;
    }
    std::uint32_t saturated = 0;
    for (int c = 0; c < dim; ++c) {
      saturated += Overflows<T>(y[c]) ? 1u : 0u;
      y[c] = ToFloat(Saturate<T>(y[c]));
    }
    return saturated;
  }

  // How the codes of a row lie: value = (code - zero_point) * scale.
  struct Scaling {
    float scale;
    int zero_point;

    KVT_HD float Value(std::uint32_t code) const {
      return static_cast<float>(static_cast<int>(code) - zero_point) * scale;
    }
    // Of rows from `minimum` to `maximum`.
    KVT_HD static Scaling Of(float minimum, float maximum) {
      // Halves, so that the difference can't overflow.
      const float measured = (maximum * 0.5f - minimum * 0.5f) / 7.5f;
      const float scale = measured > 1e-6f ? measured : 1e-6f;
      return {scale, static_cast<int>(Clamp(-minimum / scale + 0.5f, 15.5f))};
    }
    KVT_HD static Scaling Load(const std::uint8_t* stored) {
      std::uint32_t word;
      std::memcpy(&word, stored, sizeof word);
      return FromWord(word);
    }
    KVT_HD static Scaling FromWord(std::uint32_t word) {
      return {FromBits(word & ~kZeroPointBits), static_cast<int>(word & kZeroPointBits)};
    }
    KVT_HD std::uint32_t Word() const {
      return (Bits(scale) & ~kZeroPointBits) | static_cast<std::uint32_t>(zero_point);
    }
    KVT_HD void Store(std::uint8_t* stored) const {
      const std::uint32_t word = Word();
      std::memcpy(stored, &word, sizeof word);
    }
    // Before it is rounded. It grows with y.
    KVT_HD float Code(float y) const { return y * (1.0f / scale) + static_cast<float>(zero_point); }
    KVT_HD static bool Saturates(float code) { return code < -1.0f || code > 16.0f; }
  };

  // Returns how many values saturated: in the source type after the transform, or, where the
  // transformed row lies so far to one side of 0 that the zero point can't reach it, in their code.
  static std::uint32_t Encode(const float* x, int dim, ElementType source, std::uint8_t* row) {
    float y[kMaxHeadDim];
    y[0] = 0.0f;  // the compiler doesn't know that rows are never empty
    for (int c = 0; c < dim; ++c) y[c] = x[c];
    ApplyRotationSigns(y, dim);
    Hadamard(y, dim);
    std::uint32_t saturated = 0;
    if (source == ElementType::kBf16) RoundRow<Bf16>(y, dim);  // too far out for any source
    if (source == ElementType::kFp16) saturated += RoundRow<Fp16>(y, dim);
    using Key = Integer<float>;  // integers, of whose smallest compilers make vectors
    auto low = Key::Ordered(Key::Of(y[0])), high = low;
    for (int c = 1; c < dim; ++c) {
      const auto key = Key::Ordered(Key::Of(y[c]));
      low = key < low ? key : low;
      high = key > high ? key : high;
    }
    const Scaling scaling =
        Scaling::Of(Key::Value(Key::Ordered(low)), Key::Value(Key::Ordered(high)));
    std::uint8_t codes[kMaxHeadDim];
    for (int c = 0; c < dim; ++c) {
      const float code = scaling.Code(y[c]);
      codes[c] = static_cast<std::uint8_t>(static_cast<int>(Clamp(code + 0.5f, 15.5f)));
      saturated += Scaling::Saturates(code) ? 1u : 0u;
    }
    for (int i = 0; i < dim / 2; ++i)
      row[i] = static_cast<std::uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
    scaling.Store(row + dim / 2);
    return saturated;
  }

  static void Decode(const std::uint8_t* row, int dim, float* out) {
    const Scaling scaling = Scaling::Load(row + dim / 2);
    for (int i = 0; i < dim / 2; ++i) {
      out[2 * i] = scaling.Value(row[i] & 15u);
      out[2 * i + 1] = scaling.Value(std::uint32_t{row[i]} >> 4);
    }
    Hadamard(out, dim);
    const float factor = 1.0f / static_cast<float>(HadamardBlock(dim));
    for (int c = 0; c < dim; ++c) out[c] *= factor;
    ApplyRotationSigns(out, dim);
  }
};

}  // namespace kvtier::kernels
