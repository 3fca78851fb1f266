#include <cstring>
#include <type_traits>

#include "kernels/codec_table.h"
#include "kernels/fp8.h"
#include "kernels/host_codec.h"
#include "kernels/kivi.h"
#include "kernels/per_token_head.h"
#include "kernels/raw.h"

namespace kvtier::kernels {
namespace {

template <class Source>
const Source* RowAt(const EncodeRun& run, std::int64_t token) {
  return reinterpret_cast<const Source*>(run.source.data) + token * run.source.token_stride;
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

template <class Source>
std::uint64_t EncodeRaw(const EncodeRun& run) {
  const std::size_t bytes = static_cast<std::size_t>(run.dim) * sizeof(Source);
  if (run.source.type == run.codec.element) {
    return EncodeRows<Source>(run, [&](const Source* x, std::byte* out) {
      std::memcpy(out, x, bytes);
      return 0u;
    });
  }
  return VisitElement(run.codec.element, [&](auto element) {
    using T = decltype(element);
    return EncodeRows<Source>(run, [&](const Source* x, std::byte* out) {
      return EncodeRawRow<Source, T>(x, run.dim, reinterpret_cast<T*>(out));
    });
  });
}

template <class Source, class Code>
std::uint64_t EncodeFp8(const EncodeRun& run) {
  return EncodeRows<Source>(run, [&](const Source* x, std::byte* out) {
    return EncodeFp8Row<Source, Code>(x, run.dim, run.scale, reinterpret_cast<Code*>(out));
  });
}

template <class Source, class Kind>
std::uint64_t EncodePerTokenHead(const EncodeRun& run) {
  return EncodeRows<Source>(run, [&](const Source* x, std::byte* out) {
    EncodePerTokenHeadRow<Kind, Source>(x, run.dim, reinterpret_cast<std::uint8_t*>(out));
    return 0u;
  });
}

// fp16 sources take the published fp16 arithmetic, all others the fp32 level.
template <class Source>
constexpr bool kAsPublished = std::is_same_v<Source, Fp16>;

// One unit of KIVI's K: codes [group * bits / 8][dim] (byte j of a channel holds its tokens j * 8 /
// bits and on, the first in the lowest bits), then scales [dim], then minima [dim]. Channels are
// the inner loop throughout, so that every access runs along memory.
template <class Source, int kBits>
void EncodeKiviChannelUnit(const EncodeRun& run, std::int64_t first_token, std::byte* out) {
  constexpr float kLargest = (1 << kBits) - 1;
  constexpr int kPerByte = 8 / kBits;
  const int dim = run.dim;
  float minima[kMaxHeadDim], maxima[kMaxHeadDim], scales[kMaxHeadDim], inverses[kMaxHeadDim];
  const Source* first = RowAt<Source>(run, first_token);
  for (int c = 0; c < dim; ++c) minima[c] = maxima[c] = WithoutNegativeZero(ToFloat(first[c]));
  for (int token = 1; token < run.codec.group; ++token) {
    const Source* x = RowAt<Source>(run, first_token + token);
    for (int c = 0; c < dim; ++c) {
      const float value = WithoutNegativeZero(ToFloat(x[c]));
      minima[c] = value < minima[c] ? value : minima[c];
      maxima[c] = value > maxima[c] ? value : maxima[c];
    }
  }
  const int planes = run.codec.group / kPerByte;
  std::byte* stored_scales = out + std::int64_t{planes} * dim;  // at any address where dim is odd
  std::byte* stored_minima = stored_scales + 2 * dim;
  for (int c = 0; c < dim; ++c) {
    const KiviGroup group = KiviGroupOf<kAsPublished<Source>>(minima[c], maxima[c], kLargest);
    std::memcpy(stored_scales + 2 * c, &group.scale, 2);
    std::memcpy(stored_minima + 2 * c, &group.minimum, 2);
    minima[c] = ToFloat(group.minimum);
    scales[c] = ToFloat(group.scale);
    inverses[c] = KiviInverse(group);
  }
  for (int plane = 0; plane < planes; ++plane) {
    auto* codes = reinterpret_cast<std::uint8_t*>(out) + std::int64_t{plane} * dim;
    for (int i = 0; i < kPerByte; ++i) {
      const Source* x = RowAt<Source>(run, first_token + plane * kPerByte + i);
      for (int c = 0; c < dim; ++c) {
        const std::uint32_t code = KiviCode<kAsPublished<Source>>(
            WithoutNegativeZero(ToFloat(x[c])), minima[c], scales[c], inverses[c], kLargest);
        const std::uint32_t below = i == 0 ? 0u : codes[c];
        codes[c] = static_cast<std::uint8_t>(below | code << (kBits * i));
      }
    }
  }
}

template <class Source, int kBits>
KiviGroup EncodeKiviTokenGroup(const Source* x, int group_size, std::uint8_t* codes) {
  constexpr float kLargest = (1 << kBits) - 1;
  constexpr int kPerByte = 8 / kBits;
  const auto value = [&](int i) { return WithoutNegativeZero(ToFloat(x[i])); };
  float minimum = value(0), maximum = value(0);
  for (int i = 1; i < group_size; ++i) {
    minimum = value(i) < minimum ? value(i) : minimum;
    maximum = value(i) > maximum ? value(i) : maximum;
  }
  const KiviGroup group = KiviGroupOf<kAsPublished<Source>>(minimum, maximum, kLargest);
  const float stored_minimum = ToFloat(group.minimum), scale = ToFloat(group.scale),
              inverse = KiviInverse(group);
  for (int byte = 0; byte < group_size / kPerByte; ++byte) {
    std::uint32_t packed = 0;
    for (int i = 0; i < kPerByte; ++i) {
      packed |= KiviCode<kAsPublished<Source>>(value(byte * kPerByte + i), stored_minimum, scale,
                                               inverse, kLargest)
                << (kBits * i);
    }
    codes[byte] = static_cast<std::uint8_t>(packed);
  }
  return group;
}

// One row of KIVI's V: codes [dim * bits / 8], then scales [dim / group], then minima [dim /
// group].
template <class Source, int kBits>
void EncodeKiviTokenRow(const EncodeRun& run, const Source* x, std::byte* out) {
  const int group_size = run.codec.group;
  const int groups = run.dim / group_size;
  auto* codes = reinterpret_cast<std::uint8_t*>(out);
  std::byte* scales = out + run.dim * kBits / 8;
  for (int g = 0; g < groups; ++g) {
    const KiviGroup group = EncodeKiviTokenGroup<Source, kBits>(
        x + g * group_size, group_size, codes + std::int64_t{g} * group_size * kBits / 8);
    std::memcpy(scales + 2 * g, &group.scale, 2);
    std::memcpy(scales + 2 * (groups + g), &group.minimum, 2);
  }
}

template <class Source, int kBits>
std::uint64_t EncodeKiviBits(const EncodeRun& run) {
  const std::int64_t bytes = UnitSizeOf(run.codec, run.dim).total();
  for (int unit = 0; unit < run.units; ++unit) {
    std::byte* out = run.out + unit * bytes;
    if (run.codec.id == CodecId::kKiviChannel) {
      EncodeKiviChannelUnit<Source, kBits>(run, std::int64_t{unit} * run.codec.group, out);
    } else {
      EncodeKiviTokenRow<Source, kBits>(run, RowAt<Source>(run, unit), out);
    }
  }
  return 0;
}

template <class Source>
std::uint64_t EncodeKivi(const EncodeRun& run) {
  switch (run.codec.bits) {
    case 2:
      return EncodeKiviBits<Source, 2>(run);
    case 4:
      return EncodeKiviBits<Source, 4>(run);
    default:
      return EncodeKiviBits<Source, 8>(run);
  }
}

template <class Source>
std::uint64_t EncodeFrom(const EncodeRun& run) {
  switch (run.codec.id) {
    case CodecId::kRaw:
      return EncodeRaw<Source>(run);
    case CodecId::kFp8:
      return run.codec.element == ElementType::kE4m3 ? EncodeFp8<Source, E4m3>(run)
                                                     : EncodeFp8<Source, E5m2>(run);
    case CodecId::kInt8PerTokenHead:
      return EncodePerTokenHead<Source, Int8PerTokenHead>(run);
    case CodecId::kFp8PerTokenHead:
      return EncodePerTokenHead<Source, Fp8PerTokenHead>(run);
    case CodecId::kKiviChannel:
    case CodecId::kKiviToken:
      return EncodeKivi<Source>(run);
  }
  return 0;
}

}  // namespace

std::uint64_t EncodeOnHost(const EncodeRun& run) {
  if (run.dim == 0) return 0;  // the V of MLA
  switch (run.source.type) {
    case ElementType::kBf16:
      return EncodeFrom<Bf16>(run);
    case ElementType::kFp16:
      return EncodeFrom<Fp16>(run);
    case ElementType::kFp32:
      return EncodeFrom<float>(run);
    case ElementType::kE4m3:  // an FP8 source is kept as it is
    case ElementType::kE5m2:
      return EncodeRaw<E4m3>(run);
  }
  return 0;
}

namespace {

template <class T>
float LargestOf(const ConstRows& rows, int dim, std::int64_t tokens) {
  std::uint32_t largest = 0;  // of magnitudes, bits order as values do, NaN above infinity
  for (std::int64_t token = 0; token < tokens; ++token) {
    const T* x = reinterpret_cast<const T*>(rows.data) + token * rows.token_stride;
    for (int c = 0; c < dim; ++c) {
      std::uint32_t bits;
      if constexpr (sizeof(T) == 4) {
        bits = Bits(x[c]) & 0x7fffffffu;
      } else {
        bits = x[c].bits & (sizeof(T) == 2 ? 0x7fffu : 0x7fu);
      }
      largest = bits > largest ? bits : largest;
    }
  }
  if constexpr (sizeof(T) == 4) {
    return FromBits(largest);
  } else {
    return ToFloat(T{static_cast<decltype(T::bits)>(largest)});
  }
}

}  // namespace

float LargestMagnitude(const ConstRows& rows, int dim, std::int64_t tokens) {
  return VisitElement(
      rows.type, [&](auto element) { return LargestOf<decltype(element)>(rows, dim, tokens); });
}

}  // namespace kvtier::kernels
