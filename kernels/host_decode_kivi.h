// What decoders read of KIVI's codes. Included once per instruction set.
#if defined(KVT_HOST_DECODE_KIVI) == defined(HWY_TARGET_TOGGLE)
#ifdef KVT_HOST_DECODE_KIVI
#undef KVT_HOST_DECODE_KIVI
#else
#define KVT_HOST_DECODE_KIVI
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/codec_run.h"
#include "kernels/codec_table.h"
#include "kernels/host_vectors.h"
#include "kernels/row.h"

HWY_BEFORE_NAMESPACE();
namespace kvtier::kernels::HWY_NAMESPACE {
namespace {

// KIVI's scales or minima, at any address.
inline void LoadScales(const std::byte* stored, int count, ElementType type, float* out) {
  if (type == ElementType::kE4m3) {
    for (int i = 0; i < count; ++i) out[i] = ToFloat(E4m3{static_cast<std::uint8_t>(stored[i])});
    return;
  }
  for (int i = 0; i < count; ++i) {
    Fp16 x{};
    std::memcpy(&x, stored + 2 * i, sizeof x);
    out[i] = ToFloat(x);
  }
}

// The inverse of the encoder's PackCodes.
template <int kBits>
void UnpackCodes(const std::uint8_t* packed, int bytes, std::uint8_t* codes) {
  if constexpr (kBits == 8) {
    std::memcpy(codes, packed, static_cast<std::size_t>(bytes));
  } else {
    using Word = std::conditional_t<kBits == 2, std::uint32_t, std::uint16_t>;
    constexpr std::uint32_t kMask = kBits == 2 ? 0x03030303u : 0x0f0fu;
    for (int i = 0; i < bytes; ++i) {
      std::uint32_t bits = packed[i];
      if constexpr (kBits == 2) bits |= bits << 12;
      bits |= bits << (8 - kBits);
      const auto word = static_cast<Word>(bits & kMask);
      std::memcpy(codes + i * static_cast<int>(sizeof word), &word, sizeof word);
    }
  }
}

#if KVT_VECTORS

// Two of the rows of host_decode_rows.h.

template <int kBits>
HWY_INLINE FloatBlock KiviBlock(HalfVector codes, FloatBlock scale, FloatBlock minimum) {
  const WordBlock words = Split(codes & hn::Set(Halves(), (1 << kBits) - 1));
  const auto value = [](WordVector code, FloatVector by, FloatVector from) {
    return hn::ConvertTo(Floats(), hn::BitCast(SignedWords(), code)) * by + from;
  };
  return {value(words.even, scale.even, minimum.even), value(words.odd, scale.odd, minimum.odd)};
}

template <int kBits>
struct KiviChannelRow {
  const DecodeRun& run;
  std::int64_t loaded = -1;
  float largest = 0.0f;
  const std::uint8_t* codes = nullptr;
  int shift = 0;
  float scales[kMaxHeadDim] = {}, minima[kMaxHeadDim] = {};

  void LoadUnit(std::int64_t unit) {
    const std::byte* stored = run.in + unit * UnitSizeOf(run.codec, run.dim).total() +
                              std::int64_t{run.codec.group} * kBits / 8 * run.dim;
    LoadScales(stored, run.dim, run.codec.element, scales);
    LoadScales(stored + ElementBytes(run.codec.element) * run.dim, run.dim, run.codec.element,
               minima);
    const float scale = Integer<float>::Value(LargestMagnitudeOf(scales, run.dim));
    const float minimum = Integer<float>::Value(LargestMagnitudeOf(minima, run.dim));
    largest = static_cast<float>((1 << kBits) - 1) * scale + minimum;
    for (int c = 0; c < run.dim; c += kBlock) {
      StoreInBlockOrder(Load(scales + c), scales + c);
      StoreInBlockOrder(Load(minima + c), minima + c);
    }
    loaded = unit;
  }
  HWY_INLINE float Open(std::int64_t token) {
    constexpr int kPerByte = 8 / kBits;
    const std::int64_t unit = token / run.codec.group;
    if (unit != loaded) LoadUnit(unit);
    const auto in_unit = static_cast<int>(token % run.codec.group);
    codes = reinterpret_cast<const std::uint8_t*>(run.in) +
            unit * UnitSizeOf(run.codec, run.dim).total() +
            std::int64_t{in_unit / kPerByte} * run.dim;
    shift = in_unit % kPerByte * kBits;
    return largest;
  }
  HWY_INLINE FloatBlock Block(int c) const {
    return KiviBlock<kBits>(hn::ShiftRightSame(LoadBytes(codes + c), shift),
                            LoadInBlockOrder(scales + c), LoadInBlockOrder(minima + c));
  }
};

// Groups of whole blocks.
template <int kBits>
struct KiviTokenRow {
  const DecodeRun& run;
  std::uint8_t codes[kMaxHeadDim] = {};
  float stored[2 * kMaxHeadDim] = {};  // scales, then minima

  HWY_INLINE float Open(std::int64_t token) {
    const int groups = run.dim / run.codec.group, bytes = run.dim * kBits / 8;
    const std::byte* row = run.in + token * UnitSizeOf(run.codec, run.dim).total();
    UnpackCodes<kBits>(reinterpret_cast<const std::uint8_t*>(row), bytes, codes);
    LoadScales(row + bytes, 2 * groups, run.codec.element, stored);
    return static_cast<float>(1 << kBits) *
           Integer<float>::Value(LargestMagnitudeOf(stored, 2 * groups));
  }
  HWY_INLINE FloatBlock Block(int c) const {
    const int g = c / run.codec.group;
    const FloatVector scale = Float(stored[g]);
    const FloatVector minimum = Float(stored[run.dim / run.codec.group + g]);
    return KiviBlock<kBits>(LoadBytes(codes + c), {scale, scale}, {minimum, minimum});
  }
};

#endif  // KVT_VECTORS

}  // namespace
}  // namespace kvtier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // per instruction set
