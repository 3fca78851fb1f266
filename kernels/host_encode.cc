// Compiled once per instruction set: this file includes itself. The loops are plain, and the
// compiler makes vectors of them.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host_encode.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/codec_table.h"
#include "kernels/element_row.h"
#include "kernels/fp8_page.h"
#include "kernels/hadamard.h"
#include "kernels/host_codec.h"
#include "kernels/host_target.h"
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

const std::byte* RowData(const EncodeRun& run, std::int64_t token) {
  return run.source.data + token * run.source.token_stride * ElementBytes(run.source.type);
}
template <class Source>
const Source* RowAt(const EncodeRun& run, std::int64_t token) {
  return reinterpret_cast<const Source*>(run.source.data) + token * run.source.token_stride;
}

void ToFloats(const EncodeRun& run, std::int64_t token, float* values) {
  VisitElement(run.source.type, [&](auto element) {
    DivideRow(RowAt<decltype(element)>(run, token), run.dim, 1.0f, values);
  });
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
  const auto bytes = static_cast<std::size_t>(RowBytes(run.source.type, run.dim));
  const std::int64_t stride = run.source.token_stride * ElementBytes(run.source.type);
  std::uint64_t non_finite = 0;
  for (int token = 0; token < run.units; ++token) {
    const std::byte* row = run.source.data + token * stride;
    std::memcpy(run.out + token * bytes, row, bytes);
    if (IsFp8(run.source.type)) non_finite += NonFiniteCodes(row, bytes, run.source.type);
  }
  return non_finite;
}

template <class Source>
std::uint64_t EncodeElements(const EncodeRun& run) {
  const float scale = run.codec.id == CodecId::kFp8 ? run.scale : 1.0f;
  return VisitElement(run.codec.element, [&](auto element) {
    using T = decltype(element);
    return EncodeRows<Source>(run, [&](const Source* x, std::byte* out) {
      return EncodeElementRow(x, run.dim, scale, reinterpret_cast<T*>(out));
    });
  });
}

template <class Source, class Kind>
std::uint64_t EncodePerTokenHead(const EncodeRun& run) {
  return EncodeRows<Source>(run, [&](const Source* x, std::byte* out) {
    EncodePerTokenHeadRow<Kind, Source>(x, run.dim, reinterpret_cast<std::uint8_t*>(out));
    return 0u;
  });
}

template <class Source, class Block>
std::uint64_t EncodeBlocks(const EncodeRun& run) {
  return EncodeRows<Source>(run, [&](const Source* x, std::byte* out) {
    auto* bytes = reinterpret_cast<std::uint8_t*>(out);
    for (int block = 0; block < run.dim / kLlamaBlock; ++block)
      Block::Encode(x + block * kLlamaBlock, bytes + block * Block::kBytes);
    return 0u;
  });
}

// The same, for codecs that don't care what the source was: row(fp32 values, out). Compiled once.
template <class F>
std::uint64_t EncodeFloatRows(const EncodeRun& run, F row) {
  const std::int64_t bytes = UnitSizeOf(run.codec, run.dim).total();
  float values[kMaxHeadDim];
  std::uint64_t saturated = 0;
  for (int token = 0; token < run.units; ++token) {
    ToFloats(run, token, values);
    saturated += row(values, reinterpret_cast<std::uint8_t*>(run.out + token * bytes));
  }
  return saturated;
}

std::uint64_t EncodeNvfp4(const EncodeRun& run) {
  if (run.codec.id == CodecId::kNvfp4FourOverSix) {
    return EncodeFloatRows(run, [&](const float* x, std::uint8_t* out) {
      return EncodeNvfp4Row<true>(x, run.dim, run.scale, out);
    });
  }
  return EncodeFloatRows(run, [&](const float* x, std::uint8_t* out) {
    return EncodeNvfp4Row<false>(x, run.dim, run.scale, out);
  });
}

std::uint64_t EncodeInt4(const EncodeRun& run) {
  return EncodeFloatRows(run, [&](const float* x, std::uint8_t* out) {
    return Int4PerTokenHead::Encode(x, run.dim, run.source.type, out);
  });
}

std::uint64_t EncodeMla(const EncodeRun& run) {
  return EncodeFloatRows(run,
                         [&](const float* x, std::uint8_t* out) { return MlaFp8::Encode(x, out); });
}

// A unit is a page: its largest magnitude first, then its rows.
std::uint64_t EncodeFp8Page(const EncodeRun& run) {
  const std::int64_t bytes = UnitSizeOf(run.codec, run.dim).total();
  const std::int64_t tokens = run.codec.group;
  float values[kMaxHeadDim];
  for (int unit = 0; unit < run.units; ++unit) {
    const ConstRows rows = {RowData(run, unit * tokens), run.source.type, run.source.token_stride};
    const float scale = Fp8PageScale(Largest(rows, run.dim, tokens));
    std::byte* out = run.out + unit * bytes;
    for (std::int64_t token = 0; token < tokens; ++token) {
      ToFloats(run, unit * tokens + token, values);
      EncodeElementRow(values, run.dim, scale, reinterpret_cast<E4m3*>(out + token * run.dim));
    }
    std::memcpy(out + tokens * run.dim, &scale, sizeof scale);
  }
  return 0;
}

// fp16 sources take the published fp16 arithmetic, all others the fp32 level.
template <class Source>
constexpr bool kAsPublished = std::is_same_v<Source, Fp16>;

template <class Source>
auto KeyOf(Source x) {
  return Integer<Source>::Ordered(Integer<Source>::Of(x));
}
template <class Source>
float ValueOf(typename Integer<Source>::Type key) {
  return WithoutNegativeZero(Integer<Source>::Value(Integer<Source>::Ordered(key)));
}

// Groups side by side, so that their parameters are computed many at once.
template <class Source>
struct Groups {
  typename Integer<Source>::Type low[kMaxHeadDim], high[kMaxHeadDim];  // of what KeyOf gives
  std::uint16_t stored_scales[kMaxHeadDim], stored_minima[kMaxHeadDim];
  float minima[kMaxHeadDim], scales[kMaxHeadDim], inverses[kMaxHeadDim];

  // From low and high to all that codes need. `stored`: the type of scales and minima.
  void Measure(int count, float largest_code, ElementType stored) {
    if (stored == ElementType::kE4m3) {
      MeasureAs<E4m3>(count, largest_code);
    } else {
      MeasureAs<Fp16>(count, largest_code);
    }
  }
  template <class Scale>
  void MeasureAs(int count, float largest_code) {
    for (int i = 0; i < count; ++i) {
      const auto group = KiviGroupOf<Scale, kAsPublished<Source>>(
          ValueOf<Source>(low[i]), ValueOf<Source>(high[i]), largest_code);
      stored_scales[i] = group.scale.bits;
      stored_minima[i] = group.minimum.bits;
      minima[i] = ToFloat(group.minimum);
      scales[i] = ToFloat(group.scale);
      inverses[i] = KiviInverse(scales[i]);
    }
  }
  // The scales of `count` groups, then their minima.
  void Store(int first, int count, ElementType stored, std::byte* out) const {
    if (stored == ElementType::kE4m3) {
      for (int i = 0; i < count; ++i) {
        out[i] = static_cast<std::byte>(stored_scales[first + i]);
        out[count + i] = static_cast<std::byte>(stored_minima[first + i]);
      }
      return;
    }
    const auto bytes = 2 * static_cast<std::size_t>(count);
    std::memcpy(out, stored_scales + first, bytes);
    std::memcpy(out + bytes, stored_minima + first, bytes);
  }
};

// One unit of KIVI's K: codes [group * bits / 8][dim] (byte j of a channel holds its tokens j * 8 /
// bits and on, the first in the lowest bits), then scales [dim], then minima [dim]. Channels are
// the inner loop throughout, so that every access runs along memory.
template <class Source>
void MeasureChannels(const EncodeRun& run, std::int64_t first_token, Groups<Source>& channels) {
  const int dim = run.dim;  // not behind a reference that the loops might write to
  auto* low = channels.low;
  auto* high = channels.high;
  for (int token = 0; token < run.codec.group; ++token) {
    const Source* x = RowAt<Source>(run, first_token + token);
    if (token == 0) {
      for (int c = 0; c < dim; ++c) low[c] = high[c] = KeyOf(x[c]);
    }
    for (int c = 0; c < dim; ++c) {
      const auto key = KeyOf(x[c]);
      low[c] = key < low[c] ? key : low[c];
      high[c] = key > high[c] ? key : high[c];
    }
  }
}

// The codes of as many tokens as fill a byte of each channel.
template <int kBits, class Source, int... kTokens>
void EncodePlane(const EncodeRun& run, std::int64_t first_token, const Groups<Source>& channels,
                 std::uint8_t* __restrict codes, std::integer_sequence<int, kTokens...>) {
  constexpr float kLargest = (1 << kBits) - 1;
  const int dim = run.dim;
  const Source* const rows[] = {RowAt<Source>(run, first_token + kTokens)...};
  for (int c = 0; c < dim; ++c) {
    codes[c] = static_cast<std::uint8_t>(
        (0u | ... |
         (KiviCode<kAsPublished<Source>>(WithoutNegativeZero(ToFloat(rows[kTokens][c])),
                                         channels.minima[c], channels.scales[c],
                                         channels.inverses[c], kLargest)
          << (kBits * kTokens))));
  }
}

template <class Source, int kBits>
std::uint64_t EncodeKiviChannel(const EncodeRun& run) {
  constexpr int kPerByte = 8 / kBits;
  const std::int64_t bytes = UnitSizeOf(run.codec, run.dim).total();
  const int planes = run.codec.group / kPerByte;
  Groups<Source> channels;  // NOLINT(cppcoreguidelines-pro-type-member-init): filled below
  for (int unit = 0; unit < run.units; ++unit) {
    const std::int64_t first = std::int64_t{unit} * run.codec.group;
    std::byte* out = run.out + unit * bytes;
    MeasureChannels(run, first, channels);
    channels.Measure(run.dim, (1 << kBits) - 1, run.codec.element);
    channels.Store(0, run.dim, run.codec.element, out + std::int64_t{planes} * run.dim);
    for (int plane = 0; plane < planes; ++plane) {
      EncodePlane<kBits>(run, first + plane * kPerByte, channels,
                         reinterpret_cast<std::uint8_t*>(out) + std::int64_t{plane} * run.dim,
                         std::make_integer_sequence<int, kPerByte>());
    }
  }
  return 0;
}

// Squeezes one code a byte into 8 / kBits codes a byte, the first in the lowest bits.
template <int kBits>
void PackCodes(const std::uint8_t* codes, int bytes, std::uint8_t* __restrict packed) {
  if constexpr (kBits == 8) {
    std::memcpy(packed, codes, static_cast<std::size_t>(bytes));
  } else {
    using Word = std::conditional_t<kBits == 2, std::uint32_t, std::uint16_t>;
    for (int i = 0; i < bytes; ++i) {
      Word word;
      std::memcpy(&word, codes + i * static_cast<int>(sizeof word), sizeof word);
      std::uint32_t bits = word;
      bits |= bits >> (8 - kBits);
      if constexpr (kBits == 2) bits |= bits >> (2 * (8 - kBits));
      packed[i] = static_cast<std::uint8_t>(bits);
    }
  }
}

// KIVI's V, row by row: codes [dim * bits / 8], then scales [dim / group], then minima [dim /
// group]. kGroup: the group size where it is known when this is compiled, else 0.
template <int kGroup, class Source>
void MeasureRow(const Source* x, int group_size, int groups, Groups<Source>& all, int first) {
  if constexpr (kGroup > 0) group_size = kGroup;
  for (int g = 0; g < groups; ++g) {
    auto low = KeyOf(x[g * group_size]), high = low;
    for (int i = 0; i < group_size; ++i) {
      const auto key = KeyOf(x[g * group_size + i]);
      low = key < low ? key : low;
      high = key > high ? key : high;
    }
    all.low[first + g] = low;
    all.high[first + g] = high;
  }
}

template <int kBits, int kGroup, class Source>
void EncodeKiviRow(const EncodeRun& run, const Source* x, const Groups<Source>& all, int first,
                   std::uint8_t* out) {
  const int group_size = kGroup > 0 ? kGroup : run.codec.group;
  const int groups = run.dim / group_size;
  constexpr float kLargest = (1 << kBits) - 1;
  std::uint8_t codes[kMaxHeadDim];
  for (int g = 0; g < groups; ++g) {
    const float minimum = all.minima[first + g], scale = all.scales[first + g],
                inverse = all.inverses[first + g];
    for (int i = 0; i < group_size; ++i) {
      codes[g * group_size + i] = static_cast<std::uint8_t>(KiviCode<kAsPublished<Source>>(
          WithoutNegativeZero(ToFloat(x[g * group_size + i])), minimum, scale, inverse, kLargest));
    }
  }
  PackCodes<kBits>(codes, groups * group_size * kBits / 8, out);
}

template <class Source, int kBits, int kGroup>
std::uint64_t EncodeKiviToken(const EncodeRun& run) {
  const int group_size = run.codec.group;
  const int groups = run.dim / group_size;
  const int batch = std::max(1, 64 / groups);  // rows * groups stays within kMaxHeadDim
  const std::int64_t bytes = UnitSizeOf(run.codec, run.dim).total();
  Groups<Source> all;  // NOLINT(cppcoreguidelines-pro-type-member-init): filled below
  for (int begin = 0; begin < run.units; begin += batch) {
    const int rows = std::min(batch, run.units - begin);
    for (int row = 0; row < rows; ++row) {
      MeasureRow<kGroup>(RowAt<Source>(run, begin + row), group_size, groups, all, row * groups);
    }
    all.Measure(rows * groups, (1 << kBits) - 1, run.codec.element);
    for (int row = 0; row < rows; ++row) {
      std::byte* out = run.out + (begin + row) * bytes;
      EncodeKiviRow<kBits, kGroup>(run, RowAt<Source>(run, begin + row), all, row * groups,
                                   reinterpret_cast<std::uint8_t*>(out));
      all.Store(row * groups, groups, run.codec.element, out + run.dim * kBits / 8);
    }
  }
  return 0;
}

template <class Source, int kBits>
std::uint64_t EncodeKivi(const EncodeRun& run) {
  if (run.codec.id == CodecId::kKiviChannel) return EncodeKiviChannel<Source, kBits>(run);
  return run.codec.group == 32 ? EncodeKiviToken<Source, kBits, 32>(run)
                               : EncodeKiviToken<Source, kBits, 0>(run);
}

template <class Source>
std::uint64_t EncodeFrom(const EncodeRun& run) {
  switch (run.codec.id) {
    case CodecId::kRaw:
    case CodecId::kFp8:
      return EncodeElements<Source>(run);
    case CodecId::kInt8PerTokenHead:
      return EncodePerTokenHead<Source, Int8PerTokenHead>(run);
    case CodecId::kFp8PerTokenHead:
      return EncodePerTokenHead<Source, Fp8PerTokenHead>(run);
    case CodecId::kLlamaQ8:
      return EncodeBlocks<Source, LlamaQ8>(run);
    case CodecId::kLlamaQ4:
      return EncodeBlocks<Source, LlamaQ4>(run);
    case CodecId::kNvfp4:
    case CodecId::kNvfp4FourOverSix:
      return EncodeNvfp4(run);
    case CodecId::kInt4PerTokenHead:
      return EncodeInt4(run);
    case CodecId::kMlaFp8:
      return EncodeMla(run);
    case CodecId::kFp8Page:
      return EncodeFp8Page(run);
    case CodecId::kKiviChannel:
    case CodecId::kKiviToken:
      return run.codec.bits == 2
                 ? EncodeKivi<Source, 2>(run)
                 : (run.codec.bits == 4 ? EncodeKivi<Source, 4>(run) : EncodeKivi<Source, 8>(run));
  }
  return 0;
}

// Rotates some units at a time and encodes the fp32 rows.
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
      float* row = rows.data() + std::ptrdiff_t{i} * run.dim;
      ToFloats(run, std::int64_t{unit} * unit_tokens + i, row);
      RotateRow(row, run.dim);
    }
    saturated += EncodeFrom<float>(part);
  }
  return saturated;
}

std::uint64_t Encode(const EncodeRun& run) {
  if (run.dim == 0) return 0;  // the V of MLA
  if (StoresAsIs(run.codec, run.source.type)) return CopyRows(run);
  if (run.codec.rotation != Rotation::kNone) return EncodeRotated(run);
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
HWY_EXPORT(Target);

std::uint64_t EncodeOnHost(const EncodeRun& run) { return HWY_DYNAMIC_DISPATCH(Encode)(run); }

float LargestMagnitude(const ConstRows& rows, int dim, std::int64_t tokens) {
  return HWY_DYNAMIC_DISPATCH(Largest)(rows, dim, tokens);
}

const char* HostTargetInUse() { return HWY_DYNAMIC_DISPATCH(Target)(); }

}  // namespace kvtier::kernels
#endif
