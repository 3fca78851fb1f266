#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/portability.h"

// Conversions between fp32 and the smaller floating-point types, by integer arithmetic, so that
// host and device agree on every input. All round to nearest, ties to even, and honour subnormals.
namespace kvtier::kernels {

struct Bf16 {
  std::uint16_t bits;
};
struct Fp16 {
  std::uint16_t bits;
};
// OCP E4M3FN: bias 7, NaN 0x7F and 0xFF, no infinity. OCP E5M2: bias 15. kLargest: finite value.
struct E4m3 {
  static constexpr float kLargest = 448.0f;
  std::uint8_t bits;
};
struct E5m2 {
  static constexpr float kLargest = 57344.0f;
  std::uint8_t bits;
};
static_assert(sizeof(Bf16) == 2 && sizeof(Fp16) == 2 && sizeof(E4m3) == 1 && sizeof(E5m2) == 1);

KVT_HD std::uint32_t Bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  std::uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
#endif
}

KVT_HD float FromBits(std::uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
#endif
}

inline constexpr std::uint32_t kF32Infinity = 0x7f800000u;

KVT_HD bool IsNan(float x) { return (Bits(x) & 0x7fffffffu) > kF32Infinity; }
KVT_HD bool IsFinite(float x) { return (Bits(x) & 0x7fffffffu) < kF32Infinity; }

// x held within 0 and `largest`, for x that is no NaN; below zero, -0 included, gives +0. Of
// integers, because compilers make one instruction of that.
KVT_HD float Clamp(float x, float largest) {
  const auto bits = static_cast<std::int32_t>(Bits(x));
  const auto most = static_cast<std::int32_t>(Bits(largest));
  const std::int32_t low = bits > 0 ? bits : 0;
  return FromBits(static_cast<std::uint32_t>(low < most ? low : most));
}

// Nearest integer, ties to even, of 0 <= x < 2^22.
KVT_HD std::uint32_t RoundToCode(float x) { return Bits(x + 12582912.0f) & 0x3fffffu; }

KVT_HD float ToFloat(float x) { return x; }
KVT_HD float ToFloat(Bf16 x) { return FromBits(std::uint32_t{x.bits} << 16); }

KVT_HD float ToFloat(Fp16 x) {
  const std::uint32_t sign = (std::uint32_t{x.bits} & 0x8000u) << 16;
  const std::uint32_t magnitude = (std::uint32_t{x.bits} & 0x7fffu) << 13;
  const std::uint32_t exponent = magnitude & 0x0f800000u;
  // Rebias; infinities and NaNs rebias twice; subnormals are renormalized by the subtraction.
  const std::uint32_t normal =
      magnitude + 0x38000000u + (exponent == 0x0f800000u ? 0x38000000u : 0u);
  const std::uint32_t small = Bits(FromBits(magnitude + 0x38800000u) - FromBits(0x38800000u));
  return FromBits(sign | (exponent == 0 ? small : normal));
}

KVT_HD float ToFloat(E4m3 x) {
  const std::uint32_t code = x.bits;
  const std::uint32_t magnitude = (code & 0x7fu) << 20;
  const float normal = FromBits(magnitude + (120u << 23));
  // A subnormal's places are those of 2^-6 and up: the subtraction takes the leading one away.
  const float small = FromBits(magnitude + (121u << 23)) - FromBits(121u << 23);
  const std::uint32_t finite = Bits(magnitude < (1u << 23) ? small : normal);
  return FromBits((code & 0x80u) << 24 | (magnitude == (0x7fu << 20) ? 0x7fc00000u : finite));
}

KVT_HD float ToFloat(E5m2 x) {
  return ToFloat(Fp16{static_cast<std::uint16_t>(std::uint32_t{x.bits} << 8)});
}

// The largest magnitude, as fp32 bits, that does not round past T's largest finite value. Ties at
// the edge: 464 rounds to 448 in E4M3 (even), 61,440 overflows E5M2, 65,520 overflows fp16.
template <class T>
inline constexpr std::uint32_t kLargestBits = 0;
template <>
inline constexpr std::uint32_t kLargestBits<float> = 0x7f7fffffu;
template <>
inline constexpr std::uint32_t kLargestBits<Bf16> = 0x7f7f7fffu;
template <>
inline constexpr std::uint32_t kLargestBits<Fp16> = 0x477fefffu;
template <>
inline constexpr std::uint32_t kLargestBits<E4m3> = 0x43e80000u;
template <>
inline constexpr std::uint32_t kLargestBits<E5m2> = 0x476fffffu;

// Magnitude of a, as fp32 bits within kLargestBits, in a type of kMantissa bits whose smallest
// normal has the fp32 exponent field kMinExponent. The addend's last place is the target's, so the
// adder does the rounding; below the smallest normal the place stays fixed.
template <int kMantissa, std::uint32_t kMinExponent>
KVT_HD std::uint32_t SmallFloatMagnitude(std::uint32_t a) {
  constexpr std::uint32_t kSmallest = kMinExponent << 23;
  const std::uint32_t binade = a & 0x7f800000u;
  const std::uint32_t exponent = binade > kSmallest ? binade : kSmallest;
  const std::uint32_t addend = exponent + ((23u - kMantissa) << 23);
  const std::uint32_t significand = Bits(FromBits(a) + FromBits(addend)) - addend;
  return ((exponent - kSmallest) >> (23 - kMantissa)) + significand;
}

// x in T, for magnitudes up to kLargestBits<T>.
template <class T>
KVT_HD T RoundInRange(float x);

template <>
KVT_HD float RoundInRange<float>(float x) {
  return x;
}
template <>
KVT_HD Bf16 RoundInRange<Bf16>(float x) {
  const std::uint32_t u = Bits(x);
  return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
template <>
KVT_HD Fp16 RoundInRange<Fp16>(float x) {
  const std::uint32_t u = Bits(x);
  const std::uint32_t a = u & 0x7fffffffu;
  const std::uint32_t normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  const std::uint32_t small = Bits(FromBits(a) + 0.5f) - 0x3f000000u;  // the adder rounds at 2^-24
  return {static_cast<std::uint16_t>((u >> 16 & 0x8000u) | (a < 0x38800000u ? small : normal))};
}
template <>
KVT_HD E4m3 RoundInRange<E4m3>(float x) {
  const std::uint32_t u = Bits(x);
  return {
      static_cast<std::uint8_t>((u >> 24 & 0x80u) | SmallFloatMagnitude<3, 121>(u & 0x7fffffffu))};
}
template <>
KVT_HD E5m2 RoundInRange<E5m2>(float x) {
  const std::uint32_t u = Bits(x);
  return {
      static_cast<std::uint8_t>((u >> 24 & 0x80u) | SmallFloatMagnitude<2, 113>(u & 0x7fffffffu))};
}

// x in T, whatever x is. The 16-bit types overflow to infinity and keep NaN; the 8-bit ones
// saturate, infinity included, and give 0x7F for NaN.
template <class T>
KVT_HD T FromFloat(float x);

template <>
KVT_HD float FromFloat<float>(float x) {
  return x;
}
template <>
KVT_HD Bf16 FromFloat<Bf16>(float x) {
  const auto quiet = static_cast<std::uint16_t>(Bits(x) >> 16 | 0x40u);
  return {IsNan(x) ? quiet : RoundInRange<Bf16>(x).bits};
}
template <>
KVT_HD Fp16 FromFloat<Fp16>(float x) {
  const std::uint32_t u = Bits(x);
  const std::uint32_t a = u & 0x7fffffffu;
  const std::uint32_t special = (u >> 16 & 0x8000u) | (a > kF32Infinity ? 0x7e00u : 0x7c00u);
  return {
      static_cast<std::uint16_t>(a > kLargestBits<Fp16> ? special : RoundInRange<Fp16>(x).bits)};
}

template <class T>
KVT_HD T FromFloatSaturating(float x) {
  const std::uint32_t u = Bits(x);
  const std::uint32_t a = u & 0x7fffffffu;
  const std::uint32_t clamped = a < kLargestBits<T> ? a : kLargestBits<T>;
  const T code = RoundInRange<T>(FromBits((u & 0x80000000u) | clamped));
  return {static_cast<decltype(T::bits)>(a > kF32Infinity ? 0x7fu : code.bits)};
}
template <>
KVT_HD E4m3 FromFloat<E4m3>(float x) {
  return FromFloatSaturating<E4m3>(x);
}
template <>
KVT_HD E5m2 FromFloat<E5m2>(float x) {
  return FromFloatSaturating<E5m2>(x);
}

// x rounded to an fp16, for magnitudes up to kLargestBits<Fp16>.
KVT_HD float RoundToFp16(float x) {
  const std::uint32_t u = Bits(x);
  const std::uint32_t a = u & 0x7fffffffu;
  const std::uint32_t normal = (a + 0xfffu + ((a >> 13) & 1u)) & ~0x1fffu;
  const std::uint32_t small = Bits((FromBits(a) + 0.5f) - 0.5f);  // the adder rounds at 2^-24
  return FromBits((u & 0x80000000u) | (a < 0x38800000u ? small : normal));
}

// Whether x, finite or infinite, rounds past T's largest finite value.
template <class T>
KVT_HD bool Overflows(float x) {
  const std::uint32_t a = Bits(x) & 0x7fffffffu;
  return a > kLargestBits<T> && a <= kF32Infinity;
}

// The value x takes in T, saturating at the largest finite value. NaN stays NaN.
template <class T>
KVT_HD T Saturate(float x) {
  return FromFloat<T>(x);
}
template <>
KVT_HD float Saturate<float>(float x) {
  return Overflows<float>(x) ? FromBits(Bits(x) - 1u) : x;
}
template <>
KVT_HD Bf16 Saturate<Bf16>(float x) {
  const Bf16 rounded = FromFloat<Bf16>(x);
  return {static_cast<std::uint16_t>(Overflows<Bf16>(x) ? (rounded.bits & 0x8000u) | 0x7f7fu
                                                        : rounded.bits)};
}
template <>
KVT_HD Fp16 Saturate<Fp16>(float x) {
  const Fp16 rounded = FromFloat<Fp16>(x);
  return {static_cast<std::uint16_t>(Overflows<Fp16>(x) ? (rounded.bits & 0x8000u) | 0x7bffu
                                                        : rounded.bits)};
}

}  // namespace kvtier::kernels
