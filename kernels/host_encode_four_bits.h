// Encoders of 4 bits in vectors. Included once per instruction set.
#if defined(KVT_HOST_ENCODE_FOUR_BITS) == defined(HWY_TARGET_TOGGLE)
#ifdef KVT_HOST_ENCODE_FOUR_BITS
#undef KVT_HOST_ENCODE_FOUR_BITS
#else
#define KVT_HOST_ENCODE_FOUR_BITS
#endif

#include <cstdint>
#include <cstring>

#include "kernels/host_hadamard.h"
#include "kernels/host_vectors.h"
#include "kernels/int4_per_token_head.h"
#include "kernels/llama_block.h"
#include "kernels/nvfp4.h"
#include "kernels/row.h"

HWY_BEFORE_NAMESPACE();
namespace kvtier::kernels::HWY_NAMESPACE {
namespace {

#if KVT_VECTORS

// LlamaQ4::Encode. What is computed of the block stays in vectors, in each lane alike.
template <class Source>
HWY_INLINE void EncodeQ4Block(const Source* x, std::uint8_t* out) {
  constexpr int kVectors = kLlamaBlock / kBlock;
  FloatBlock b[kVectors];
  FloatVector highest = Float(0.0f), lowest = Float(0.0f);
  for (int i = 0; i < kVectors; ++i) {
    b[i] = Load(x + i * kBlock);
    highest = hn::Max(highest, hn::Max(b[i].even, b[i].odd));
    lowest = hn::Min(lowest, hn::Min(b[i].even, b[i].odd));
  }
  highest = Meet<kLlamaBlock>(highest, [](FloatVector v, FloatVector w) { return hn::Max(v, w); });
  lowest = Meet<kLlamaBlock>(lowest, [](FloatVector v, FloatVector w) { return hn::Min(v, w); });
  const FloatVector down = hn::Neg(lowest);
  // Which of two came first, and a block of zeros: seldom, and found one by one.
  if (hn::GetLane(highest) == hn::GetLane(down)) return LlamaQ4::Encode(x, out);
  const FloatVector largest = hn::IfThenElse(hn::Lt(down, highest), highest, lowest);
  const FloatVector d = largest / Float(-8.0f);
  const std::uint16_t stored = hn::GetLane(RoundTo(FloatBlock{d, d}, Fp16()));
  std::memcpy(out, &stored, sizeof stored);
  const FloatVector inverse = InverseOrZero(d);
  std::uint8_t codes[kLlamaBlock];
  const auto code = [inverse](FloatVector v) {
    return Truncate(ClampTo(v * inverse + Float(8.5f), 15.0f));
  };
  for (int i = 0; i < kVectors; ++i)
    StoreBytes(Join({code(b[i].even), code(b[i].odd)}), codes + i * kBlock);
  const hn::CappedTag<std::uint8_t, kLlamaBlock / 2> d8;
  const auto high = hn::ShiftLeft<4>(hn::LoadU(d8, codes + kLlamaBlock / 2));
  hn::StoreU(hn::LoadU(d8, codes) | high, d8, out + 2);
}

// The codes of a block in the lowest 4 bits of its words, as bytes, even channels low.
HWY_INLINE void StoreNibbles(WordBlock codes, std::uint8_t* out) {
  const hn::Rebind<std::uint8_t, Words> bytes;
  hn::StoreU(hn::U8FromU32(codes.even | hn::ShiftLeft<4>(codes.odd)), bytes, out);
}

// nvfp4. A block's 16 channels are 8 words of a vector's even and odd channels, or of two vectors'.
constexpr int kNvfp4Vectors =  // NOLINT(misc-definitions-in-headers): one an instruction set
    kBlock < Nvfp4Block::kValues ? Nvfp4Block::kValues / kBlock : 1;
constexpr int kNvfp4Channels = kNvfp4Vectors * kBlock;  // NOLINT(misc-definitions-in-headers)

template <class V, class F>
HWY_INLINE V MeetInNvfp4Block(const V (&parts)[kNvfp4Vectors], F f) {
  constexpr int kWords = Nvfp4Block::kValues / 2;
  const V met = Meet<kWords>(parts[0], f);
  return kNvfp4Vectors == 1 ? met : f(met, Meet<kWords>(parts[kNvfp4Vectors - 1], f));
}

// Of each of a row's blocks, with the largest magnitude at one code value.
struct Nvfp4Scales {
  static constexpr int kMaxBlocks = kMaxHeadDim / Nvfp4Block::kValues;
  std::uint32_t codes[kMaxBlocks];
  float steps[kMaxBlocks], inverses[kMaxBlocks];

  // Whether no value lies beyond 7.
  HWY_INLINE bool Fill(const float* largest, int blocks, float divisor, float scale_of_all) {
    const Floats d;
    WordVector most = Word(0);
    for (int b = 0; b < blocks; b += kBlock / 2) {
      const FloatVector magnitude = hn::LoadU(d, largest + b);
      const FloatVector exact = Float(1.0f / scale_of_all) * (magnitude * Float(1.0f / divisor));
      const WordVector held = MinOf(BitsOf(exact), Word(kLargestBits<E4m3>));
      const WordVector code = RoundMagnitudeTo(FloatOf(held), E4m3()).code & Word(0x7fu);
      const FloatVector step = E4m3ToFloat(code) * Float(scale_of_all);
      const FloatVector inverse = InverseOrZero(step);
      hn::StoreU(code, Words(), codes + b);
      hn::StoreU(step, d, steps + b);
      hn::StoreU(inverse, d, inverses + b);
      most = MaxOf(most, BitsOf(magnitude * inverse));
    }
    return hn::GetLane(hn::MaxOfLanes(Words(), most)) <= Bits(7.0f);
  }
  // Of the blocks from b on, in the words of each.
  static HWY_INLINE FloatVector Spread(const float* of_blocks, int b) {
    if constexpr (kBlock <= Nvfp4Block::kValues) {
      return Float(of_blocks[b]);
    } else {
      return hn::ConcatUpperLower(Floats(), Float(of_blocks[b + 1]), Float(of_blocks[b]));
    }
  }
};

// The codes of the blocks from b on, without signs.
struct Nvfp4Codes {
  WordBlock magnitudes[kNvfp4Vectors];
  FloatVector error;
};
template <bool kMeasured>
HWY_INLINE Nvfp4Codes EncodeNvfp4(const SignedBlock (&x)[kNvfp4Vectors], const Nvfp4Scales& scales,
                                  int b) {
  const FloatVector step = Nvfp4Scales::Spread(scales.steps, b);
  const FloatVector inverse = Nvfp4Scales::Spread(scales.inverses, b);
  const auto round = [inverse](FloatVector v) {
    const WordVector held = MinOf(BitsOf(v * inverse), Word(kE2m1LargestBits));
    return RoundMagnitude<1, 127>(FloatOf(held));
  };
  const auto square = [step](FloatVector v, FloatVector rounded) {
    const FloatVector off = v - rounded * step;
    return off * off;
  };
  Nvfp4Codes out;
  FloatVector errors[kNvfp4Vectors];
  for (int i = 0; i < kNvfp4Vectors; ++i) {
    const FloatBlock& v = x[i].magnitude;
    const RoundedVector even = round(v.even), odd = round(v.odd);
    out.magnitudes[i] = {even.code & Word(7u), odd.code & Word(7u)};
    if constexpr (kMeasured) errors[i] = square(v.even, even.value) + square(v.odd, odd.value);
  }
  if constexpr (kMeasured) {
    out.error = MeetInNvfp4Block(errors, [](FloatVector a, FloatVector c) { return a + c; });
  }
  return out;
}

// EncodeNvfp4Row, where nothing saturates; false where something does.
template <bool kFourOverSix, class Source>
HWY_INLINE bool EncodeNvfp4Blocks(const Source* x, int dim, float scale, std::uint8_t* out) {
  constexpr int kValues = Nvfp4Block::kValues;
  const int blocks = dim / kValues;
  std::uint32_t is_four[kMaxHeadDim / 2];
  float spread[kMaxHeadDim / 2], largest[Nvfp4Scales::kMaxBlocks] = {};
  for (int c = 0; c < dim; c += kNvfp4Channels) {
    WordVector magnitudes[kNvfp4Vectors];
    for (int i = 0; i < kNvfp4Vectors; ++i) {
      const FloatBlock v = LoadSigned(x + c + i * kBlock).magnitude;
      magnitudes[i] = MaxOf(BitsOf(v.even), BitsOf(v.odd));
    }
    hn::StoreU(FloatOf(MeetInNvfp4Block(magnitudes, MaxOf)), Floats(), spread + c / 2);
  }
  for (int b = 0; b < blocks; ++b) largest[b] = spread[b * kValues / 2];

  Nvfp4Scales six, four;
  if (!six.Fill(largest, blocks, Nvfp4Block::kLargest, scale)) return false;
  if constexpr (kFourOverSix) four.Fill(largest, blocks, 4.0f, scale);
  for (int c = 0; c < dim; c += kNvfp4Channels) {
    const int b = c / kValues;
    SignedBlock v[kNvfp4Vectors];
    for (int i = 0; i < kNvfp4Vectors; ++i) v[i] = LoadSigned(x + c + i * kBlock);
    Nvfp4Codes codes = EncodeNvfp4<kFourOverSix>(v, six, b);
    if constexpr (kFourOverSix) {
      const Nvfp4Codes other = EncodeNvfp4<true>(v, four, b);
      const auto better = hn::RebindMask(Words(), hn::Lt(other.error, codes.error));
      for (int i = 0; i < kNvfp4Vectors; ++i) {
        WordBlock& to = codes.magnitudes[i];
        to.even = hn::IfThenElse(better, other.magnitudes[i].even, to.even);
        to.odd = hn::IfThenElse(better, other.magnitudes[i].odd, to.odd);
      }
      hn::StoreU(hn::IfThenElse(better, Word(1), Word(0)), Words(), is_four + c / 2);
    }
    for (int i = 0; i < kNvfp4Vectors; ++i) {
      const WordVector sign = hn::BitCast(Words(), v[i].sign);
      StoreNibbles({codes.magnitudes[i].even | (hn::ShiftRight<12>(sign) & Word(8u)),
                    codes.magnitudes[i].odd | hn::ShiftRight<28>(sign)},
                   out + (c + i * kBlock) / 2);
    }
  }
  for (int b = 0; b < blocks; ++b) {
    const bool took_four = kFourOverSix && is_four[b * kValues / 2] != 0;
    out[dim / 2 + b] = static_cast<std::uint8_t>((took_four ? four : six).codes[b]);
  }
  return true;
}

// RoundInRange, as fp32.
HWY_INLINE FloatVector RoundedTo(FloatVector x, float) { return x; }
HWY_INLINE FloatVector RoundedTo(FloatVector x, Bf16) {
  const WordVector u = BitsOf(x);
  const WordVector rounded = u + Word(0x7fffu) + (hn::ShiftRight<16>(u) & Word(1u));
  return FloatOf(rounded & Word(0xffff0000u));
}
HWY_INLINE FloatVector RoundedTo(FloatVector x, Fp16) {
  const WordVector u = BitsOf(x), a = u & Word(0x7fffffffu);
  const WordVector normal =
      (a + Word(0xfffu) + (hn::ShiftRight<13>(a) & Word(1u))) & Word(~0x1fffu);
  const WordVector small = BitsOf((FloatOf(a) + Float(0.5f)) - Float(0.5f));
  return FloatOf((u & Word(0x80000000u)) |
                 hn::IfThenElse(Less(a, Word(0x38800000u)), small, normal));
}

// Int4PerTokenHead::Encode, where nothing saturates; false where something might.
template <class Source>
HWY_INLINE bool EncodeInt4Blocks(const Source* x, int dim, std::uint8_t* out) {
  constexpr int kLanes = kBlock / 2;
  const Floats d;
  float y[kMaxHeadDim];
  for (int c = 0; c < dim; c += kBlock)
    StoreInBlockOrder(HadamardInBlock(WithRotationSigns(Load(x + c), c)), y + c);
  HadamardOfBlocks(y, dim);
  WordVector largest = Word(0);
  FloatVector low = RoundedTo(hn::LoadU(d, y), Source()), high = low;
  for (int i = 0; i < dim; i += kLanes) {
    const FloatVector exact = hn::LoadU(d, y + i);
    largest = MaxOf(largest, BitsOf(hn::Abs(exact)));
    const FloatVector rounded = RoundedTo(exact, Source());
    low = hn::Min(low, rounded);
    high = hn::Max(high, rounded);
    hn::StoreU(rounded, d, y + i);
  }
  if (hn::GetLane(hn::MaxOfLanes(Words(), largest)) > kLargestBits<Source>) return false;
  const float minimum = hn::GetLane(hn::MinOfLanes(d, low));
  const float maximum = hn::GetLane(hn::MaxOfLanes(d, high));
  using Int4 = Int4PerTokenHead;
  const auto scaling = Int4::Scaling::Of(minimum, maximum);
  if (Int4::Scaling::Saturates(scaling.Code(minimum)) ||
      Int4::Scaling::Saturates(scaling.Code(maximum)))
    return false;
  const FloatVector inverse = Float(1.0f / scaling.scale);
  const FloatVector zero_point = Float(static_cast<float>(scaling.zero_point));
  const auto code = [&](FloatVector v) {
    return Truncate(ClampTo((v * inverse + zero_point) + Float(0.5f), 15.5f)) & Word(15u);
  };
  for (int c = 0; c < dim; c += kBlock) {
    const FloatBlock b = LoadInBlockOrder(y + c);
    StoreNibbles({code(b.even), code(b.odd)}, out + c / 2);
  }
  scaling.Store(out + dim / 2);
  return true;
}

#endif  // KVT_VECTORS

}  // namespace
}  // namespace kvtier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // per instruction set
