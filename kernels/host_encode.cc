// Compiled once per instruction set: this file includes itself. Loops are plain where the compiler
// makes good vectors of them; for rows of whole vectors the others are in host_encode_*.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host_encode.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "kernels/codec_table.h"
#include "kernels/element_row.h"
#include "kernels/fp8_page.h"
#include "kernels/hadamard.h"
#include "kernels/host_codec.h"
#include "kernels/host_encode_four_bits.h"
#include "kernels/host_encode_kivi.h"
#include "kernels/host_encode_rows.h"
#include "kernels/host_hadamard.h"
#include "kernels/host_target.h"
#include "kernels/int4_per_token_head.h"
#include "kernels/llama_block.h"
#include "kernels/mla_fp8.h"
#include "kernels/nvfp4.h"
#include "kernels/per_token_head.h"
#include "kernels/row.h"

HWY_BEFORE_NAMESPACE();
namespace kvtier::kernels::HWY_NAMESPACE {
namespace {

const std::byte* RowData(const EncodeRun& run, std::int64_t token) {
  return run.source.data + token * run.source.token_stride * ElementBytes(run.source.type);
}

template <class T>
float LargestOf(const ConstRows& rows, int dim, std::int64_t tokens) {
  typename Integer<T>::Type largest = 0;
  for (std::int64_t token = 0; token < tokens; ++token) {
    const T* x = reinterpret_cast<const T*>(rows.data) + token * rows.token_stride;
    largest = std::max(largest, LargestMagnitudeOf(x, dim));
  }
  return Integer<T>::Value(largest);
}

float Largest(const ConstRows& rows, int dim, std::int64_t tokens) {
  return VisitElement(
      rows.type, [&](auto element) { return LargestOf<decltype(element)>(rows, dim, tokens); });
}

// Heads that lie side by side are read token by token: twice as fast as one after the other, where
// the data is in no cache.
template <class T>
void LargestOfHeads(const ConstRows& rows, int dim, std::int64_t tokens, std::int64_t head_stride,
                    std::span<float> largest) {
  std::vector<typename Integer<T>::Type> found(largest.size());
  for (std::int64_t token = 0; token < tokens; ++token) {
    const T* x = reinterpret_cast<const T*>(rows.data) + token * rows.token_stride;
    for (auto& of_head : found) {
      of_head = std::max(of_head, LargestMagnitudeOf(x, dim));
      x += head_stride;
    }
  }
  std::transform(found.begin(), found.end(), largest.begin(),
                 [](auto bits) { return Integer<T>::Value(bits); });
}

void LargestByHead(const ConstRows& rows, int dim, std::int64_t tokens, std::int64_t head_stride,
                   std::span<float> largest) {
  VisitElement(rows.type, [&](auto element) {
    using T = decltype(element);
    if (head_stride < rows.token_stride)
      return LargestOfHeads<T>(rows, dim, tokens, head_stride, largest);
    ConstRows of_head = rows;
    for (float& found : largest) {
      found = LargestOf<T>(of_head, dim, tokens);
      of_head.data += head_stride * static_cast<std::int64_t>(sizeof(T));
    }
  });
}

// Calls row(source, out) for each row of a codec whose unit is one token and adds up what it
// returns.
template <class Source, class F>
std::uint64_t EncodeRows(const EncodeRun& run, F row) {
  const std::int64_t bytes = UnitSizeOf(run.codec, run.dim).total();
  std::uint64_t saturated = 0;
  for (int token = 0; token < run.units; ++token) {
    saturated += row(RowAt<Source>(run, token), run.out + token * bytes);
  }
  return saturated;
}

// How many codes are no finite number: what an FP8 source may hold.
std::uint64_t NonFiniteCodes(const std::byte* codes, std::size_t count, ElementType type) {
  const std::uint32_t first = type == ElementType::kE4m3 ? 0x7fu : 0x7cu;
  std::uint64_t found = 0;
  for (std::size_t i = 0; i < count; ++i)
    found += (static_cast<std::uint32_t>(codes[i]) & 0x7fu) >= first ? 1u : 0u;
  return found;
}

std::uint64_t CopyRows(const EncodeRun& run) {
  const std::int64_t row = RowBytes(run.source.type, run.dim);
  const std::int64_t stride = run.source.token_stride * ElementBytes(run.source.type);
  // Rows that lie side by side are one: memcpy is faster at that.
  const int copies = stride == row ? 1 : run.units;
  const auto bytes = static_cast<std::size_t>(stride == row ? row * run.units : row);
  std::uint64_t non_finite = 0;
  for (int i = 0; i < copies; ++i) {
    const std::byte* from = run.source.data + i * stride;
    std::memcpy(run.out + i * row, from, bytes);
    if (IsFp8(run.source.type)) non_finite += NonFiniteCodes(from, bytes, run.source.type);
  }
  return non_finite;
}

// EncodeElementRow, whose values are looked at one by one only where the largest overflows.
template <class Source, class T>
std::uint32_t EncodeElementsOf(const Source* x, int dim, float scale, T* row) {
#if KVT_VECTORS
  const bool divide = (Bits(scale) & 0x7fffffu) != 0;
  const auto largest = [&] { return Integer<Source>::Value(LargestMagnitudeOf(x, dim)); };
  if (dim % kBlock == 0 && Bits(largest() / scale) <= kLargestBits<T>) {
    divide ? ScaleBlocks<true>(x, dim, scale, row) : ScaleBlocks<false>(x, dim, 1.0f / scale, row);
    return 0;
  }
#endif
  return EncodeElementRow(x, dim, scale, row);
}

template <class Source>
std::uint64_t EncodeElements(const EncodeRun& run) {
  const float scale = run.codec.id == CodecId::kFp8 ? run.scale : 1.0f;
  return VisitElement(run.codec.element, [&](auto element) {
    using T = decltype(element);
    return EncodeRows<Source>(run, [&](const Source* x, std::byte* out) {
      return EncodeElementsOf(x, run.dim, scale, reinterpret_cast<T*>(out));
    });
  });
}

template <class Source>
std::uint64_t EncodeInt8PerTokenHead(const EncodeRun& run) {
  return EncodeRows<Source>(run, [&](const Source* x, std::byte* out) {
    EncodePerTokenHeadRow<Int8PerTokenHead>(x, run.dim, reinterpret_cast<std::uint8_t*>(out));
    return 0u;
  });
}

template <class Source>
std::uint64_t EncodeFp8PerTokenHead(const EncodeRun& run) {
  return EncodeRows<Source>(run, [&](const Source* x, std::byte* out) {
#if KVT_VECTORS
    if (run.dim % kBlock == 0) {
      const float scale = PerTokenHeadScale<Fp8PerTokenHead>(x, run.dim);
      ScaleBlocks<false>(x, run.dim, 1.0f / scale, reinterpret_cast<E4m3*>(out));
      std::memcpy(out + run.dim, &scale, sizeof scale);
      return 0u;
    }
#endif
    EncodePerTokenHeadRow<Fp8PerTokenHead>(x, run.dim, reinterpret_cast<std::uint8_t*>(out));
    return 0u;
  });
}

template <class Source, class Block>
std::uint64_t EncodeBlocks(const EncodeRun& run) {
  return EncodeRows<Source>(run, [&](const Source* x, std::byte* out) {
    auto* bytes = reinterpret_cast<std::uint8_t*>(out);
    for (int block = 0; block < run.dim / kLlamaBlock; ++block) {
#if KVT_VECTORS
      if constexpr (std::is_same_v<Block, LlamaQ4>) {
        EncodeQ4Block(x + block * kLlamaBlock, bytes + block * Block::kBytes);
        continue;
      }
#endif
      Block::Encode(x + block * kLlamaBlock, bytes + block * Block::kBytes);
    }
    return 0u;
  });
}

// A row as fp32, for codecs that don't care what the source was.
template <class Source>
struct FloatRow {
  float values[kMaxHeadDim];
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init): it fills them
  FloatRow(const Source* x, int dim) { DivideRow(x, dim, 1.0f, values); }
};

template <bool kFourOverSix, class Source>
std::uint64_t EncodeNvfp4(const EncodeRun& run) {
  return EncodeRows<Source>(run, [&](const Source* x, std::byte* out) {
    auto* row = reinterpret_cast<std::uint8_t*>(out);
#if KVT_VECTORS
    if (run.dim % kBlock == 0 && EncodeNvfp4Blocks<kFourOverSix>(x, run.dim, run.scale, row)) {
      return 0u;
    }
#endif
    return EncodeNvfp4Row<kFourOverSix>(FloatRow(x, run.dim).values, run.dim, run.scale, row);
  });
}

template <class Source>
std::uint64_t EncodeInt4(const EncodeRun& run) {
  return EncodeRows<Source>(run, [&](const Source* x, std::byte* out) {
    auto* row = reinterpret_cast<std::uint8_t*>(out);
#if KVT_VECTORS
    if (run.dim % kBlock == 0 && EncodeInt4Blocks(x, run.dim, row)) return 0u;
#endif
    return Int4PerTokenHead::Encode(FloatRow(x, run.dim).values, run.dim, run.source.type, row);
  });
}

template <class Source>
std::uint64_t EncodeMla(const EncodeRun& run) {
  return EncodeRows<Source>(run, [&](const Source* x, std::byte* out) {
#if KVT_VECTORS
    return EncodeMlaBlocks(x, out);
#else
    return MlaFp8::Encode(FloatRow(x, run.dim).values, reinterpret_cast<std::uint8_t*>(out));
#endif
  });
}

// A unit is a page: its largest magnitude first, then its rows.
template <class Source>
std::uint64_t EncodeFp8Page(const EncodeRun& run) {
  const std::int64_t bytes = UnitSizeOf(run.codec, run.dim).total();
  const std::int64_t tokens = run.codec.group;
  for (int unit = 0; unit < run.units; ++unit) {
    const ConstRows rows = {RowData(run, unit * tokens), run.source.type, run.source.token_stride};
    const float scale = Fp8PageScale(LargestOf<Source>(rows, run.dim, tokens));
    std::byte* out = run.out + unit * bytes;
    for (std::int64_t token = 0; token < tokens; ++token) {
      const Source* x = RowAt<Source>(run, unit * tokens + token);
      auto* row = reinterpret_cast<E4m3*>(out + token * run.dim);
#if KVT_VECTORS
      if (run.dim % kBlock == 0) {  // nothing overflows
        ScaleBlocks<true>(x, run.dim, scale, row);
        continue;
      }
#endif
      EncodeElementRow(x, run.dim, scale, row);
    }
    std::memcpy(out + tokens * run.dim, &scale, sizeof scale);
  }
  return 0;
}

template <class Source>
std::uint64_t EncodeRotated(const EncodeRun& run);

template <class Source>
std::uint64_t EncodeFrom(const EncodeRun& run) {
  if (run.codec.rotation != Rotation::kNone) return EncodeRotated<Source>(run);
  switch (run.codec.id) {
    case CodecId::kRaw:
    case CodecId::kFp8:
      return EncodeElements<Source>(run);
    case CodecId::kInt8PerTokenHead:
      return EncodeInt8PerTokenHead<Source>(run);
    case CodecId::kFp8PerTokenHead:
      return EncodeFp8PerTokenHead<Source>(run);
    case CodecId::kLlamaQ8:
      return EncodeBlocks<Source, LlamaQ8>(run);
    case CodecId::kLlamaQ4:
      return EncodeBlocks<Source, LlamaQ4>(run);
    case CodecId::kNvfp4:
      return EncodeNvfp4<false, Source>(run);
    case CodecId::kNvfp4FourOverSix:
      return EncodeNvfp4<true, Source>(run);
    case CodecId::kInt4PerTokenHead:
      return EncodeInt4<Source>(run);
    case CodecId::kMlaFp8:
      return EncodeMla<Source>(run);
    case CodecId::kFp8Page:
      return EncodeFp8Page<Source>(run);
    case CodecId::kKiviChannel:
    case CodecId::kKiviToken:
      return run.codec.bits == 2
                 ? EncodeKivi<Source, 2>(run)
                 : (run.codec.bits == 4 ? EncodeKivi<Source, 4>(run) : EncodeKivi<Source, 8>(run));
  }
  return 0;
}

template <class Source>
void RotateTo(const Source* x, int dim, float* row) {
#if KVT_VECTORS
  if (dim % kBlock == 0) return RotateBlocks(x, dim, row);
#endif
  DivideRow(x, dim, 1.0f, row);
  RotateRow(row, dim);
}

// Rotates some units at a time and encodes the fp32 rows.
template <class Source>
std::uint64_t EncodeRotated(const EncodeRun& run) {
  const int unit_tokens = UnitTokens(run.codec);
  const int batch = std::max(1, 64 / unit_tokens);
  const std::int64_t bytes = UnitSizeOf(run.codec, run.dim).total();
  std::vector<float> rows(static_cast<std::size_t>(batch) * unit_tokens * run.dim);
  std::uint64_t saturated = 0;
  for (int unit = 0; unit < run.units; unit += batch) {
    EncodeRun part = run;
    part.codec.rotation = Rotation::kNone;
    part.source = {reinterpret_cast<const std::byte*>(rows.data()), ElementType::kFp32, run.dim};
    part.units = std::min(batch, run.units - unit);
    part.out = run.out + unit * bytes;
    for (int i = 0; i < part.units * unit_tokens; ++i) {
      RotateTo(RowAt<Source>(run, std::int64_t{unit} * unit_tokens + i), run.dim,
               rows.data() + std::ptrdiff_t{i} * run.dim);
    }
    saturated += EncodeFrom<float>(part);
  }
  return saturated;
}

std::uint64_t Encode(const EncodeRun& run) {
  if (run.dim == 0 || run.units == 0) return 0;  // the V of MLA; a head without a whole unit
  if (StoresAsIs(run.codec, run.source.type)) return CopyRows(run);
  switch (run.source.type) {
    case ElementType::kBf16:
      return EncodeFrom<Bf16>(run);
    case ElementType::kFp16:
      return EncodeFrom<Fp16>(run);
    case ElementType::kFp32:
      return EncodeFrom<float>(run);
    default:
      std::abort();  // such a source is kept as it is
  }
}

const char* Target() { return hwy::TargetName(HWY_TARGET); }

}  // namespace
}  // namespace kvtier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtier::kernels {

HWY_EXPORT(Encode);
HWY_EXPORT(Largest);
HWY_EXPORT(LargestByHead);
HWY_EXPORT(Target);

std::uint64_t EncodeOnHost(const EncodeRun& run) { return HWY_DYNAMIC_DISPATCH(Encode)(run); }

float LargestMagnitude(const ConstRows& rows, int dim, std::int64_t tokens) {
  return HWY_DYNAMIC_DISPATCH(Largest)(rows, dim, tokens);
}

void LargestMagnitudes(const ConstRows& rows, int dim, std::int64_t tokens,
                       std::int64_t head_stride, std::span<float> largest) {
  HWY_DYNAMIC_DISPATCH(LargestByHead)(rows, dim, tokens, head_stride, largest);
}

const char* HostTargetInUse() { return HWY_DYNAMIC_DISPATCH(Target)(); }

}  // namespace kvtier::kernels
#endif
