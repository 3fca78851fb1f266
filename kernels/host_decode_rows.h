// Decoders in vectors, for rows of whole blocks and outputs that aren't FP8: what a row's largest
// value may be is known before it is decoded, so that values are rounded where they are made. Bytes
// are those of the functions with which kernels/ describes each codec. Included once per
// instruction set.
#if defined(KVT_HOST_DECODE_ROWS) == defined(HWY_TARGET_TOGGLE)
#ifdef KVT_HOST_DECODE_ROWS
#undef KVT_HOST_DECODE_ROWS
#else
#define KVT_HOST_DECODE_ROWS
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/codec_run.h"
#include "kernels/codec_table.h"
#include "kernels/host_decode_kivi.h"
#include "kernels/host_hadamard.h"
#include "kernels/host_vectors.h"
#include "kernels/int4_per_token_head.h"
#include "kernels/llama_block.h"
#include "kernels/mla_fp8.h"
#include "kernels/nvfp4.h"
#include "kernels/row.h"

HWY_BEFORE_NAMESPACE();
namespace kvtier::kernels::HWY_NAMESPACE {
namespace {

#if KVT_VECTORS

// Each kind of row below has
//   float Open(token): looks at a row; no value will lie above what this returns;
//   FloatBlock Block(c): its values from channel c on.

HWY_INLINE FloatBlock SignedBytes(const std::uint8_t* codes) {
  const hn::Rebind<std::int8_t, Halves> bytes;
  const hn::RebindToSigned<Halves> halves;
  const auto* signed_codes = reinterpret_cast<const std::int8_t*>(codes);
  const auto both =
      hn::BitCast(SignedWords(), hn::PromoteTo(halves, hn::LoadU(bytes, signed_codes)));
  return {hn::ConvertTo(Floats(), hn::ShiftRight<16>(hn::ShiftLeft<16>(both))),
          hn::ConvertTo(Floats(), hn::ShiftRight<16>(both))};
}

// E4M3 codes, no NaN among them, as 16-bit floats: a normal code's bits, moved, and `bias`; the
// values of the eight others are looked up in `small`.
template <int kMantissa>
HWY_INLINE HalfVector E4m3ToHalves(const std::uint8_t* codes, const std::uint16_t* small,
                                   std::uint16_t bias) {
  const Halves d;
  const hn::Repartition<std::uint8_t, Halves> bytes;
  const HalfVector code = LoadBytes(codes);
  const HalfVector magnitude = code & hn::Set(d, 0x7f);
  const HalfVector normal = hn::ShiftLeft<kMantissa - 3>(magnitude) + hn::Set(d, bias);
  const HalfVector indices = magnitude * hn::Set(d, 0x0202) + hn::Set(d, 0x0100);
  const auto table = hn::BitCast(bytes, hn::LoadDup128(d, small));
  const HalfVector looked_up =
      hn::BitCast(d, hn::TableLookupBytes(table, hn::BitCast(bytes, indices)));
  const hn::RebindToSigned<Halves> sd;
  const auto is_small = hn::Lt(hn::BitCast(sd, magnitude), hn::Set(sd, 8));
  const HalfVector value = hn::IfThenElse(hn::RebindMask(d, is_small), looked_up, normal);
  return value | hn::ShiftLeft<8>(hn::AndNot(hn::Set(d, 0x7f), code));
}

template <class T>
HWY_INLINE FloatBlock LoadElements(const T* x) {
  return Load(x);
}
template <>
HWY_INLINE FloatBlock LoadElements(const E4m3* x) {
  // As bf16: 0 to 7 times 2^-9, and what lies between the bits of 2^-6 and its code's.
  alignas(16) static constexpr std::uint16_t kSmall[8] = {0x0000, 0x3b00, 0x3b80, 0x3bc0,
                                                          0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const auto* codes = reinterpret_cast<const std::uint8_t*>(x);
  return Bf16ToFloat(E4m3ToHalves<7>(codes, kSmall, 0x3c00));
}
template <>
HWY_INLINE FloatBlock LoadElements(const E5m2* x) {
  const HalfVector codes = LoadBytes(reinterpret_cast<const std::uint8_t*>(x));
  return HalvesToFloat(hn::ShiftLeft<8>(codes));
}

// [dim] values of T and their scale: one for all, one a row behind them, or one a unit.
template <class T>
struct ElementRow {
  const DecodeRun& run;
  const std::int64_t unit_bytes = UnitSizeOf(run.codec, run.dim).total();
  const std::int64_t unit_tokens = UnitTokens(run.codec);
  const T* x = nullptr;
  float scale = 1.0f;

  HWY_INLINE float Open(std::int64_t token) {
    const std::int64_t at = unit_tokens == 1 ? token : token / unit_tokens;
    const std::byte* unit = run.in + at * unit_bytes;
    x = reinterpret_cast<const T*>(unit) + (token - at * unit_tokens) * run.dim;
    if (run.codec.id == CodecId::kFp8) {
      scale = run.scale;
    } else if (run.codec.id != CodecId::kRaw) {
      std::memcpy(&scale, unit + unit_tokens * run.dim, sizeof scale);
    }
    return Integer<T>::Value(LargestMagnitudeOf(x, run.dim)) * scale;
  }
  HWY_INLINE FloatBlock Block(int c) const { return Product(LoadElements(x + c), Float(scale)); }
};

struct Int8Row {
  const DecodeRun& run;
  const std::uint8_t* codes = nullptr;
  float scale = 0.0f;

  HWY_INLINE float Open(std::int64_t token) {
    codes = reinterpret_cast<const std::uint8_t*>(run.in) + token * (run.dim + 4);
    std::memcpy(&scale, codes + run.dim, sizeof scale);
    return 128.0f * scale;
  }
  HWY_INLINE FloatBlock Block(int c) const { return Product(SignedBytes(codes + c), Float(scale)); }
};

// llama.cpp's blocks. Codes of 4 bits are spread to bytes first.
template <class Kind>
struct LlamaRow {
  static constexpr int kMaxBlocks = kMaxHeadDim / kLlamaBlock;
  const DecodeRun& run;
  const std::uint8_t* row = nullptr;
  float scales[kMaxBlocks] = {};
  std::uint8_t codes[kMaxHeadDim] = {};

  float Open(std::int64_t token) {
    const int blocks = run.dim / kLlamaBlock;
    row = reinterpret_cast<const std::uint8_t*>(run.in) + token * blocks * Kind::kBytes;
    for (int b = 0; b < blocks; ++b) {
      const std::uint8_t* block = row + b * Kind::kBytes;
      Fp16 stored{};
      std::memcpy(&stored, block, sizeof stored);
      scales[b] = ToFloat(stored);
      if constexpr (Kind::kBytes == kLlamaQ4Bytes) {
        const hn::CappedTag<std::uint8_t, kLlamaBlock / 2> d;
        const auto both = hn::LoadU(d, block + 2), eight = hn::Set(d, 8);
        std::uint8_t* to = codes + b * kLlamaBlock;
        hn::StoreU((both & hn::Set(d, 15)) - eight, d, to);
        hn::StoreU(hn::ShiftRight<4>(both) - eight, d, to + kLlamaBlock / 2);
      }
    }
    return 128.0f * Integer<float>::Value(LargestMagnitudeOf(scales, blocks));
  }
  HWY_INLINE FloatBlock Block(int c) const {
    const int b = c / kLlamaBlock;
    const std::uint8_t* from =
        Kind::kBytes == kLlamaQ4Bytes ? codes + c : row + b * Kind::kBytes + 2 + c % kLlamaBlock;
    return Product(SignedBytes(from), Float(scales[b]));
  }
};

struct Nvfp4Row {
  const DecodeRun& run;
  const std::uint8_t* row = nullptr;
  float steps[kMaxHeadDim / 2] = {};  // of each block of 16 channels, 8 times

  float Open(std::int64_t token) {
    constexpr int kTimes = Nvfp4Block::kValues / 2;
    row = reinterpret_cast<const std::uint8_t*>(run.in) +
          token * (run.dim / 2 + run.dim / Nvfp4Block::kValues);
    const std::uint8_t* scales = row + run.dim / 2;
    for (int b = 0; b < run.dim / Nvfp4Block::kValues; ++b) {
      const float step = ToFloat(E4m3{scales[b]}) * run.scale;
      for (int i = 0; i < kTimes; ++i) steps[b * kTimes + i] = step;
    }
    return Nvfp4Block::kLargest * Integer<float>::Value(LargestMagnitudeOf(steps, run.dim / 2));
  }
  HWY_INLINE FloatBlock Block(int c) const {
    const hn::Rebind<std::uint8_t, Words> bytes;
    const WordVector both = hn::PromoteTo(Words(), hn::LoadU(bytes, row + c / 2));
    return Product({E2m1ToFloat(both & Word(15u)), E2m1ToFloat(hn::ShiftRight<4>(both))},
                   hn::LoadU(Floats(), steps + c / 2));
  }
};

// MlaFp8::Decode.
struct MlaRow {
  const DecodeRun& run;
  const std::uint8_t* row = nullptr;
  float scales[MlaFp8::kTiles] = {};
  Bf16 rope[MlaFp8::kRope] = {};

  float Open(std::int64_t token) {
    constexpr int kBytes = MlaFp8::kCodeBytes + MlaFp8::kScaleBytes;
    row = reinterpret_cast<const std::uint8_t*>(run.in) + token * kBytes;
    std::memcpy(scales, row + MlaFp8::kLatent, sizeof scales);
    std::memcpy(rope, row + MlaFp8::kLatent + MlaFp8::kScaleBytes, sizeof rope);
    const auto* latent = reinterpret_cast<const E4m3*>(row);
    // A sum, so that a NaN in any of them shows.
    return Integer<E4m3>::Value(LargestMagnitudeOf(latent, MlaFp8::kLatent)) *
               Integer<float>::Value(LargestMagnitudeOf(scales, MlaFp8::kTiles)) +
           Integer<Bf16>::Value(LargestMagnitudeOf(rope, MlaFp8::kRope));
  }
  HWY_INLINE FloatBlock Block(int c) const {
    if (c >= MlaFp8::kLatent) return Load(rope + c - MlaFp8::kLatent);
    return Product(LoadElements(reinterpret_cast<const E4m3*>(row + c)),
                   Float(scales[c / MlaFp8::kTile]));
  }
};

// Int4PerTokenHead::Decode.
struct Int4Row {
  const DecodeRun& run;
  const FloatVector factor = Float(1.0f / static_cast<float>(HadamardBlock(run.dim)));
  float values[kMaxHeadDim] = {};

  float Open(std::int64_t token) {
    const hn::Rebind<std::uint8_t, Words> bytes;
    const int dim = run.dim;
    const auto* row = reinterpret_cast<const std::uint8_t*>(run.in) + token * (dim / 2 + 4);
    const auto scaling = Int4PerTokenHead::Scaling::Load(row + dim / 2);
    const auto value = [zero = hn::Set(SignedWords(), scaling.zero_point),
                        scale = Float(scaling.scale)](WordVector code) {
      return hn::ConvertTo(Floats(), hn::BitCast(SignedWords(), code) - zero) * scale;
    };
    for (int c = 0; c < dim; c += kBlock) {
      const WordVector both = hn::PromoteTo(Words(), hn::LoadU(bytes, row + c / 2));
      const FloatBlock x = {value(both & Word(15u)), value(hn::ShiftRight<4>(both))};
      StoreInBlockOrder(HadamardInBlock(x), values + c);
    }
    HadamardOfBlocks(values, dim);
    return Integer<float>::Value(LargestMagnitudeOf(values, dim)) * hn::GetLane(factor);
  }
  HWY_INLINE FloatBlock Block(int c) const {
    return WithRotationSigns(Product(LoadInBlockOrder(values + c), factor), c);
  }
};

// A row that was rotated before it was encoded.
template <class Row>
struct RotatedRow {
  const DecodeRun& run;
  Row row;
  const FloatVector factor = Float(RotationFactor(run.dim));
  float values[kMaxHeadDim] = {};

  float Open(std::int64_t token) {
    const float largest = row.Open(token);
    if (!IsFinite(largest)) return largest;
    for (int c = 0; c < run.dim; c += kBlock)
      StoreInBlockOrder(HadamardInBlock(row.Block(c)), values + c);
    HadamardOfBlocks(values, run.dim);
    return Integer<float>::Value(LargestMagnitudeOf(values, run.dim)) * hn::GetLane(factor);
  }
  HWY_INLINE FloatBlock Block(int c) const { return Product(LoadInBlockOrder(values + c), factor); }
};

// E4M3 times a power of two, as 16-bit floats without a multiplication.
template <class Out>
struct ShiftedE4m3 {
  static constexpr int kMantissa = std::is_same_v<Out, Bf16> ? 7 : 10;
  std::uint16_t small[8] = {};
  std::uint16_t bias = 0;
  bool fits = false;  // the smallest normal value is normal in Out, too

  explicit ShiftedE4m3(float scale) {
    const auto value = [scale](int code) {
      return ToFloat(E4m3{static_cast<std::uint8_t>(code)}) * scale;
    };
    if (Bits(value(0x7e)) > kLargestBits<Out>) return;
    for (int code = 0; code < 8; ++code) small[code] = RoundInRange<Out>(value(code)).bits;
    const std::uint16_t normal = RoundInRange<Out>(value(8)).bits;
    bias = static_cast<std::uint16_t>(normal - (8 << (kMantissa - 3)));
    fits = (Bits(scale) & 0x7fffffu) == 0 && normal >= (1 << kMantissa);
  }
  HWY_INLINE void Store(const std::uint8_t* codes, Out* out) const {
    hn::StoreU(E4m3ToHalves<kMantissa>(codes, small, bias), Halves(),
               reinterpret_cast<std::uint16_t*>(out));
  }
};

template <class Plain>
std::uint64_t DecodeOneRow(const DecodeRun& run, std::int64_t row, Plain plain) {
  DecodeRun one = run;
  one.first_token += row;
  one.tokens = 1;
  one.out.data += row * run.out.token_stride * ElementBytes(run.out.type);
  return plain(one);
}

template <class Row, class Out, class Plain>
std::uint64_t DecodeRowsTo(const DecodeRun& run, Row& row, Plain plain) {
  std::uint64_t saturated = 0;
  for (std::int64_t i = 0; i < run.tokens; ++i) {
    Out* out = reinterpret_cast<Out*>(run.out.data) + i * run.out.token_stride;
    const std::uint32_t largest = Bits(row.Open(run.first_token + i)) & 0x7fffffffu;
    if (largest > kLargestBits<Out>) {
      saturated += DecodeOneRow(run, i, plain);
      continue;
    }
    for (int c = 0; c < run.dim; c += kBlock) Store(row.Block(c), out + c);
  }
  return saturated;
}

template <class Out, class Plain>
std::uint64_t DecodeShiftedE4m3(const DecodeRun& run, const ShiftedE4m3<Out>& shifted,
                                Plain plain) {
  std::uint64_t saturated = 0;
  for (std::int64_t i = 0; i < run.tokens; ++i) {
    const std::byte* row = run.in + (run.first_token + i) * run.dim;
    if (LargestMagnitudeOf(reinterpret_cast<const E4m3*>(row), run.dim) == 0x7f) {  // NaN
      saturated += DecodeOneRow(run, i, plain);
      continue;
    }
    Out* out = reinterpret_cast<Out*>(run.out.data) + i * run.out.token_stride;
    for (int c = 0; c < run.dim; c += kBlock)
      shifted.Store(reinterpret_cast<const std::uint8_t*>(row) + c, out + c);
  }
  return saturated;
}

// plain(run) decodes rows that hold too large a value.
template <class Row, class Plain>
std::uint64_t DecodeUnrotated(const DecodeRun& run, Row row, Plain plain) {
  switch (run.out.type) {
    case ElementType::kBf16:
      return DecodeRowsTo<Row, Bf16>(run, row, plain);
    case ElementType::kFp16:
      return DecodeRowsTo<Row, Fp16>(run, row, plain);
    default:
      return DecodeRowsTo<Row, float>(run, row, plain);
  }
}

template <class Row, class Plain>
std::uint64_t DecodeBlocks(const DecodeRun& run, Row row, Plain plain) {
  if (run.codec.rotation == Rotation::kNone) return DecodeUnrotated(run, row, plain);
  return DecodeUnrotated(run, RotatedRow<Row>{run, row}, plain);
}

template <template <int> class Row, class Plain>
std::uint64_t DecodeKiviBlocks(const DecodeRun& run, Plain plain) {
  if (run.codec.bits == 2) return DecodeBlocks(run, Row<2>{run}, plain);
  if (run.codec.bits == 4) return DecodeBlocks(run, Row<4>{run}, plain);
  return DecodeBlocks(run, Row<8>{run}, plain);
}

inline bool TakesBlocks(const DecodeRun& run) {
  return run.dim % kBlock == 0 && ElementBytes(run.out.type) > 1 &&
         (run.codec.id != CodecId::kKiviToken || run.codec.group % kBlock == 0);
}

template <class Plain>
std::uint64_t DecodeE4m3Blocks(const DecodeRun& run, Plain plain) {
  if (run.codec.rotation == Rotation::kNone && run.out.type == ElementType::kBf16) {
    const ShiftedE4m3<Bf16> shifted(run.scale);
    if (shifted.fits) return DecodeShiftedE4m3(run, shifted, plain);
  }
  if (run.codec.rotation == Rotation::kNone && run.out.type == ElementType::kFp16) {
    const ShiftedE4m3<Fp16> shifted(run.scale);
    if (shifted.fits) return DecodeShiftedE4m3(run, shifted, plain);
  }
  return DecodeBlocks(run, ElementRow<E4m3>{run}, plain);
}

template <class Plain>
std::uint64_t DecodeByBlocks(const DecodeRun& run, Plain plain) {
  switch (run.codec.id) {
    case CodecId::kInt8PerTokenHead:
      return DecodeBlocks(run, Int8Row{run}, plain);
    case CodecId::kLlamaQ8:
      return DecodeBlocks(run, LlamaRow<LlamaQ8>{run}, plain);
    case CodecId::kLlamaQ4:
      return DecodeBlocks(run, LlamaRow<LlamaQ4>{run}, plain);
    case CodecId::kNvfp4:
    case CodecId::kNvfp4FourOverSix:
      return DecodeBlocks(run, Nvfp4Row{run}, plain);
    case CodecId::kKiviChannel:
      return DecodeKiviBlocks<KiviChannelRow>(run, plain);
    case CodecId::kKiviToken:
      return DecodeKiviBlocks<KiviTokenRow>(run, plain);
    case CodecId::kInt4PerTokenHead:
      return DecodeBlocks(run, Int4Row{run}, plain);
    case CodecId::kMlaFp8:
      return DecodeBlocks(run, MlaRow{run}, plain);
    case CodecId::kFp8:
      if (run.codec.element == ElementType::kE4m3) return DecodeE4m3Blocks(run, plain);
      return DecodeBlocks(run, ElementRow<E5m2>{run}, plain);
    case CodecId::kFp8PerTokenHead:
    case CodecId::kFp8Page:
      return DecodeBlocks(run, ElementRow<E4m3>{run}, plain);
    default:
      return VisitElement(run.codec.element, [&](auto element) {
        return DecodeBlocks(run, ElementRow<decltype(element)>{run}, plain);
      });
  }
}

#endif  // KVT_VECTORS

}  // namespace
}  // namespace kvtier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // per instruction set
