// Blocks of kBlock values as two vectors of fp32, those of even and those of odd index: what 16-bit
// values fall into without a shuffle. For the loops of the host's codecs of which the compiler
// makes too little; not for the plain build, SCALAR or EMU128. Bits are those of
// kernels/float_bits.h. Included once per instruction set.
#if defined(KVT_HOST_VECTORS) == defined(HWY_TARGET_TOGGLE)
#ifdef KVT_HOST_VECTORS
#undef KVT_HOST_VECTORS
#else
#define KVT_HOST_VECTORS
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

#include "kernels/float_bits.h"

#undef KVT_VECTORS
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
#define KVT_VECTORS 0
#else
#define KVT_VECTORS 1
HWY_BEFORE_NAMESPACE();
namespace kvtier::kernels::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using Words = hn::ScalableTag<std::uint32_t>;
using SignedWords = hn::ScalableTag<std::int32_t>;
using Halves = hn::ScalableTag<std::uint16_t>;
using FloatVector = hn::Vec<Floats>;
using WordVector = hn::Vec<Words>;
using HalfVector = hn::Vec<Halves>;
constexpr int kBlock =  // NOLINT(misc-definitions-in-headers): one an instruction set
    static_cast<int>(hn::MaxLanes(Halves()));

struct FloatBlock {
  FloatVector even, odd;
};
struct WordBlock {
  WordVector even, odd;
};

HWY_INLINE WordVector Word(std::uint32_t bits) { return hn::Set(Words(), bits); }
HWY_INLINE FloatVector Float(float value) { return hn::Set(Floats(), value); }
HWY_INLINE WordVector BitsOf(FloatVector x) { return hn::BitCast(Words(), x); }
HWY_INLINE FloatVector FloatOf(WordVector bits) { return hn::BitCast(Floats(), bits); }
HWY_INLINE WordVector MaxOf(WordVector a, WordVector b) {
  const SignedWords d;
  return hn::BitCast(Words(), hn::Max(hn::BitCast(d, a), hn::BitCast(d, b)));
}
HWY_INLINE WordVector MinOf(WordVector a, WordVector b) {
  const SignedWords d;
  return hn::BitCast(Words(), hn::Min(hn::BitCast(d, a), hn::BitCast(d, b)));
}
HWY_INLINE hn::Mask<Words> Less(WordVector a, WordVector b) {  // both below 2^31
  const SignedWords d;
  return hn::RebindMask(Words(), hn::Lt(hn::BitCast(d, a), hn::BitCast(d, b)));
}

// Of the magnitude of an fp16 in the lower half of each word.
HWY_INLINE FloatVector HalfToFloat(WordVector half) {
  const WordVector magnitude = hn::ShiftLeft<13>(half);
  const WordVector is_special = hn::VecFromMask(Words(), Less(Word(0x0f7fffffu), magnitude));
  const WordVector rebias = Word(0x38000000u);
  const WordVector normal = magnitude + rebias + (is_special & rebias);
  const FloatVector smallest = FloatOf(Word(0x38800000u));
  const WordVector small = BitsOf(FloatOf(magnitude + Word(0x38800000u)) - smallest);
  return FloatOf(hn::IfThenElse(Less(magnitude, Word(1u << 23)), small, normal));
}
// Of the magnitude of a code that is no NaN.
HWY_INLINE FloatVector E4m3ToFloat(WordVector code) {
  const WordVector magnitude = hn::ShiftLeft<20>(code);
  const FloatVector smallest = FloatOf(Word(121u << 23));
  const WordVector normal = magnitude + Word(120u << 23);
  const WordVector small = BitsOf(FloatOf(magnitude + Word(121u << 23)) - smallest);
  return FloatOf(hn::IfThenElse(Less(magnitude, Word(1u << 23)), small, normal));
}

// Of a signed code of nvfp4.
HWY_INLINE FloatVector E2m1ToFloat(WordVector code) {
  const WordVector magnitude = hn::ShiftLeft<22>(code & Word(7u));
  const WordVector normal = magnitude + Word(126u << 23);
  const WordVector small = BitsOf(FloatOf(magnitude + Word(127u << 23)) - Float(1.0f));
  const WordVector value = hn::IfThenElse(Less(magnitude, Word(1u << 23)), small, normal);
  return FloatOf(value | hn::ShiftLeft<28>(code & Word(8u)));
}

// Clamp, and FiniteOrZero of the inverse.
HWY_INLINE FloatVector ClampTo(FloatVector x, float largest) {
  return FloatOf(MinOf(MaxOf(BitsOf(x), Word(0)), BitsOf(Float(largest))));
}
HWY_INLINE FloatVector InverseOrZero(FloatVector x) {
  const FloatVector inverse = Float(1.0f) / x;
  return hn::IfThenElseZero(hn::Lt(hn::Abs(inverse), FloatOf(Word(kF32Infinity))), inverse);
}

// Of 0 <= x < 2^22, in the lowest 22 bits. ConvertTo does more: it saturates.
HWY_INLINE WordVector Truncate(FloatVector x) {
  const FloatVector magic = Float(12582912.0f), sum = x + magic;
  const auto too_large = hn::RebindMask(Words(), hn::Lt(x, sum - magic));
  return BitsOf(sum) + hn::VecFromMask(Words(), too_large);
}

// Each lane becomes the one 2^kStage away.
template <int kStage, class V>
HWY_INLINE V SwapLanes(V x) {
  if constexpr (kStage == 0) return hn::Shuffle2301(x);
  if constexpr (kStage == 1) return hn::Shuffle1032(x);
  const hn::DFromV<V> d;
  // Halves swap faster than lanes that cross them.
  if constexpr (kStage >= 2 && (4 << kStage) == kBlock) return hn::ConcatLowerUpper(d, x, x);
  if constexpr (kStage >= 2 && (4 << kStage) != kBlock) {
    const auto lanes = hn::Iota(SignedWords(), 0) ^ hn::Set(SignedWords(), 1 << kStage);
    return hn::TableLookupLanes(x, hn::IndicesFromVec(d, lanes));
  }
}
// What each kLanes lanes hold meets, each with its neighbour first; all of them hold the outcome.
template <int kLanes, class V, class F>
HWY_INLINE V Meet(V x, F f) {
  x = f(x, SwapLanes<0>(x));
  x = f(x, SwapLanes<1>(x));
  if constexpr (kLanes >= 8 && kBlock >= 16) x = f(x, SwapLanes<2>(x));
  if constexpr (kLanes >= 16 && kBlock >= 32) x = f(x, SwapLanes<3>(x));
  return x;
}
HWY_INLINE FloatBlock Product(FloatBlock a, FloatVector by) { return {a.even * by, a.odd * by}; }

HWY_INLINE HalfVector LoadHalves(const void* x) {
  return hn::LoadU(Halves(), static_cast<const std::uint16_t*>(x));
}
HWY_INLINE HalfVector LoadBytes(const std::uint8_t* x) {
  return hn::PromoteTo(Halves(), hn::LoadU(hn::Rebind<std::uint8_t, Halves>(), x));
}
HWY_INLINE WordBlock Split(HalfVector x) {
  const WordVector both = hn::BitCast(Words(), x);
  return {both & Word(0xffffu), hn::ShiftRight<16>(both)};
}
// The lower halves of all words, in order.
HWY_INLINE HalfVector Join(WordBlock x) {
  return hn::OddEven(hn::BitCast(Halves(), hn::ShiftLeft<16>(x.odd)),
                     hn::BitCast(Halves(), x.even));
}
// The lowest byte of each.
HWY_INLINE void StoreBytes(HalfVector x, std::uint8_t* out) {
#if HWY_TARGET == HWY_AVX2  // whose DemoteTo moves quarters of the vector, which is slow
  const hn::Repartition<std::uint8_t, Halves> all;
  alignas(32) static constexpr std::uint8_t kEven[32] = {
      0,    2,    4,    6,    8,    10,   12,   14,   0x80, 0x80, 0x80,
      0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
      0x80, 0x80, 0,    2,    4,    6,    8,    10,   12,   14};
  const auto halves = hn::TableLookupBytesOr0(hn::BitCast(all, x), hn::Load(all, kEven));
  const hn::Half<decltype(all)> half;
  hn::StoreU(hn::LowerHalf(half, halves) | hn::UpperHalf(half, halves), half, out);
#else
  const hn::RebindToSigned<Halves> d;
  const hn::Rebind<std::uint8_t, Halves> bytes;
  hn::StoreU(hn::DemoteTo(bytes, hn::BitCast(d, x & hn::Set(Halves(), 0xff))), bytes, out);
#endif
}

// The magnitudes of a block, and its signs at bit 15.
struct SignedBlock {
  FloatBlock magnitude;
  HalfVector sign;
};
HWY_INLINE FloatBlock Load(const float* x) {
  FloatVector even, odd;  // NOLINT(cppcoreguidelines-pro-type-member-init)
  hn::LoadInterleaved2(Floats(), x, even, odd);
  return {even, odd};
}
// Even values, then odd ones, as two vectors: no shuffles.
HWY_INLINE FloatBlock LoadInBlockOrder(const float* x) {
  return {hn::LoadU(Floats(), x), hn::LoadU(Floats(), x + kBlock / 2)};
}
HWY_INLINE void StoreInBlockOrder(FloatBlock block, float* x) {
  hn::StoreU(block.even, Floats(), x);
  hn::StoreU(block.odd, Floats(), x + kBlock / 2);
}
HWY_INLINE SignedBlock LoadSigned(const float* x) {
  const FloatBlock values = Load(x);
  const HalfVector upper =
      Join({hn::ShiftRight<16>(BitsOf(values.even)), hn::ShiftRight<16>(BitsOf(values.odd))});
  return {{hn::Abs(values.even), hn::Abs(values.odd)}, upper & hn::Set(Halves(), 0x8000)};
}
HWY_INLINE FloatBlock Bf16ToFloat(HalfVector x) {
  const WordVector both = hn::BitCast(Words(), x);
  return {FloatOf(hn::ShiftLeft<16>(both)), FloatOf(both & Word(0xffff0000u))};
}
HWY_INLINE FloatBlock Load(const Bf16* x) { return Bf16ToFloat(LoadHalves(x)); }
HWY_INLINE SignedBlock LoadSigned(const Bf16* x) {
  const HalfVector bits = LoadHalves(x), sign = hn::Set(Halves(), 0x8000);
  return {Bf16ToFloat(hn::AndNot(sign, bits)), bits & sign};
}
HWY_INLINE SignedBlock LoadSigned(const Fp16* x) {
  const HalfVector bits = LoadHalves(x), sign = hn::Set(Halves(), 0x8000);
  const WordBlock magnitude = Split(hn::AndNot(sign, bits));
  return {{HalfToFloat(magnitude.even), HalfToFloat(magnitude.odd)}, bits & sign};
}
HWY_INLINE FloatBlock HalvesToFloat(HalfVector x) {
  const HalfVector sign = hn::Set(Halves(), 0x8000);
  const WordBlock magnitude = Split(hn::AndNot(sign, x));
  const WordVector signs = hn::BitCast(Words(), x & sign);
  return {FloatOf(BitsOf(HalfToFloat(magnitude.even)) | hn::ShiftLeft<16>(signs)),
          FloatOf(BitsOf(HalfToFloat(magnitude.odd)) | (signs & Word(0xffff0000u)))};
}
HWY_INLINE FloatBlock Load(const Fp16* x) { return HalvesToFloat(LoadHalves(x)); }

// What follows rounds as RoundInRange does, for magnitudes up to kLargestBits<T>.
HWY_INLINE void Store(FloatBlock x, float* out) {
  hn::StoreInterleaved2(x.even, x.odd, Floats(), out);
}
HWY_INLINE HalfVector RoundTo(FloatBlock x, Bf16) {
  const auto round = [](WordVector u) {
    return u + Word(0x7fffu) + (hn::ShiftRight<16>(u) & Word(1u));
  };
  return hn::OddEven(hn::BitCast(Halves(), round(BitsOf(x.odd))),
                     hn::BitCast(Halves(), hn::ShiftRight<16>(round(BitsOf(x.even)))));
}
HWY_INLINE HalfVector RoundTo(FloatBlock x, Fp16) {
  const auto round = [](WordVector u) {
    const WordVector a = u & Word(0x7fffffffu);
    const WordVector normal =
        hn::ShiftRight<13>(a + Word(0xfffu - 0x38000000u) + (hn::ShiftRight<13>(a) & Word(1u)));
    const WordVector small = BitsOf(FloatOf(a) + Float(0.5f)) - Word(0x3f000000u);
    return hn::IfThenElse(Less(a, Word(0x38800000u)), small, normal) |
           (hn::ShiftRight<16>(u) & Word(0x8000u));
  };
  return Join({round(BitsOf(x.even)), round(BitsOf(x.odd))});
}
template <class T>
HWY_INLINE void Store(FloatBlock x, T* out) {
  hn::StoreU(RoundTo(x, T{}), Halves(), reinterpret_cast<std::uint16_t*>(out));
}

// A magnitude in a type of 7 bits besides the sign: the code in the lowest 7 bits, of which the
// others mean nothing, and its value. The sum's last place is the type's, so that the adder does
// the rounding; its lowest bits are the significand, to which the exponent is added.
struct RoundedVector {
  WordVector code;
  FloatVector value;
};
template <int kMantissa, std::uint32_t kMinExponent>
HWY_INLINE RoundedVector RoundMagnitude(FloatVector x) {
  const WordVector exponent = MaxOf(BitsOf(x) & Word(kF32Infinity), Word(kMinExponent << 23));
  // What the smallest exponent counts too much; even, so that ties go where they should.
  constexpr std::uint32_t kBias = (0u - (kMinExponent << kMantissa)) & 0xffu;
  static_assert(kBias % 2 == 0);
  const FloatVector addend = FloatOf(exponent + Word(((23u - kMantissa) << 23) + kBias));
  const FloatVector sum = x + addend;
  return {BitsOf(sum) + hn::ShiftRight<23 - kMantissa>(exponent), sum - addend};
}
HWY_INLINE RoundedVector RoundMagnitudeTo(FloatVector x, E4m3) { return RoundMagnitude<3, 121>(x); }
HWY_INLINE RoundedVector RoundMagnitudeTo(FloatVector x, E5m2) { return RoundMagnitude<2, 113>(x); }
template <class T>
HWY_INLINE void StoreSigned(SignedBlock x, T* out) {
  const HalfVector magnitude = Join(
      {RoundMagnitudeTo(x.magnitude.even, T{}).code, RoundMagnitudeTo(x.magnitude.odd, T{}).code});
  StoreBytes((magnitude & hn::Set(Halves(), 0x7f)) | hn::ShiftRight<8>(x.sign),
             reinterpret_cast<std::uint8_t*>(out));
}

}  // namespace
}  // namespace kvtier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // per instruction set
