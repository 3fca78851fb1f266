#pragma once

#include "kernels/cuda_octet.h"
#include "kernels/kivi.h"

// KIVI's encoders on a GPU: a thread has whole groups. Included by one source.
namespace kvtier::kernels {
namespace {

struct KiviRange {
  float minimum, scale, inverse;
};
// Stores a group's scale and minimum, each among `count` of their kind; gives what codes need.
template <bool kFp16Arithmetic>
KVT_DEVICE KiviRange StoreGroup(const EncodeRun& run, float low, float high, float largest_code,
                                std::uint8_t* scales, int at, int count) {
  const auto store = [&](auto group, int bytes) -> KiviRange {
    StoreBytes(group.scale.bits, bytes, scales + at * bytes);
    StoreBytes(group.minimum.bits, bytes, scales + (count + at) * bytes);
    const float scale = ToFloat(group.scale);
    return {ToFloat(group.minimum), scale, KiviInverse(scale)};
  };
  low = WithoutNegativeZero(low);
  high = WithoutNegativeZero(high);
  if (run.codec.element == ElementType::kE4m3)
    return store(KiviGroupOf<E4m3, kFp16Arithmetic>(low, high, largest_code), 1);
  return store(KiviGroupOf<Fp16, kFp16Arithmetic>(low, high, largest_code), 2);
}

template <int kBits, bool kFp16Arithmetic>
KVT_DEVICE std::uint32_t CodeOf(float x, const KiviRange& range) {
  return KiviCode<kFp16Arithmetic>(WithoutNegativeZero(x), range.minimum, range.scale,
                                   range.inverse, (1 << kBits) - 1);
}

// A thread an octet of channels of a unit: what lies between the two passes over its tokens is in
// the cache.
template <int kBits, bool kFp16Arithmetic>
KVT_DEVICE void EncodeChannels(const EncodeRun& run, std::int64_t unit, int channel) {
  constexpr int kPerByte = 8 / kBits;
  const int dim = run.dim, tokens = run.codec.group;
  const int count = dim - channel < kOctet ? dim - channel : kOctet;
  const auto load = [&](int token) {
    return Load(RowAt(run, unit * tokens + token), run.source.type, channel, count);
  };
  Octet low = load(0), high = low;
  KVT_UNROLL_BY(4)
  for (int token = 1; token < tokens; ++token) {
    const Octet octet = load(token);
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i) {
      low.x[i] = octet.x[i] < low.x[i] ? octet.x[i] : low.x[i];
      high.x[i] = octet.x[i] > high.x[i] ? octet.x[i] : high.x[i];
    }
  }
  const std::int64_t codes_bytes = std::int64_t{tokens / kPerByte} * dim;
  const int pair = 2 * ElementBytes(run.codec.element);
  auto* out = reinterpret_cast<std::uint8_t*>(run.out) + unit * (codes_bytes + pair * dim);
  KiviRange range[kOctet];
  KVT_UNROLL
  for (int i = 0; i < kOctet; ++i) {
    if (i >= count) continue;
    range[i] = StoreGroup<kFp16Arithmetic>(run, low.x[i], high.x[i], (1 << kBits) - 1,
                                           out + codes_bytes, channel + i, dim);
  }
  for (int plane = 0; plane < tokens / kPerByte; ++plane) {
    std::uint64_t codes = 0;
    KVT_UNROLL
    for (int t = 0; t < kPerByte; ++t) {
      const Octet octet = load(plane * kPerByte + t);
      KVT_UNROLL
      for (int i = 0; i < kOctet; ++i) {
        if (i >= count) continue;
        codes |= std::uint64_t{CodeOf<kBits, kFp16Arithmetic>(octet.x[i], range[i])}
                 << (8 * i + kBits * t);
      }
    }
    StoreBytes(codes, count, out + std::int64_t{plane} * dim + channel);
  }
}

// A thread a group of channels of a row.
template <int kBits, bool kFp16Arithmetic>
KVT_DEVICE void EncodeGroup(const EncodeRun& run, std::int64_t token, int group) {
  const int size = run.codec.group, groups = run.dim / size;
  const std::byte* x = RowAt(run, token);
  const auto load = [&](int i) {
    return Load(x, run.source.type, group * size + i, size - i < kOctet ? size - i : kOctet);
  };
  float low = load(0).x[0], high = low;
  for (int begin = 0; begin < size; begin += kOctet) {
    const Octet octet = load(begin);
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i) {
      if (begin + i >= size) continue;
      low = octet.x[i] < low ? octet.x[i] : low;
      high = octet.x[i] > high ? octet.x[i] : high;
    }
  }
  const int pair = 2 * ElementBytes(run.codec.element);
  const int codes_bytes = run.dim * kBits / 8;
  auto* out = reinterpret_cast<std::uint8_t*>(run.out) + token * (codes_bytes + pair * groups);
  const KiviRange range = StoreGroup<kFp16Arithmetic>(run, low, high, (1 << kBits) - 1,
                                                      out + codes_bytes, group, groups);
  for (int begin = 0; begin < size; begin += kOctet) {
    const Octet octet = load(begin);
    std::uint64_t codes = 0;
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i)
      codes |= std::uint64_t{CodeOf<kBits, kFp16Arithmetic>(octet.x[i], range)} << (kBits * i);
    const int left = size - begin < kOctet ? size - begin : kOctet;
    StoreBytes(codes, left * kBits / 8, out + (group * size + begin) * kBits / 8);
  }
}

}  // namespace
}  // namespace kvtier::kernels
