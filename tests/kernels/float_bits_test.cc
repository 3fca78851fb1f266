#include "kernels/float_bits.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <sstream>

#include "tests/kernels/rounding_reference.h"

namespace kvtier::kernels {
namespace {

using testing::NearestValue;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class T>
struct Format;
template <>
struct Format<Bf16> {
  static NearestValue Values() { return {7, 127, 0x7f7f}; }
  static constexpr bool kSaturates = false;
};
template <>
struct Format<Fp16> {
  static NearestValue Values() { return {10, 15, 0x7bff}; }
  static constexpr bool kSaturates = false;
};
template <>
struct Format<E4m3> {
  static NearestValue Values() { return {3, 7, 0x7e}; }
  static constexpr bool kSaturates = true;
};
template <>
struct Format<E5m2> {
  static NearestValue Values() { return {2, 15, 0x7b}; }
  static constexpr bool kSaturates = true;
};

template <class T>
class Rounding : public ::testing::Test {
 public:
  static constexpr std::uint32_t kSign = 1u << (8 * sizeof(T) - 1);

  // Compares every conversion of x, not NaN, with `code`, the magnitude looked up for it.
  ::testing::AssertionResult Check(float x, std::uint32_t code) const {
    const bool overflows = code > values.largest();
    const std::uint32_t sign = std::signbit(x) ? kSign : 0u;
    const std::uint32_t saturated = sign | std::min(code, values.largest());
    const std::uint32_t rounded = Format<T>::kSaturates ? saturated : sign | code;
    if (FromFloat<T>(x).bits == rounded && Saturate<T>(x).bits == saturated &&
        Overflows<T>(x) == overflows) {
      return ::testing::AssertionSuccess();
    }
    std::ostringstream text;
    text << std::hexfloat << x << std::hex << " gives " << +FromFloat<T>(x).bits << ", saturated "
         << +Saturate<T>(x).bits << ", overflows " << Overflows<T>(x) << "; want " << rounded
         << ", " << saturated << ", " << overflows;
    return ::testing::AssertionFailure() << text.str();
  }
  ::testing::AssertionResult Check(float x) const {
    return Check(x, values.CodeOf(std::fabs(static_cast<double>(x))));
  }

  const NearestValue values = Format<T>::Values();
};

using SmallTypes = ::testing::Types<Bf16, Fp16, E4m3, E5m2>;
TYPED_TEST_SUITE(Rounding, SmallTypes);

TYPED_TEST(Rounding, EveryCodeHasItsValueAndComesBack) {
  for (std::uint32_t code = 0; code <= this->values.largest(); ++code) {
    for (const std::uint32_t sign : {0u, this->kSign}) {
      const TypeParam stored{static_cast<decltype(TypeParam::bits)>(sign | code)};
      const float value = ToFloat(stored);
      ASSERT_EQ(std::fabs(value), this->values.value(code)) << code;
      ASSERT_EQ(std::signbit(value), sign != 0) << code;
      ASSERT_EQ(FromFloat<TypeParam>(value).bits, stored.bits);
    }
  }
}

// The value half way between two neighbours goes to the even one, and the floats next to it to the
// nearer one; the last interval ends in overflow.
TYPED_TEST(Rounding, EveryTieGoesToEven) {
  for (std::uint32_t code = 0; code <= this->values.largest(); ++code) {
    const double middle = (this->values.value(code) + this->values.value(code + 1)) / 2;
    const float tie = static_cast<float>(middle);
    ASSERT_EQ(tie, middle) << "fp32 has all ties of smaller types";
    for (const float x : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, kInfinity)}) {
      ASSERT_TRUE(this->Check(x));
      ASSERT_TRUE(this->Check(-x));
    }
  }
}

TYPED_TEST(Rounding, EveryExponentWithManyMantissas) {
  std::mt19937 random(1);
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (int i = 0; i < 512; ++i) {
      auto mantissa = static_cast<std::uint32_t>(random());
      if (i < 24) {  // edges: ones below a bit, ones from a bit on, a bit alone
        mantissa = (1u << i) - 1u;
      } else if (i < 48) {
        mantissa = ~((1u << (i - 24)) - 1u);
      } else if (i < 72) {
        mantissa = 1u << (i - 48);
      }
      const float x = FromBits(exponent << 23 | (mantissa & 0x7fffffu));
      ASSERT_TRUE(this->Check(x));
      ASSERT_TRUE(this->Check(-x));
    }
  }
}

// A step prime to 2^32, ascending, so that the reference walks along: 2^24 floats in all.
TYPED_TEST(Rounding, SweepOfAllFloats) {
  for (const std::uint32_t sign : {0u, 0x80000000u}) {
    std::uint32_t code = 0;
    for (std::uint32_t u = 0; u <= 0x7f800000u; u += 257) {
      const float x = FromBits(sign | u);
      code = this->values.CodeFrom(code, std::fabs(static_cast<double>(x)));
      ASSERT_TRUE(this->Check(x, code));
    }
  }
}

TYPED_TEST(Rounding, Infinity) {
  EXPECT_TRUE(this->Check(kInfinity));
  EXPECT_TRUE(this->Check(-kInfinity));
}

TYPED_TEST(Rounding, NanStaysNanAndIsNoOverflow) {
  for (const std::uint32_t bits :
       {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu}) {
    const float nan = FromBits(bits);
    ASSERT_TRUE(IsNan(nan));
    EXPECT_TRUE(std::isnan(ToFloat(FromFloat<TypeParam>(nan)))) << std::hex << bits;
    EXPECT_TRUE(std::isnan(ToFloat(Saturate<TypeParam>(nan)))) << std::hex << bits;
    EXPECT_FALSE(Overflows<TypeParam>(nan)) << std::hex << bits;
    if (sizeof(TypeParam) == 1) {
      EXPECT_EQ(FromFloat<TypeParam>(nan).bits, 0x7f) << std::hex << bits;
    }
  }
}

TEST(Fp8Codes, ThatAreNotFinite) {
  for (const int sign : {0, 0x80}) {
    const auto code = [&](int bits) { return static_cast<std::uint8_t>(sign | bits); };
    EXPECT_TRUE(std::isnan(ToFloat(E4m3{code(0x7f)})));
    EXPECT_EQ(ToFloat(E5m2{code(0x7c)}), sign != 0 ? -kInfinity : kInfinity);
    for (const int nan : {0x7d, 0x7e, 0x7f}) EXPECT_TRUE(std::isnan(ToFloat(E5m2{code(nan)})));
  }
}

#if defined(__FLT16_MANT_DIG__) && !defined(__clang__)
TEST(Fp16, AgreesWithTheCompiler) {
  const auto of_compiler = [](std::uint16_t bits) {
    return static_cast<float>(std::bit_cast<_Float16>(bits));
  };
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float value = ToFloat(Fp16{bits});
    if (std::isnan(of_compiler(bits))) {
      ASSERT_TRUE(std::isnan(value)) << i;
      ASSERT_TRUE(std::isnan(ToFloat(FromFloat<Fp16>(value)))) << i;
    } else {
      ASSERT_EQ(Bits(value), Bits(of_compiler(bits))) << i;
      ASSERT_EQ(FromFloat<Fp16>(value).bits, bits);
    }
  }
  std::mt19937 random(2);
  for (int i = 0; i < 1'000'000; ++i) {
    const float x = FromBits(static_cast<std::uint32_t>(random()));
    if (std::isnan(x)) continue;
    const auto want = std::bit_cast<std::uint16_t>(static_cast<_Float16>(x));
    ASSERT_EQ(FromFloat<Fp16>(x).bits, want) << std::hexfloat << x;
    ASSERT_EQ(testing::HalfBits(x), want) << std::hexfloat << x;
  }
}
#endif

struct Fp8Row {
  float x;
  int e4m3, e5m2;
};
// What CUDA's __nv_cvt_float_to_fp8 gives with __NV_SATFINITE.
const Fp8Row kCudaBytes[] = {
    {0.0f, 0x00, 0x00},
    {-0.0f, 0x80, 0x80},
    {0x1p-9f, 0x01, 0x18},
    {0x1p-10f, 0x00, 0x14},
    {std::nextafter(0x1p-10f, 1.0f), 0x01, 0x14},
    {1.5f * 0x1p-9f, 0x02, 0x1a},
    {-0x1p-11f, 0x80, 0x90},
    {0x1p-149f, 0x00, 0x00},
    {0x1.fffffcp-127f, 0x00, 0x00},
    {1.0625f, 0x38, 0x3c},
    {1.1875f, 0x3a, 0x3d},
    {448.0f, 0x7e, 0x5f},
    {463.99f, 0x7e, 0x5f},
    {464.0f, 0x7e, 0x5f},
    {464.01f, 0x7e, 0x5f},
    {480.0f, 0x7e, 0x60},
    {1e6f, 0x7e, 0x7b},
    {61439.0f, 0x7e, 0x7b},
    {61440.0f, 0x7e, 0x7b},
    {65504.0f, 0x7e, 0x7b},
    {65536.0f, 0x7e, 0x7b},
    {kInfinity, 0x7e, 0x7b},
    {-kInfinity, 0xfe, 0xfb},
    {std::numeric_limits<float>::quiet_NaN(), 0x7f, 0x7f},
    {-std::numeric_limits<float>::quiet_NaN(), 0x7f, 0x7f},
};
TEST(Fp8Codes, AreCudas) {
  for (const Fp8Row& row : kCudaBytes) {
    EXPECT_EQ(FromFloat<E4m3>(row.x).bits, row.e4m3) << row.x;
    EXPECT_EQ(FromFloat<E5m2>(row.x).bits, row.e5m2) << row.x;
  }
}

TEST(Overflows, BeginsWhereRoundingLeavesTheRange) {
  EXPECT_FALSE(Overflows<E4m3>(464.0f));  // a tie, to the even 448
  EXPECT_TRUE(Overflows<E4m3>(464.01f));
  EXPECT_FALSE(Overflows<E5m2>(61439.0f));
  EXPECT_TRUE(Overflows<E5m2>(61440.0f));
  EXPECT_FALSE(Overflows<Fp16>(65519.0f));
  EXPECT_TRUE(Overflows<Fp16>(-65520.0f));
  EXPECT_FALSE(Overflows<Bf16>(0x1.fefffep127f));
  EXPECT_TRUE(Overflows<Bf16>(0x1.ffp127f));
  EXPECT_FALSE(Overflows<float>(std::numeric_limits<float>::max()));
  EXPECT_TRUE(Overflows<float>(-kInfinity));
}

TEST(Saturate, OfFp32IsTheLargestFiniteValue) {
  const float largest = std::numeric_limits<float>::max();
  EXPECT_EQ(Saturate<float>(kInfinity), largest);
  EXPECT_EQ(Saturate<float>(-kInfinity), -largest);
  EXPECT_EQ(Saturate<float>(-largest), -largest);
  EXPECT_TRUE(std::isnan(Saturate<float>(std::numeric_limits<float>::quiet_NaN())));
}

TEST(RoundToCode, IsNearestEven) {
  for (int code = 0; code < 256; ++code) {
    const auto whole = static_cast<float>(code);
    const auto at = static_cast<std::uint32_t>(code);
    EXPECT_EQ(RoundToCode(whole), at);
    EXPECT_EQ(RoundToCode(whole + 0.5f), at + at % 2);
    EXPECT_EQ(RoundToCode(std::nextafter(whole + 0.5f, 0.0f)), at);
    EXPECT_EQ(RoundToCode(std::nextafter(whole + 0.5f, 512.0f)), at + 1);
  }
  EXPECT_EQ(RoundToCode(0x1p-149f), 0u);
}

}  // namespace
}  // namespace kvtier::kernels
