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
// OCP E4M3FN: bias 7, largest 448, NaN 0x7F and 0xFF, no infinity. OCP E5M2: bias 15, largest
// 57,344.
struct E4m3 {
  std::uint8_t bits;
};
struct E5m2 {
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

// a * b + c, rounded once, for a * b and c that are multiples of 2^-24 below 2^29, as codes, fp16
// scales and minima are: the sum is then exact in fp64, so this equals fmaf without needing the
// instruction.
KVT_HD float FusedMultiplyAdd(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#elif defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return static_cast<float>(static_cast<double>(a) * static_cast<double>(b) +
                            static_cast<double>(c));
#endif
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
  // As an fp16 of the same sign with the exponent field one bit narrower: value * 2^-8, exact.
  const std::uint32_t code = x.bits;
  if ((code & 0x7fu) == 0x7fu) return FromBits(0x7fc00000u | (code & 0x80u) << 24);
  const Fp16 half{static_cast<std::uint16_t>((code & 0x80u) << 8 | (code & 0x7fu) << 7)};
  return ToFloat(half) * 256.0f;
}

KVT_HD float ToFloat(E5m2 x) {
  return ToFloat(Fp16{static_cast<std::uint16_t>(std::uint32_t{x.bits} << 8)});
}

template <class T>
KVT_HD T FromFloat(float x);

template <>
KVT_HD float FromFloat<float>(float x) {
  return x;
}

template <>
KVT_HD Bf16 FromFloat<Bf16>(float x) {
  const std::uint32_t u = Bits(x);
  const std::uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return {static_cast<std::uint16_t>(IsNan(x) ? (u >> 16 | 0x40u) : rounded)};
}

template <>
KVT_HD Fp16 FromFloat<Fp16>(float x) {
  const std::uint32_t u = Bits(x);
  const std::uint32_t sign = u >> 16 & 0x8000u;
  const std::uint32_t a = u & 0x7fffffffu;
  const std::uint32_t normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  const std::uint32_t small = Bits(FromBits(a) + 0.5f) - 0x3f000000u;  // the adder rounds at 2^-24
  const std::uint32_t big = a > kF32Infinity ? 0x7e00u : 0x7c00u;
  const std::uint32_t magnitude = a >= 0x47800000u ? big : (a < 0x38800000u ? small : normal);
  return {static_cast<std::uint16_t>(sign | magnitude)};
}

// Magnitude of |x| <= Max in a type of kMantissa bits whose smallest normal has the fp32 exponent
// field kMinExponent. The addend's last place is the target's, so the adder does the rounding;
// below the smallest normal the place stays fixed.
template <int kMantissa, std::uint32_t kMinExponent>
KVT_HD std::uint32_t SmallFloatMagnitude(std::uint32_t a) {
  const std::uint32_t exponent = (a >> 23) > kMinExponent ? (a >> 23) : kMinExponent;
  const std::uint32_t addend = (exponent + 23u - kMantissa) << 23;
  const std::uint32_t significand = Bits(FromBits(a) + FromBits(addend)) & ((4u << kMantissa) - 1u);
  return ((exponent - kMinExponent) << kMantissa) + significand;
}

// Saturating: beyond the largest finite value, infinity included, gives the largest finite value.
// NaN gives 0x7F.
template <>
KVT_HD E4m3 FromFloat<E4m3>(float x) {
  const std::uint32_t u = Bits(x);
  const std::uint32_t a = u & 0x7fffffffu;
  const std::uint32_t clamped = a < 0x43e00000u ? a : 0x43e00000u;  // 448
  const std::uint32_t code = (u >> 24 & 0x80u) | SmallFloatMagnitude<3, 121>(clamped);
  return {static_cast<std::uint8_t>(a > kF32Infinity ? 0x7fu : code)};
}

template <>
KVT_HD E5m2 FromFloat<E5m2>(float x) {
  const std::uint32_t u = Bits(x);
  const std::uint32_t a = u & 0x7fffffffu;
  const std::uint32_t clamped = a < 0x47600000u ? a : 0x47600000u;  // 57,344
  const std::uint32_t code = (u >> 24 & 0x80u) | SmallFloatMagnitude<2, 113>(clamped);
  return {static_cast<std::uint8_t>(a > kF32Infinity ? 0x7fu : code)};
}

KVT_HD float RoundToFp16(float x) { return ToFloat(FromFloat<Fp16>(x)); }

// Whether x, finite or infinite, rounds past the largest finite value of T. Ties at the edge: 464
// rounds to 448 in E4M3 (even), 61,440 overflows E5M2, 65,520 overflows fp16.
template <class T>
KVT_HD bool Overflows(float x);
template <>
KVT_HD bool Overflows<float>(float x) {
  return (Bits(x) & 0x7fffffffu) == kF32Infinity;
}
template <>
KVT_HD bool Overflows<Bf16>(float x) {
  const std::uint32_t a = Bits(x) & 0x7fffffffu;
  return a >= 0x7f7f8000u && a <= kF32Infinity;
}
template <>
KVT_HD bool Overflows<Fp16>(float x) {
  const std::uint32_t a = Bits(x) & 0x7fffffffu;
  return a >= 0x477ff000u && a <= kF32Infinity;
}
template <>
KVT_HD bool Overflows<E4m3>(float x) {
  const std::uint32_t a = Bits(x) & 0x7fffffffu;
  return a > 0x43e80000u && a <= kF32Infinity;
}
template <>
KVT_HD bool Overflows<E5m2>(float x) {
  const std::uint32_t a = Bits(x) & 0x7fffffffu;
  return a >= 0x47700000u && a <= kF32Infinity;
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
