#include <cstring>

#include "kernels/codec_table.h"
#include "kernels/fp8.h"
#include "kernels/host_codec.h"
#include "kernels/kivi.h"
#include "kernels/per_token_head.h"
#include "kernels/raw.h"

namespace kvtier::kernels {
namespace {

// Writes one decoded row as Out and returns how many values saturated.
template <class Out>
std::uint32_t StoreRow(const float* values, int dim, float out_scale, Out* out) {
  std::uint32_t saturated = 0;
  for (int c = 0; c < dim; ++c) {
    float value = values[c];  // NOLINT(clang-analyzer-core.uninitialized.Assign): decoded before
    if constexpr (sizeof(Out) == 1) value = value / out_scale;
    saturated += Overflows<Out>(value) ? 1u : 0u;
    out[c] = Saturate<Out>(value);
  }
  return saturated;
}

// Decodes row after row into fp32 and stores each; `decode(token, values)` fills one row.
template <class Decode>
std::uint64_t DecodeRows(const DecodeRun& run, Decode decode) {
  return VisitElement(run.out.type, [&](auto element) {
    using Out = decltype(element);
    auto* out = reinterpret_cast<Out*>(run.out.data);
    float values[kMaxHeadDim];
    std::uint64_t saturated = 0;
    for (std::int64_t token = 0; token < run.tokens; ++token) {
      decode(run.first_token + token, values);
      saturated +=
          StoreRow<Out>(values, run.dim, run.out_scale, out + token * run.out.token_stride);
    }
    return saturated;
  });
}

bool IsByteCopy(const DecodeRun& run) {
  if (run.codec.element != run.out.type) return false;
  return run.codec.id == CodecId::kRaw ||
         (run.codec.id == CodecId::kFp8 && run.scale == run.out_scale);
}

std::uint64_t CopyRows(const DecodeRun& run) {
  const std::size_t bytes = static_cast<std::size_t>(run.dim * ElementBytes(run.out.type));
  for (std::int64_t token = 0; token < run.tokens; ++token) {
    std::memcpy(run.out.data + token * run.out.token_stride * ElementBytes(run.out.type),
                run.in + (run.first_token + token) * static_cast<std::int64_t>(bytes), bytes);
  }
  return 0;
}

std::uint64_t DecodeElements(const DecodeRun& run) {
  return VisitElement(run.codec.element, [&](auto element) {
    using T = decltype(element);
    const auto* rows = reinterpret_cast<const T*>(run.in);
    return DecodeRows(run, [&](std::int64_t token, float* values) {
      if (run.codec.id == CodecId::kFp8) {
        DecodeFp8Row<T>(rows + token * run.dim, run.dim, run.scale, values);
      } else {
        DecodeRawRow<T>(rows + token * run.dim, run.dim, values);
      }
    });
  });
}

template <class Kind>
std::uint64_t DecodePerTokenHead(const DecodeRun& run) {
  const auto* rows = reinterpret_cast<const std::uint8_t*>(run.in);
  const std::int64_t bytes = UnitSizeOf(run.codec, run.dim).total();
  return DecodeRows(run, [&](std::int64_t token, float* values) {
    DecodePerTokenHeadRow<Kind>(rows + token * bytes, run.dim, values);
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
      for (int c = 0; c < dim; ++c) {
        Fp16 scale{}, minimum{};  // at any address where dim is odd
        std::memcpy(&scale, stored + 2 * c, 2);
        std::memcpy(&minimum, stored + 2 * (dim + c), 2);
        scales[c] = ToFloat(scale);
        minima[c] = ToFloat(minimum);
      }
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
  constexpr int kPerByte = 8 / kBits;
  constexpr std::uint32_t kMask = (1u << kBits) - 1u;
  const int group_size = run.codec.group;
  const int groups = run.dim / group_size;
  const std::int64_t row_bytes = UnitSizeOf(run.codec, run.dim).total();
  return DecodeRows(run, [&](std::int64_t token, float* values) {
    const std::byte* row = run.in + token * row_bytes;
    const auto* codes = reinterpret_cast<const std::uint8_t*>(row);
    const std::byte* scales = row + run.dim * kBits / 8;
    for (int g = 0; g < groups; ++g) {
      Fp16 scale{}, minimum{};
      std::memcpy(&scale, scales + 2 * g, 2);
      std::memcpy(&minimum, scales + 2 * (groups + g), 2);
      const float s = ToFloat(scale), m = ToFloat(minimum);
      float* group = values + g * group_size;
      const std::uint8_t* packed = codes + g * group_size * kBits / 8;
      for (int i = 0; i < group_size; ++i) {
        group[i] =
            KiviValue(std::uint32_t{packed[i / kPerByte]} >> (i % kPerByte * kBits) & kMask, s, m);
      }
    }
  });
}

template <int kBits>
std::uint64_t DecodeKivi(const DecodeRun& run) {
  return run.codec.id == CodecId::kKiviChannel ? DecodeKiviChannel<kBits>(run)
                                               : DecodeKiviToken<kBits>(run);
}

}  // namespace

std::uint64_t DecodeOnHost(const DecodeRun& run) {
  if (run.dim == 0) return 0;  // the V of MLA
  if (IsByteCopy(run)) return CopyRows(run);
  switch (run.codec.id) {
    case CodecId::kRaw:
    case CodecId::kFp8:
      return DecodeElements(run);
    case CodecId::kInt8PerTokenHead:
      return DecodePerTokenHead<Int8PerTokenHead>(run);
    case CodecId::kFp8PerTokenHead:
      return DecodePerTokenHead<Fp8PerTokenHead>(run);
    case CodecId::kKiviChannel:
    case CodecId::kKiviToken:
      return run.codec.bits == 2 ? DecodeKivi<2>(run)
                                 : (run.codec.bits == 4 ? DecodeKivi<4>(run) : DecodeKivi<8>(run));
  }
  return 0;
}

}  // namespace kvtier::kernels
