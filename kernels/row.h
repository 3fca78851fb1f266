#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/float_bits.h"

// What codecs share: rows of values, looked at as the integers that they are. Integers that order
// as values do are what a compiler makes vectors of, and 16-bit ones twice as many.
namespace kvtier::kernels {

template <class T>
struct Integer {
  using Type = std::conditional_t<sizeof(T) == 1, std::int8_t,
                                  std::conditional_t<sizeof(T) == 2, std::int16_t, std::int32_t>>;
  static constexpr int kSign = 8 * sizeof(T) - 1;
  static constexpr Type kMagnitude = static_cast<Type>((1ull << kSign) - 1u);

  KVT_HD static Type Of(T x) {
    Type bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
  }
  KVT_HD static float Value(Type bits) {
    T x;
    std::memcpy(&x, &bits, sizeof x);
    return ToFloat(x);
  }
  // Orders all finite values, -0 below +0; its own inverse.
  KVT_HD static Type Ordered(Type bits) {
    return static_cast<Type>(bits ^ ((bits >> kSign) & kMagnitude));
  }
};

// The bits of the largest magnitude of a row; a NaN counts as larger than infinity.
template <class T>
KVT_HD typename Integer<T>::Type LargestMagnitudeOf(const T* x, int dim) {
  using Bits = typename Integer<T>::Type;
  Bits largest = 0;
  for (int c = 0; c < dim; ++c) {
    const auto magnitude = static_cast<Bits>(Integer<T>::Of(x[c]) & Integer<T>::kMagnitude);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// What a value is multiplied by instead of being divided: 0 where there is no finite inverse.
KVT_HD float FiniteOrZero(float inverse) { return IsFinite(inverse) ? inverse : 0.0f; }

// Writes a row as T, saturating; returns how many values did. Few rows hold any: a look at the
// largest magnitude lets the others go without a look at each value.
template <class T>
KVT_HD std::uint32_t StoreRow(const float* values, int dim, T* out) {
  if (static_cast<std::uint32_t>(LargestMagnitudeOf(values, dim)) <= kLargestBits<T>) {
    for (int c = 0; c < dim; ++c) out[c] = RoundInRange<T>(values[c]);
    return 0;
  }
  std::uint32_t saturated = 0;
  for (int c = 0; c < dim; ++c) {
    saturated += Overflows<T>(values[c]) ? 1u : 0u;
    out[c] = Saturate<T>(values[c]);
  }
  return saturated;
}

// out = x / scale, for a scale that is finite, above 0 and normal. By a power of two it is a
// multiplication: the same bits, many times faster.
template <class Source>
KVT_HD void DivideRow(const Source* x, int dim, float scale, float* out) {
  if ((Bits(scale) & 0x7fffffu) == 0) {
    const float inverse = 1.0f / scale;
    for (int c = 0; c < dim; ++c) out[c] = ToFloat(x[c]) * inverse;
  } else {
    for (int c = 0; c < dim; ++c) out[c] = ToFloat(x[c]) / scale;
  }
}

}  // namespace kvtier::kernels
