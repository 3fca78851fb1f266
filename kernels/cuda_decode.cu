// Decoders: a team of lanes a row, whatever the codec; values go to the output's type where they
// are made.

#include "kernels/cuda_jobs.h"
#include "kernels/cuda_launch.h"
#include "kernels/cuda_octet.h"
#include "kernels/cuda_rotation.h"
#include "kernels/fp8_page.h"
#include "kernels/kivi.h"
#include "kernels/llama_block.h"
#include "kernels/mla_fp8.h"
#include "kernels/nvfp4.h"
#include "kernels/per_token_head.h"

namespace kvtier::kernels {
namespace {

KVT_DEVICE const std::uint8_t* UnitAt(const DecodeRun& run, std::int64_t unit, std::int64_t bytes) {
  return reinterpret_cast<const std::uint8_t*>(run.in) + unit * bytes;
}
KVT_DEVICE std::uint32_t Nibble(std::uint64_t word, int i) {
  return static_cast<std::uint32_t>(word >> (4 * i)) & 15u;
}
KVT_DEVICE std::uint8_t Byte(std::uint64_t word, int i) {
  return static_cast<std::uint8_t>(word >> (8 * i));
}

// Each codec below has
//   static Read(run, token, channel, count): an octet of a row's values.

struct Elements {
  KVT_DEVICE static Octet Read(const DecodeRun& run, std::int64_t token, int channel, int count) {
    const ElementType type = run.codec.element;
    const float scale = run.codec.id == CodecId::kFp8 ? run.scale : 1.0f;
    Octet octet = Load(run.in + token * run.dim * ElementBytes(type), type, channel, count);
    Multiply(octet, scale);
    return octet;
  }
};

template <class Kind>
struct PerTokenHead {
  KVT_DEVICE static Octet Read(const DecodeRun& run, std::int64_t token, int channel, int count) {
    const std::uint8_t* row = UnitAt(run, token, run.dim + 4);
    const float scale = LoadFloat(row + run.dim);
    const std::uint64_t codes = LoadBytes(row + channel, count);
    Octet octet;
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i) {
      const std::uint8_t bits = Byte(codes, i);
      typename Kind::Code code;
      std::memcpy(&code, &bits, 1);
      octet.x[i] = Kind::Decode(code) * scale;
    }
    return octet;
  }
};

KVT_DEVICE float LoadFp16(const std::uint8_t* from) {
  return ToFloat(Fp16{static_cast<std::uint16_t>(LoadBytes(from, 2))});
}

struct Q8 {
  KVT_DEVICE static Octet Read(const DecodeRun& run, std::int64_t token, int channel, int) {
    const std::uint8_t* block = UnitAt(run, token, run.dim / kLlamaBlock * kLlamaQ8Bytes) +
                                channel / kLlamaBlock * kLlamaQ8Bytes;
    const float d = LoadFp16(block);
    const std::uint64_t codes = LoadBytes(block + 2 + channel % kLlamaBlock, kOctet);
    Octet octet;
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i)
      octet.x[i] = static_cast<float>(static_cast<std::int8_t>(Byte(codes, i))) * d;
    return octet;
  }
};

struct Q4 {
  KVT_DEVICE static Octet Read(const DecodeRun& run, std::int64_t token, int channel, int) {
    const std::uint8_t* block = UnitAt(run, token, run.dim / kLlamaBlock * kLlamaQ4Bytes) +
                                channel / kLlamaBlock * kLlamaQ4Bytes;
    const float d = LoadFp16(block);
    const int in_block = channel % kLlamaBlock;
    const int shift = in_block < kLlamaBlock / 2 ? 0 : 4;
    const std::uint64_t codes =
        LoadBytes(block + 2 + in_block % (kLlamaBlock / 2), kOctet) >> shift;
    Octet octet;
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i) octet.x[i] = static_cast<float>((Byte(codes, i) & 15) - 8) * d;
    return octet;
  }
};

struct Nvfp4 {
  KVT_DEVICE static Octet Read(const DecodeRun& run, std::int64_t token, int channel, int) {
    const std::uint8_t* row = UnitAt(run, token, run.dim / 2 + run.dim / Nvfp4Block::kValues);
    const float step = ToFloat(E4m3{row[run.dim / 2 + channel / Nvfp4Block::kValues]}) * run.scale;
    const std::uint64_t codes = LoadBytes(row + channel / 2, kOctet / 2);
    Octet octet;
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i) octet.x[i] = E2m1Value(Nibble(codes, i)) * step;
    return octet;
  }
};

struct Int4 {
  KVT_DEVICE static Octet Read(const DecodeRun& run, std::int64_t token, int channel, int count) {
    const std::uint8_t* row = UnitAt(run, token, run.dim / 2 + 4);
    const auto scaling = Int4PerTokenHead::Scaling::FromWord(
        static_cast<std::uint32_t>(LoadBytes(row + run.dim / 2, 4)));
    const std::uint64_t codes = LoadBytes(row + channel / 2, count / 2);
    Octet octet;
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i)
      octet.x[i] = i < count ? scaling.Value(Nibble(codes, i)) : 0.0f;
    return octet;
  }
};

struct Mla {
  KVT_DEVICE static Octet Read(const DecodeRun& run, std::int64_t token, int channel, int) {
    const std::uint8_t* row = UnitAt(run, token, MlaFp8::kCodeBytes + MlaFp8::kScaleBytes);
    const std::uint8_t* behind = row + MlaFp8::kLatent;  // scales, then rotary channels
    if (channel >= MlaFp8::kLatent) {
      const auto* rope = reinterpret_cast<const Bf16*>(behind + MlaFp8::kScaleBytes);
      return LoadAs(rope + channel - MlaFp8::kLatent, kOctet);
    }
    const float scale = LoadFloat(behind + 4 * (channel / MlaFp8::kTile));
    Octet octet = LoadAs(reinterpret_cast<const E4m3*>(row) + channel, kOctet);
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i) octet.x[i] *= scale;
    return octet;
  }
};

struct Fp8Page {
  KVT_DEVICE static Octet Read(const DecodeRun& run, std::int64_t token, int channel, int count) {
    const int tokens = run.codec.group;
    const std::int64_t codes = std::int64_t{tokens} * run.dim;
    const std::uint8_t* unit = UnitAt(run, token / tokens, codes + 4);
    const float scale = LoadFloat(unit + codes);
    const auto* row = reinterpret_cast<const E4m3*>(unit) + token % tokens * run.dim;
    Octet octet = LoadAs(row + channel, count);
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i) octet.x[i] *= scale;
    return octet;
  }
};

// Scales and minima of a unit, `groups` of either.
struct KiviScales {
  const std::uint8_t* stored;
  int groups;
  bool in_e4m3;  // else fp16

  KVT_DEVICE Octet Load(int first, int count, int kind) const {
    const int at = kind * groups + first;
    if (in_e4m3) return LoadAs(reinterpret_cast<const E4m3*>(stored) + at, count);
    if (Aligned(stored, sizeof(Fp16)))
      return LoadAs(reinterpret_cast<const Fp16*>(stored) + at, count);
    Octet octet = {};  // behind an odd number of bytes of codes
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i) {
      if (i < count) octet.x[i] = LoadFp16(stored + 2 * (at + i));
    }
    return octet;
  }
  KVT_DEVICE float LoadOne(int at) const { return Load(at, 1, 0).x[0]; }
};

template <int kBits>
struct KiviChannel {
  KVT_DEVICE static Octet Read(const DecodeRun& run, std::int64_t token, int channel, int count) {
    constexpr int kPerByte = 8 / kBits;
    const int tokens = run.codec.group, in_unit = static_cast<int>(token % tokens);
    const std::int64_t codes_bytes = std::int64_t{tokens / kPerByte} * run.dim;
    const std::uint8_t* unit =
        UnitAt(run, token / tokens, codes_bytes + 2 * ElementBytes(run.codec.element) * run.dim);
    const KiviScales stored{unit + codes_bytes, run.dim, run.codec.element == ElementType::kE4m3};
    const Octet scales = stored.Load(channel, count, 0), minima = stored.Load(channel, count, 1);
    const std::uint64_t codes =
        LoadBytes(unit + std::int64_t{in_unit / kPerByte} * run.dim + channel, count) >>
        (in_unit % kPerByte * kBits);
    Octet octet;
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i)
      octet.x[i] = KiviValue(Byte(codes, i) & ((1u << kBits) - 1u), scales.x[i], minima.x[i]);
    return octet;
  }
};

template <int kBits>
struct KiviToken {
  KVT_DEVICE static Octet Read(const DecodeRun& run, std::int64_t token, int channel, int count) {
    const int size = run.codec.group, groups = run.dim / size, codes_bytes = run.dim * kBits / 8;
    const std::uint8_t* row =
        UnitAt(run, token, codes_bytes + 2 * ElementBytes(run.codec.element) * groups);
    const KiviScales stored{row + codes_bytes, groups, run.codec.element == ElementType::kE4m3};
    const std::uint64_t codes = LoadBytes(row + channel * kBits / 8, count * kBits / 8);
    Octet octet;
    float scale = 0.0f, minimum = 0.0f;
    int loaded = -1;
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i) {
      const int group = (channel + i) / size;
      if (i < count && group != loaded) {  // one for most: groups are whole octets
        scale = stored.LoadOne(group);
        minimum = stored.LoadOne(groups + group);
        loaded = group;
      }
      const auto code = static_cast<std::uint32_t>(codes >> (kBits * i)) & ((1u << kBits) - 1u);
      octet.x[i] = KiviValue(code, scale, minimum);
    }
    return octet;
  }
};

// What holds both the scales and the minima of an octet's channels takes some registers more, of
// which those of all GPUs must be enough.
template <class Codec, int kOctets>
inline constexpr int kDecodeBlocks = kBlocksAtOnce<kOctets>;
template <int kBits>
inline constexpr int kDecodeBlocks<KiviChannel<kBits>, 1> = kBlocksAtOnce<1> - 1;

template <class Codec, int kOctets>
__global__ void __launch_bounds__(kBlockThreads, kDecodeBlocks<Codec, kOctets>)
    DecodeRows(const DeviceDecode* jobs, const Tile* tiles) {
  const Tile tile = tiles[blockIdx.x];
  const DecodeRun run = jobs[tile.job].run;
  const auto team = Team<kOctets>::Of(run.dim, static_cast<int>(threadIdx.x));
  const bool to_fp8 = IsFp8(run.out.type);
  std::uint32_t saturated = 0;
  for (int row = team.row; row < kTileRows; row += team.rows) {
    const std::int64_t at = FirstRow(tile) + row;
    const bool there = at < run.tokens;
    TeamRow<kOctets> values;
    ForOctets(team, [&](int o) {
      const int count = there ? team.Count(o) : 0;
      values.octet[o] =
          count > 0 ? Codec::Read(run, run.first_token + at, team.Channel(o), count) : Octet{};
    });
    // All lanes of a warp go through these together.
    if constexpr (std::is_same_v<Codec, Int4>) {
      Hadamard(team, values);
      Multiply(team, values, 1.0f / static_cast<float>(HadamardBlock(run.dim)));
      ApplyRotationSigns(team, values);
    }
    if (run.codec.rotation == Rotation::kHadamard) Rotate(team, values);
    if (!there) continue;
    std::byte* out = run.out.data + at * run.out.token_stride * ElementBytes(run.out.type);
    ForOctets(team, [&](int o) {
      Octet& octet = values.octet[o];
      if (to_fp8) Divide(octet, run.out_scale);
      const int count = team.Count(o);
      KVT_UNROLL
      for (int i = 0; i < kOctet; ++i) octet.x[i] = i < count ? octet.x[i] : 0.0f;
      if (count > 0) saturated += Store(octet, out, run.out.type, team.Channel(o), count);
    });
  }
  Count(saturated, jobs[tile.job].saturated);
}

__global__ void __launch_bounds__(kBlockThreads, kBlocksAtOnce<1>)
    CopyRows(const DeviceDecode* jobs, const Tile* tiles) {
  constexpr int kPiece = 16;
  const Tile tile = tiles[blockIdx.x];
  const DecodeRun run = jobs[tile.job].run;
  const auto bytes = static_cast<int>(RowBytes(run.out.type, run.dim));
  const std::int64_t stride = run.out.token_stride * ElementBytes(run.out.type);
  const int pieces = (bytes + kPiece - 1) / kPiece;
  const std::int64_t left = run.tokens - FirstRow(tile);
  const int rows = left < kTileRows ? static_cast<int>(left) : kTileRows;
  for (int i = static_cast<int>(threadIdx.x); i < rows * pieces; i += kBlockThreads) {
    const std::int64_t row = FirstRow(tile) + i / pieces;
    const int begin = i % pieces * kPiece;
    const int count = bytes - begin < kPiece ? bytes - begin : kPiece;
    const std::uint8_t* from = UnitAt(run, run.first_token + row, bytes) + begin;
    auto* to = reinterpret_cast<std::uint8_t*>(run.out.data) + row * stride + begin;
    if (count == kPiece) {
      Copy<kPiece>(to, from);
    } else {
      for (int b = 0; b < count; ++b) to[b] = from[b];
    }
  }
}

using Kernel = void (*)(const DeviceDecode*, const Tile*);
template <int kOctets>
Kernel Of(DecodeKernel kernel) {
  switch (kernel) {
    case DecodeKernel::kCopy:
      return CopyRows;
    case DecodeKernel::kElements:
      return DecodeRows<Elements, kOctets>;
    case DecodeKernel::kInt8PerTokenHead:
      return DecodeRows<PerTokenHead<Int8PerTokenHead>, kOctets>;
    case DecodeKernel::kFp8PerTokenHead:
      return DecodeRows<PerTokenHead<Fp8PerTokenHead>, kOctets>;
    case DecodeKernel::kLlamaQ8:
      return DecodeRows<Q8, kOctets>;
    case DecodeKernel::kLlamaQ4:
      return DecodeRows<Q4, kOctets>;
    case DecodeKernel::kNvfp4:
      return DecodeRows<Nvfp4, kOctets>;
    case DecodeKernel::kInt4PerTokenHead:
      return DecodeRows<Int4, kOctets>;
    case DecodeKernel::kMlaFp8:
      return DecodeRows<Mla, kWideOctets>;
    case DecodeKernel::kFp8Page:
      return DecodeRows<Fp8Page, kOctets>;
    case DecodeKernel::kKiviChannel2:
      return DecodeRows<KiviChannel<2>, kOctets>;
    case DecodeKernel::kKiviChannel4:
      return DecodeRows<KiviChannel<4>, kOctets>;
    case DecodeKernel::kKiviChannel8:
      return DecodeRows<KiviChannel<8>, kOctets>;
    case DecodeKernel::kKiviToken2:
      return DecodeRows<KiviToken<2>, kOctets>;
    case DecodeKernel::kKiviToken4:
      return DecodeRows<KiviToken<4>, kOctets>;
    case DecodeKernel::kKiviToken8:
      return DecodeRows<KiviToken<8>, kOctets>;
  }
  return nullptr;
}

}  // namespace

int LaunchDecode(DecodeLaunch launch, const DeviceDecode* jobs, const Tile* tiles,
                 std::int64_t count, CUstream_st* stream) {
  const Kernel kernel = launch.wide ? Of<kWideOctets>(launch.kernel) : Of<1>(launch.kernel);
  return Launch(kernel, count, kBlockThreads, stream, jobs, tiles);
}

}  // namespace kvtier::kernels
