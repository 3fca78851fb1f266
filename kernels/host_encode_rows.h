// Rows of the host's encoders in vectors, where plain loops miss their goal. Bytes are those of the
// functions with which kernels/ describes each codec. Included once per instruction set.
#if defined(KVT_HOST_ENCODE_ROWS) == defined(HWY_TARGET_TOGGLE)
#ifdef KVT_HOST_ENCODE_ROWS
#undef KVT_HOST_ENCODE_ROWS
#else
#define KVT_HOST_ENCODE_ROWS
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/codec_run.h"
#include "kernels/host_vectors.h"
#include "kernels/kivi.h"
#include "kernels/mla_fp8.h"
#include "kernels/row.h"

HWY_BEFORE_NAMESPACE();
namespace kvtier::kernels::HWY_NAMESPACE {
namespace {

template <class Source>
const Source* RowAt(const EncodeRun& run, std::int64_t token) {
  return reinterpret_cast<const Source*>(run.source.data) + token * run.source.token_stride;
}

#if KVT_VECTORS

// x * factor or x / factor, rounded to T; none overflows.
template <bool kDivide, class Source, class T>
HWY_INLINE void ScaleBlocks(const Source* x, int dim, float factor, T* out) {
  const FloatVector by = Float(factor);
  const auto scaled = [by](FloatVector v) { return kDivide ? v / by : v * by; };
  for (int c = 0; c < dim; c += kBlock) {
    if constexpr (sizeof(T) == 1) {
      const SignedBlock b = LoadSigned(x + c);
      StoreSigned({{scaled(b.magnitude.even), scaled(b.magnitude.odd)}, b.sign}, out + c);
    } else {
      const FloatBlock b = Load(x + c);
      Store(FloatBlock{scaled(b.even), scaled(b.odd)}, out + c);
    }
  }
}

// The bits of each channel's smallest and largest value over `tokens` rows. The largest signed
// integer is the largest value where one is above 0, the largest unsigned one the smallest value
// where one is below; else either is the smallest signed one.
template <class Source>
struct Extremes {
  typename Integer<Source>::Type *low, *high;
};
template <class Source>
HWY_INLINE void MeasureBlocks(const Source* x, std::int64_t stride, int tokens, int dim,
                              Extremes<Source> out) {
  using Bits = typename Integer<Source>::Type;
  const hn::ScalableTag<Bits> d;
  const hn::RebindToUnsigned<decltype(d)> unsigned_d;
  for (int c = 0; c < dim; c += static_cast<int>(hn::MaxLanes(d))) {
    auto smallest = hn::LoadU(d, reinterpret_cast<const Bits*>(x + c));
    auto largest = smallest;
    auto largest_unsigned = hn::BitCast(unsigned_d, smallest);
    for (int token = 1; token < tokens; ++token) {
      const auto bits = hn::LoadU(d, reinterpret_cast<const Bits*>(x + token * stride + c));
      smallest = hn::Min(smallest, bits);
      largest = hn::Max(largest, bits);
      largest_unsigned = hn::Max(largest_unsigned, hn::BitCast(unsigned_d, bits));
    }
    const auto negative = hn::BitCast(d, largest_unsigned);
    const auto low = hn::IfThenElse(hn::Lt(negative, hn::Zero(d)), negative, smallest);
    const auto high = hn::IfThenElse(hn::Lt(largest, hn::Zero(d)), smallest, largest);
    hn::StoreU(low, d, out.low + c);
    hn::StoreU(high, d, out.high + c);
  }
}

// KiviCode of the fp32 level in the lowest byte, whose other bits mean nothing.
template <int kBits>
HWY_INLINE WordVector KiviCodes(FloatVector x, FloatVector minimum, FloatVector inverse) {
  return BitsOf(ClampTo((x - minimum) * inverse, (1 << kBits) - 1) + Float(12582912.0f));
}

// Of each channel.
struct KiviSteps {
  const float *minima, *inverses;
};
// The codes of as many rows as fill a byte of each channel.
template <int kBits, class Source, int... kRows>
HWY_INLINE void KiviPlaneBlocks(const Source* const* rows, int dim, KiviSteps steps,
                                std::uint8_t* out, std::integer_sequence<int, kRows...>) {
  for (int c = 0; c < dim; c += kBlock) {
    const FloatBlock x[] = {Load(rows[kRows] + c)...};
    const FloatBlock minimum = Load(steps.minima + c), inverse = Load(steps.inverses + c);
    const WordVector even = (... | hn::ShiftLeft<kBits * kRows>(KiviCodes<kBits>(
                                       x[kRows].even, minimum.even, inverse.even)));
    const WordVector odd = (... | hn::ShiftLeft<kBits * kRows>(
                                      KiviCodes<kBits>(x[kRows].odd, minimum.odd, inverse.odd)));
    StoreBytes(Join({even, odd}), out + c);
  }
}

// The codes of one group of consecutive channels, one a byte.
template <int kBits, class Source>
HWY_INLINE void KiviGroupBlocks(const Source* x, int count, float minimum, float inverse,
                                std::uint8_t* codes) {
  const FloatVector from = Float(minimum), by = Float(inverse);
  for (int i = 0; i < count; i += kBlock) {
    const FloatBlock b = Load(x + i);
    StoreBytes(Join({KiviCodes<kBits>(b.even, from, by), KiviCodes<kBits>(b.odd, from, by)}),
               codes + i);
  }
}

// MlaFp8::Encode.
template <class Source>
HWY_INLINE std::uint32_t EncodeMlaBlocks(const Source* x, std::byte* out) {
  for (int tile = 0; tile < MlaFp8::kTiles; ++tile) {
    const Source* values = x + tile * MlaFp8::kTile;
    const float scale =
        MlaFp8::TileScale(Integer<Source>::Value(LargestMagnitudeOf(values, MlaFp8::kTile)));
    ScaleBlocks<false>(values, MlaFp8::kTile, 1.0f / scale,
                       reinterpret_cast<E4m3*>(out + tile * MlaFp8::kTile));
    std::memcpy(out + MlaFp8::kLatent + 4 * tile, &scale, sizeof scale);
  }
  const Source* rope = x + MlaFp8::kLatent;
  auto* stored = reinterpret_cast<Bf16*>(out + MlaFp8::kLatent + MlaFp8::kScaleBytes);
  if constexpr (std::is_same_v<Source, Bf16>) {
    std::memcpy(stored, rope, MlaFp8::kRope * sizeof *rope);
    return 0;
  } else {
    float values[MlaFp8::kRope];
    for (int i = 0; i < MlaFp8::kRope; ++i) values[i] = ToFloat(rope[i]);
    return StoreRow(values, MlaFp8::kRope, stored);
  }
}

#endif  // KVT_VECTORS

}  // namespace
}  // namespace kvtier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // per instruction set
