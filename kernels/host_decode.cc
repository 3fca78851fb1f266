// Compiled once per instruction set: this file includes itself. Loops are plain; most rows go
// through host_decode_rows.h instead.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host_decode.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cstdlib>
#include <cstring>

#include "kernels/codec_table.h"
#include "kernels/element_row.h"
#include "kernels/hadamard.h"
#include "kernels/host_codec.h"
#include "kernels/host_decode_rows.h"
#include "kernels/int4_per_token_head.h"
#include "kernels/kivi.h"
#include "kernels/llama_block.h"
#include "kernels/mla_fp8.h"
#include "kernels/nvfp4.h"
#include "kernels/per_token_head.h"
#include "kernels/row.h"

HWY_BEFORE_NAMESPACE();
namespace kvtier::kernels::HWY_NAMESPACE {
namespace {

std::uint32_t StoreValues(const DecodeRun& run, float* values, std::int64_t row) {
  return VisitElement(run.out.type, [&](auto element) {
    using Out = decltype(element);
    if constexpr (sizeof(Out) == 1) DivideRow(values, run.dim, run.out_scale, values);
    return StoreRow(values, run.dim,
                    reinterpret_cast<Out*>(run.out.data) + row * run.out.token_stride);
  });
}

// Decodes row after row into fp32 and stores each; `decode(token, values)` fills one row.
template <class F>
std::uint64_t DecodeRows(const DecodeRun& run, F decode) {
  float values[kMaxHeadDim];
  std::uint64_t saturated = 0;
  for (std::int64_t row = 0; row < run.tokens; ++row) {
    decode(run.first_token + row, values);
    if (run.codec.rotation == Rotation::kHadamard) RotateRow(values, run.dim);
    saturated += StoreValues(run, values, row);
  }
  return saturated;
}

// The same for codecs whose unit is one token: `decode(unit, values)`.
template <class F>
std::uint64_t DecodeUnitRows(const DecodeRun& run, F decode) {
  const auto* units = reinterpret_cast<const std::uint8_t*>(run.in);
  const std::int64_t bytes = UnitSizeOf(run.codec, run.dim).total();
  return DecodeRows(
      run, [&](std::int64_t token, float* values) { decode(units + token * bytes, values); });
}

bool IsByteCopy(const DecodeRun& run) {
  return StoresAsIs(run.codec, run.out.type) &&
         (run.codec.id != CodecId::kFp8 || run.scale == run.out_scale);
}

std::uint64_t CopyRows(const DecodeRun& run) {
  const std::int64_t row = RowBytes(run.out.type, run.dim);
  const std::int64_t stride = run.out.token_stride * ElementBytes(run.out.type);
  const std::byte* from = run.in + run.first_token * row;
  // Rows that lie side by side are one: memcpy is faster at that.
  const std::int64_t copies = stride == row ? 1 : run.tokens;
  const auto bytes = static_cast<std::size_t>(stride == row ? row * run.tokens : row);
  for (std::int64_t i = 0; i < copies; ++i)
    std::memcpy(run.out.data + i * stride, from + i * row, bytes);
  return 0;
}

std::uint64_t DecodeElements(const DecodeRun& run) {
  return VisitElement(run.codec.element, [&](auto element) {
    using T = decltype(element);
    const auto* rows = reinterpret_cast<const T*>(run.in);
    const float scale = run.codec.id == CodecId::kFp8 ? run.scale : 1.0f;
    return DecodeRows(run, [&](std::int64_t token, float* values) {
      DecodeElementRow<T>(rows + token * run.dim, run.dim, scale, values);
    });
  });
}

template <class Kind>
std::uint64_t DecodePerTokenHead(const DecodeRun& run) {
  return DecodeUnitRows(run, [&](const std::uint8_t* row, float* values) {
    DecodePerTokenHeadRow<Kind>(row, run.dim, values);
  });
}

template <class Block>
std::uint64_t DecodeBlocks(const DecodeRun& run) {
  return DecodeUnitRows(run, [&](const std::uint8_t* row, float* values) {
    for (int block = 0; block < run.dim / kLlamaBlock; ++block)
      Block::Decode(row + block * Block::kBytes, values + block * kLlamaBlock);
  });
}

std::uint64_t DecodeNvfp4(const DecodeRun& run) {
  return DecodeUnitRows(run, [&](const std::uint8_t* row, float* values) {
    DecodeNvfp4Row(row, run.dim, run.scale, values);
  });
}

std::uint64_t DecodeInt4(const DecodeRun& run) {
  return DecodeUnitRows(run, [&](const std::uint8_t* row, float* values) {
    Int4PerTokenHead::Decode(row, run.dim, values);
  });
}

std::uint64_t DecodeMla(const DecodeRun& run) {
  return DecodeUnitRows(
      run, [&](const std::uint8_t* row, float* values) { MlaFp8::Decode(row, values); });
}

std::uint64_t DecodeFp8Page(const DecodeRun& run) {
  const std::int64_t bytes = UnitSizeOf(run.codec, run.dim).total();
  const std::int64_t tokens = run.codec.group;
  return DecodeRows(run, [&](std::int64_t token, float* values) {
    const std::byte* unit = run.in + token / tokens * bytes;
    float scale;
    std::memcpy(&scale, unit + tokens * run.dim, sizeof scale);
    DecodeElementRow(reinterpret_cast<const E4m3*>(unit + token % tokens * run.dim), run.dim, scale,
                     values);
  });
}

template <int kBits>
std::uint64_t DecodeKiviChannel(const DecodeRun& run) {
  constexpr int kPerByte = 8 / kBits;
  constexpr std::uint32_t kMask = (1u << kBits) - 1u;
  const int dim = run.dim;
  const std::int64_t unit_bytes = UnitSizeOf(run.codec, dim).total();
  const int planes = run.codec.group / kPerByte;
  float scales[kMaxHeadDim], minima[kMaxHeadDim];
  std::int64_t loaded = -1;
  return DecodeRows(run, [&](std::int64_t token, float* values) {
    const std::int64_t unit = token / run.codec.group;
    const std::byte* in = run.in + unit * unit_bytes;
    if (unit != loaded) {
      const std::byte* stored = in + std::int64_t{planes} * dim;
      LoadScales(stored, dim, run.codec.element, scales);
      LoadScales(stored + ElementBytes(run.codec.element) * dim, dim, run.codec.element, minima);
      loaded = unit;
    }
    const int in_group = static_cast<int>(token % run.codec.group);
    const auto* codes =
        reinterpret_cast<const std::uint8_t*>(in) + std::int64_t{in_group / kPerByte} * dim;
    const int shift = in_group % kPerByte * kBits;
    for (int c = 0; c < dim; ++c) {
      values[c] = KiviValue(std::uint32_t{codes[c]} >> shift & kMask, scales[c], minima[c]);
    }
  });
}

template <int kBits>
std::uint64_t DecodeKiviToken(const DecodeRun& run) {
  const int group_size = run.codec.group;
  const int groups = run.dim / group_size;
  const int bytes = run.dim * kBits / 8;
  const std::int64_t row_bytes = UnitSizeOf(run.codec, run.dim).total();
  return DecodeRows(run, [&](std::int64_t token, float* values) {
    const std::byte* row = run.in + token * row_bytes;
    std::uint8_t codes[kMaxHeadDim];
    float stored[2 * kMaxHeadDim];  // scales, then minima
    UnpackCodes<kBits>(reinterpret_cast<const std::uint8_t*>(row), bytes, codes);
    LoadScales(row + bytes, 2 * groups, run.codec.element, stored);
    for (int g = 0; g < groups; ++g) {
      const float scale = stored[g], minimum = stored[groups + g];
      const int first = g * group_size;
      for (int i = 0; i < group_size; ++i)
        values[first + i] = KiviValue(codes[first + i], scale, minimum);
    }
  });
}

template <int kBits>
std::uint64_t DecodeKivi(const DecodeRun& run) {
  return run.codec.id == CodecId::kKiviChannel ? DecodeKiviChannel<kBits>(run)
                                               : DecodeKiviToken<kBits>(run);
}

std::uint64_t DecodePlainly(const DecodeRun& run) {
  switch (run.codec.id) {
    case CodecId::kRaw:
    case CodecId::kFp8:
      return DecodeElements(run);
    case CodecId::kInt8PerTokenHead:
      return DecodePerTokenHead<Int8PerTokenHead>(run);
    case CodecId::kFp8PerTokenHead:
      return DecodePerTokenHead<Fp8PerTokenHead>(run);
    case CodecId::kLlamaQ8:
      return DecodeBlocks<LlamaQ8>(run);
    case CodecId::kLlamaQ4:
      return DecodeBlocks<LlamaQ4>(run);
    case CodecId::kNvfp4:
    case CodecId::kNvfp4FourOverSix:
      return DecodeNvfp4(run);
    case CodecId::kInt4PerTokenHead:
      return DecodeInt4(run);
    case CodecId::kMlaFp8:
      return DecodeMla(run);
    case CodecId::kFp8Page:
      return DecodeFp8Page(run);
    case CodecId::kKiviChannel:
    case CodecId::kKiviToken:
      return run.codec.bits == 2 ? DecodeKivi<2>(run)
                                 : (run.codec.bits == 4 ? DecodeKivi<4>(run) : DecodeKivi<8>(run));
  }
  return 0;
}

std::uint64_t Decode(const DecodeRun& run) {
  if (run.dim == 0 || run.tokens == 0) return 0;  // the V of MLA; a head without a whole unit
  if (IsByteCopy(run)) return CopyRows(run);
  if (IsBlocks(run.out.type)) std::abort();  // only what is stored in blocks is read in them
#if KVT_VECTORS
  if (TakesBlocks(run)) return DecodeByBlocks(run, DecodePlainly);
#endif
  return DecodePlainly(run);
}

}  // namespace
}  // namespace kvtier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtier::kernels {

HWY_EXPORT(Decode);

std::uint64_t DecodeOnHost(const DecodeRun& run) { return HWY_DYNAMIC_DISPATCH(Decode)(run); }

}  // namespace kvtier::kernels
#endif
