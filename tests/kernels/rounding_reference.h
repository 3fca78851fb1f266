#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace kvtier::kernels::testing {

// Rounding to a small floating-point type by looking for the nearest value in a list of all of
// them: slow, plain, and without a line in common with kernels/float_bits.h.
class NearestValue {
 public:
  // Lists the magnitudes of codes 0 to `largest`, which must be finite, and of the one that would
  // follow: what is nearest to that one overflows.
  NearestValue(int mantissa_bits, int bias, std::uint32_t largest) {
    for (std::uint32_t code = 0; code <= largest + 1; ++code) {
      const int exponent = static_cast<int>(code >> mantissa_bits);
      const int fraction = static_cast<int>(code & ((1u << mantissa_bits) - 1u));
      const int significand = exponent == 0 ? fraction : (1 << mantissa_bits) + fraction;
      values_.push_back(std::ldexp(significand, std::max(exponent, 1) - bias - mantissa_bits));
    }
  }

  std::uint32_t largest() const { return static_cast<std::uint32_t>(values_.size() - 2); }
  double value(std::uint32_t code) const { return values_[code]; }

  // The code whose value is nearest to `magnitude` >= 0, the even one of two equally near;
  // largest() + 1 where that overflows.
  std::uint32_t CodeOf(double magnitude) const {
    const auto above = std::upper_bound(values_.begin(), values_.end(), magnitude);
    return CodeFrom(static_cast<std::uint32_t>(above - values_.begin()) - 1u, magnitude);
  }

  // The same, searched upwards from a code that is not too large: for ascending magnitudes.
  std::uint32_t CodeFrom(std::uint32_t code, double magnitude) const {
    while (code <= largest()) {
      const double middle = (values_[code] + values_[code + 1]) / 2;  // exact
      if (magnitude < middle || (magnitude == middle && code % 2 == 0)) break;
      ++code;
    }
    return code;
  }

 private:
  std::vector<double> values_;
};

inline const NearestValue& Halves() {
  static const NearestValue halves(10, 15, 0x7bff);
  return halves;
}

// x rounded to fp16, as a value and as bits. Overflows to infinity.
inline std::uint16_t HalfBits(double x) {
  return static_cast<std::uint16_t>((std::signbit(x) ? 0x8000u : 0u) |
                                    Halves().CodeOf(std::fabs(x)));
}
inline double Half(double x) {
  const std::uint32_t code = Halves().CodeOf(std::fabs(x));
  return std::copysign(code > Halves().largest() ? HUGE_VAL : Halves().value(code), x);
}

}  // namespace kvtier::kernels::testing
