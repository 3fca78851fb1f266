// KIVI's encoders. Included once per instruction set.
#if defined(KVT_HOST_ENCODE_KIVI) == defined(HWY_TARGET_TOGGLE)
#ifdef KVT_HOST_ENCODE_KIVI
#undef KVT_HOST_ENCODE_KIVI
#else
#define KVT_HOST_ENCODE_KIVI
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/codec_run.h"
#include "kernels/codec_table.h"
#include "kernels/host_encode_rows.h"
#include "kernels/kivi.h"
#include "kernels/row.h"

HWY_BEFORE_NAMESPACE();
namespace kvtier::kernels::HWY_NAMESPACE {
namespace {

// fp16 sources take the published fp16 arithmetic, all others the fp32 level.
template <class Source>
constexpr bool kAsPublished = std::is_same_v<Source, Fp16>;

// Orders values; its own inverse.
template <class Source>
auto KeyOf(Source x) {
  return Integer<Source>::Ordered(Integer<Source>::Of(x));
}
template <class Source>
float ValueOf(typename Integer<Source>::Type bits) {
  return WithoutNegativeZero(Integer<Source>::Value(bits));
}

// Groups side by side, so that their parameters are computed many at once.
template <class Source>
struct Groups {
  typename Integer<Source>::Type low[kMaxHeadDim], high[kMaxHeadDim];  // bits of values
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
#if KVT_VECTORS
  if (dim % kBlock == 0) {
    const Source* x = RowAt<Source>(run, first_token);
    MeasureBlocks<Source>(x, run.source.token_stride, run.codec.group, dim, {low, high});
    return;
  }
#endif
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
  for (int c = 0; c < dim; ++c) {
    low[c] = Integer<Source>::Ordered(low[c]);
    high[c] = Integer<Source>::Ordered(high[c]);
  }
}

// The codes of as many tokens as fill a byte of each channel.
template <int kBits, class Source, int... kTokens>
void EncodePlane(const EncodeRun& run, std::int64_t first_token, const Groups<Source>& channels,
                 std::uint8_t* __restrict codes, std::integer_sequence<int, kTokens...>) {
  constexpr float kLargest = (1 << kBits) - 1;
  const int dim = run.dim;
  const Source* const rows[] = {RowAt<Source>(run, first_token + kTokens)...};
#if KVT_VECTORS
  if (!kAsPublished<Source> && dim % kBlock == 0) {
    KiviPlaneBlocks<kBits>(rows, dim, {channels.minima, channels.inverses}, codes,
                           std::integer_sequence<int, kTokens...>());
    return;
  }
#endif
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
    all.low[first + g] = Integer<Source>::Ordered(low);
    all.high[first + g] = Integer<Source>::Ordered(high);
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
#if KVT_VECTORS
    if (!kAsPublished<Source> && group_size % kBlock == 0) {
      KiviGroupBlocks<kBits>(x + g * group_size, group_size, minimum, inverse,
                             codes + g * group_size);
      continue;
    }
#endif
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

}  // namespace
}  // namespace kvtier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // per instruction set
