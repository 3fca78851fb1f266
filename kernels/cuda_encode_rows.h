#pragma once

#include "kernels/cuda_octet.h"
#include "kernels/cuda_rotation.h"
#include "kernels/llama_block.h"
#include "kernels/mla_fp8.h"
#include "kernels/nvfp4.h"
#include "kernels/per_token_head.h"

// What the encoding kernels make of a row that a team of lanes holds. Included by one source.
namespace kvtier::kernels {
namespace {

// Each codec below has
//   static Bytes(run): of a unit, which is a row;
//   static Encode(run, team, row, out): returns how many of the lane's values saturated. All lanes
//   of the warp call it, `out` null where a team has no row: then nothing is stored.

struct Elements {
  KVT_DEVICE static std::int64_t Bytes(const EncodeRun& run) {
    return std::int64_t{run.dim} * ElementBytes(run.codec.element);
  }
  template <int kOctets>
  KVT_DEVICE static std::uint32_t Encode(const EncodeRun& run, const Team<kOctets>& team,
                                         TeamRow<kOctets>& row, std::uint8_t* out) {
    if (out == nullptr) return 0;
    const float scale = run.codec.id == CodecId::kFp8 ? run.scale : 1.0f;
    std::uint32_t saturated = 0;
    ForOctets(team, [&](int o) {
      Divide(row.octet[o], scale);
      saturated += Store(row.octet[o], reinterpret_cast<std::byte*>(out), run.codec.element,
                         team.Channel(o), team.Count(o));
    });
    return saturated;
  }
};

template <int kOctets>
KVT_DEVICE std::int32_t LargestOf(const Team<kOctets>& team, const TeamRow<kOctets>& row) {
  std::int32_t largest = 0;
  ForOctets(team, [&](int o) {
    const std::int32_t of_octet = Largest(row.octet[o]);
    largest = of_octet > largest ? of_octet : largest;
  });
  return MaxOf(largest, team.lanes);
}

template <class Kind>
struct PerTokenHead {
  KVT_DEVICE static std::int64_t Bytes(const EncodeRun& run) { return run.dim + 4; }
  template <int kOctets>
  KVT_DEVICE static std::uint32_t Encode(const EncodeRun& run, const Team<kOctets>& team,
                                         TeamRow<kOctets>& row, std::uint8_t* out) {
    const float scale = PerTokenHeadScale<Kind>(Integer<float>::Value(LargestOf(team, row)));
    if (out == nullptr) return 0;
    const float inverse = 1.0f / scale;
    ForOctets(team, [&](int o) {
      std::uint64_t codes = 0;
      KVT_UNROLL
      for (int i = 0; i < kOctet; ++i) {
        const auto code = Kind::Encode(row.octet[o].x[i] * inverse);
        std::uint8_t bits;
        std::memcpy(&bits, &code, 1);
        codes |= std::uint64_t{bits} << (8 * i);
      }
      StoreBytes(codes, team.Count(o), out + team.Channel(o));
    });
    if (team.lane == 0) StoreFloat(scale, out + run.dim);
    return 0;
  }
};

// Two codes a byte, the even channel in the low bits.
KVT_DEVICE std::uint64_t PackNibbles(const std::uint32_t* codes) {
  std::uint32_t packed = 0;
  KVT_UNROLL
  for (int i = 0; i < kOctet; ++i) packed |= codes[i] << (4 * i);
  return packed;
}

// Blocks of 32 channels: four lanes each.
constexpr int kBlockLanes = kLlamaBlock / kOctet;

struct Q8 {
  KVT_DEVICE static std::int64_t Bytes(const EncodeRun& run) {
    return std::int64_t{run.dim} / kLlamaBlock * kLlamaQ8Bytes;
  }
  template <int kOctets>
  KVT_DEVICE static std::uint32_t Encode(const EncodeRun&, const Team<kOctets>& team,
                                         TeamRow<kOctets>& row, std::uint8_t* out) {
    ForOctets(team, [&](int o) {
      const float d =
          LlamaQ8::Step(Integer<float>::Value(MaxOf(Largest(row.octet[o]), kBlockLanes)));
      if (out == nullptr || team.Count(o) == 0) return;
      const float inverse = FiniteOrZero(1.0f / d);
      std::uint64_t codes = 0;
      KVT_UNROLL
      for (int i = 0; i < kOctet; ++i)
        codes |= std::uint64_t{LlamaQ8::Code(row.octet[o].x[i] * inverse)} << (8 * i);
      const int channel = team.Channel(o);
      std::uint8_t* block = out + channel / kLlamaBlock * kLlamaQ8Bytes;
      StoreBytes(codes, kOctet, block + 2 + channel % kLlamaBlock);
      if (channel % kLlamaBlock == 0) StoreBytes(FromFloat<Fp16>(d).bits, 2, block);
    });
    return 0;
  }
};

struct Q4 {
  KVT_DEVICE static std::int64_t Bytes(const EncodeRun& run) {
    return std::int64_t{run.dim} / kLlamaBlock * kLlamaQ4Bytes;
  }
  // The first value of largest magnitude of a block.
  KVT_DEVICE static float FirstLargest(int lane, const Octet& octet) {
    float first = octet.x[0];
    KVT_UNROLL
    for (int i = 1; i < kOctet; ++i)
      first = Magnitude(octet.x[i]) > Magnitude(first) ? octet.x[i] : first;
    KVT_UNROLL
    for (int step = 1; step < kBlockLanes; step *= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, first, step);
      const bool other_is_first = (lane & step) != 0;
      const bool takes = other_is_first ? Magnitude(other) >= Magnitude(first)
                                        : Magnitude(other) > Magnitude(first);
      first = takes ? other : first;
    }
    return Magnitude(first) == 0 ? 0.0f : first;
  }
  KVT_DEVICE static std::uint32_t Magnitude(float x) { return Bits(x) & 0x7fffffffu; }

  // Byte j of a block holds value j and value j + 16: the lanes of its first half store.
  template <int kOctets>
  KVT_DEVICE static std::uint32_t Encode(const EncodeRun&, const Team<kOctets>& team,
                                         TeamRow<kOctets>& row, std::uint8_t* out) {
    ForOctets(team, [&](int o) {
      const float d = FirstLargest(team.lane, row.octet[o]) / -8.0f;
      const float inverse = FiniteOrZero(1.0f / d);
      std::uint64_t codes = 0;
      KVT_UNROLL
      for (int i = 0; i < kOctet; ++i)
        codes |= std::uint64_t{LlamaQ4::Code(row.octet[o].x[i] * inverse)} << (8 * i);
      const std::uint64_t upper = __shfl_xor_sync(0xffffffffu, codes, kBlockLanes / 2);
      const int channel = team.Channel(o), in_block = channel % kLlamaBlock;
      if (out == nullptr || team.Count(o) == 0 || in_block >= kLlamaBlock / 2) return;
      std::uint8_t* block = out + channel / kLlamaBlock * kLlamaQ4Bytes;
      StoreBytes(codes | upper << 4, kOctet, block + 2 + in_block);
      if (in_block == 0) StoreBytes(FromFloat<Fp16>(d).bits, 2, block);
    });
    return 0;
  }
};

// Blocks of 16 channels: two lanes each.
template <bool kFourOverSix>
struct Nvfp4 {
  KVT_DEVICE static std::int64_t Bytes(const EncodeRun& run) {
    return run.dim / 2 + run.dim / Nvfp4Block::kValues;
  }
  struct Half {
    E4m3 scale;
    std::uint32_t codes[kOctet];
    std::uint32_t saturated;
    float error;
  };
  KVT_DEVICE static Half Try(const Octet& octet, float largest, float divisor, float of_all) {
    Half half;
    half.scale = Nvfp4Block::ScaleOf(largest, divisor, of_all);
    half.saturated = 0;
    const float step = ToFloat(half.scale) * of_all;
    const float inverse = FiniteOrZero(1.0f / step);
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i) {
      const float y = octet.x[i] * inverse;
      half.codes[i] = E2m1Code(y);
      half.saturated += Nvfp4Block::Saturates(y) ? 1u : 0u;
    }
    if constexpr (kFourOverSix) {
      float squares[kOctet];
      KVT_UNROLL
      for (int i = 0; i < kOctet; ++i) {
        const float off = octet.x[i] - E2m1Value(half.codes[i]) * step;
        squares[i] = off * off;
      }
      KVT_UNROLL
      for (int n = kOctet / 2; n > 0; n /= 2) {
        KVT_UNROLL
        for (int i = 0; i < kOctet / 2; ++i) {
          if (i < n) squares[i] = squares[2 * i] + squares[2 * i + 1];
        }
      }
      half.error = squares[0] + __shfl_xor_sync(0xffffffffu, squares[0], 1);
    }
    return half;
  }
  template <int kOctets>
  KVT_DEVICE static std::uint32_t Encode(const EncodeRun& run, const Team<kOctets>& team,
                                         TeamRow<kOctets>& row, std::uint8_t* out) {
    std::uint32_t saturated = 0;
    ForOctets(team, [&](int o) {
      const float largest = Integer<float>::Value(MaxOf(Largest(row.octet[o]), 2));
      Half half = Try(row.octet[o], largest, Nvfp4Block::kLargest, run.scale);
      if constexpr (kFourOverSix) {
        const Half other = Try(row.octet[o], largest, 4.0f, run.scale);
        if (other.error < half.error) half = other;
      }
      if (out == nullptr || team.Count(o) == 0) return;
      const int channel = team.Channel(o);
      StoreBytes(PackNibbles(half.codes), kOctet / 2, out + channel / 2);
      if (channel % Nvfp4Block::kValues == 0)
        out[run.dim / 2 + channel / Nvfp4Block::kValues] = half.scale.bits;
      saturated += half.saturated;
    });
    return saturated;
  }
};

struct Int4 {
  KVT_DEVICE static std::int64_t Bytes(const EncodeRun& run) { return run.dim / 2 + 4; }

  // To the source's precision; returns what saturated there.
  template <int kOctets>
  KVT_DEVICE static std::uint32_t RoundToSource(const Team<kOctets>& team, TeamRow<kOctets>& row,
                                                ElementType type) {
    std::uint32_t saturated = 0;
    ForOctets(team, [&](int o) {
      KVT_UNROLL
      for (int i = 0; i < kOctet; ++i) {
        float& x = row.octet[o].x[i];
        if (type == ElementType::kFp16) {
          saturated += Overflows<Fp16>(x) ? 1u : 0u;
          x = ToFloat(Saturate<Fp16>(x));
        } else {  // too far out for any source
          x = ToFloat(Saturate<Bf16>(x));
        }
      }
    });
    return saturated;
  }
  template <int kOctets>
  KVT_DEVICE static Int4PerTokenHead::Scaling Measure(const Team<kOctets>& team,
                                                      const TeamRow<kOctets>& row) {
    using Key = Integer<float>;
    std::int32_t low = INT32_MAX, high = INT32_MIN;
    ForOctets(team, [&](int o) {
      KVT_UNROLL
      for (int i = 0; i < kOctet; ++i) {
        if (i >= team.Count(o)) continue;
        const std::int32_t key = Key::Ordered(Key::Of(row.octet[o].x[i]));
        low = key < low ? key : low;
        high = key > high ? key : high;
      }
    });
    low = MinOf(low, team.lanes);
    high = MaxOf(high, team.lanes);
    return Int4PerTokenHead::Scaling::Of(Key::Value(Key::Ordered(low)),
                                         Key::Value(Key::Ordered(high)));
  }
  template <int kOctets>
  KVT_DEVICE static std::uint32_t Encode(const EncodeRun& run, const Team<kOctets>& team,
                                         TeamRow<kOctets>& row, std::uint8_t* out) {
    ApplyRotationSigns(team, row);
    Hadamard(team, row);
    std::uint32_t saturated = 0;
    if (run.source.type != ElementType::kFp32)
      saturated += RoundToSource(team, row, run.source.type);
    const Int4PerTokenHead::Scaling scaling = Measure(team, row);
    if (out == nullptr) return 0;
    ForOctets(team, [&](int o) {
      std::uint32_t codes[kOctet];
      KVT_UNROLL
      for (int i = 0; i < kOctet; ++i) {
        const float code = scaling.Code(row.octet[o].x[i]);
        codes[i] = static_cast<std::uint32_t>(static_cast<int>(Clamp(code + 0.5f, 15.5f)));
        if (i < team.Count(o)) saturated += Int4PerTokenHead::Scaling::Saturates(code) ? 1u : 0u;
      }
      StoreBytes(PackNibbles(codes), team.Count(o) / 2, out + team.Channel(o) / 2);
    });
    if (team.lane == 0) StoreBytes(scaling.Word(), 4, out + run.dim / 2);
    return saturated;
  }
};

// Tiles of 128 latent channels: sixteen lanes each; then the rotary channels.
struct Mla {
  static constexpr int kTileLanes = MlaFp8::kTile / kOctet;

  KVT_DEVICE static std::int64_t Bytes(const EncodeRun&) {
    return MlaFp8::kCodeBytes + MlaFp8::kScaleBytes;
  }
  template <int kOctets>
  KVT_DEVICE static std::uint32_t Encode(const EncodeRun&, const Team<kOctets>& team,
                                         TeamRow<kOctets>& row, std::uint8_t* out) {
    std::uint32_t saturated = 0;
    ForOctets(team, [&](int o) {
      Octet& octet = row.octet[o];
      const float scale =
          MlaFp8::TileScale(Integer<float>::Value(MaxOf(Largest(octet), kTileLanes)));
      if (out == nullptr || team.Count(o) == 0) return;
      const int channel = team.Channel(o);
      if (channel >= MlaFp8::kLatent) {
        std::byte* rope = reinterpret_cast<std::byte*>(out + MlaFp8::kLatent + MlaFp8::kScaleBytes);
        saturated += Store(octet, rope, ElementType::kBf16, channel - MlaFp8::kLatent, kOctet);
        return;
      }
      const float inverse = 1.0f / scale;
      KVT_UNROLL
      for (int i = 0; i < kOctet; ++i) octet.x[i] *= inverse;
      StoreAs(octet, kOctet, reinterpret_cast<E4m3*>(out) + channel);
      if (channel % MlaFp8::kTile == 0)
        StoreFloat(scale, out + MlaFp8::kLatent + 4 * (channel / MlaFp8::kTile));
    });
    return saturated;
  }
};

}  // namespace
}  // namespace kvtier::kernels
