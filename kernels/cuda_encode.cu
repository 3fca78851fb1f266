// Encoders. Each kernel takes tiles of jobs, which may differ in shape and scale; its arithmetic is
// that of the functions with which kernels/ describes the codec, on the values that a thread holds.

#include "kernels/cuda_encode_kivi.h"
#include "kernels/cuda_encode_rows.h"
#include "kernels/cuda_jobs.h"
#include "kernels/cuda_launch.h"
#include "kernels/cuda_octet.h"
#include "kernels/cuda_rotation.h"
#include "kernels/fp8_page.h"

namespace kvtier::kernels {
namespace {

template <int kOctets>
KVT_DEVICE TeamRow<kOctets> LoadRow(const EncodeRun& run, const Team<kOctets>& team,
                                    std::int64_t token, bool there) {
  TeamRow<kOctets> row;
  const std::byte* x = RowAt(run, token);
  ForOctets(team, [&](int o) {
    row.octet[o] = Load(x, run.source.type, team.Channel(o), there ? team.Count(o) : 0);
  });
  return row;
}

template <class Codec, int kOctets>
__global__ void __launch_bounds__(kBlockThreads, kBlocksAtOnce<kOctets>)
    EncodeRows(const DeviceEncode* jobs, const Tile* tiles) {
  const Tile tile = tiles[blockIdx.x];
  const EncodeRun run = jobs[tile.job].run;
  const auto team = Team<kOctets>::Of(run.dim, static_cast<int>(threadIdx.x));
  std::uint32_t saturated = 0;
  for (int row = team.row; row < kTileRows; row += team.rows) {
    const std::int64_t token = FirstRow(tile) + row;
    const bool there = token < run.units;
    TeamRow<kOctets> values = LoadRow(run, team, there ? token : 0, there);
    auto* out = reinterpret_cast<std::uint8_t*>(run.out) + token * Codec::Bytes(run);
    saturated += Codec::Encode(run, team, values, there ? out : nullptr);
  }
  Count(saturated, jobs[tile.job].saturated);
}

// Rows rotated, as fp32.
template <int kOctets>
__global__ void __launch_bounds__(kBlockThreads, kBlocksAtOnce<kOctets>)
    RotateRows(const DeviceEncode* jobs, const Tile* tiles) {
  const Tile tile = tiles[blockIdx.x];
  const EncodeRun run = jobs[tile.job].run;
  const auto team = Team<kOctets>::Of(run.dim, static_cast<int>(threadIdx.x));
  for (int row = team.row; row < kTileRows; row += team.rows) {
    const std::int64_t token = FirstRow(tile) + row;
    const bool there = token < run.units;
    TeamRow<kOctets> values = LoadRow(run, team, there ? token : 0, there);
    Rotate(team, values);
    if (!there) continue;
    auto* out = reinterpret_cast<float*>(run.out) + token * run.dim;
    ForOctets(team, [&](int o) { StoreAs(values.octet[o], team.Count(o), out + team.Channel(o)); });
  }
}

// Rows as they are; of an FP8 source, counts the codes that are no finite numbers.
__global__ void __launch_bounds__(kBlockThreads, kBlocksAtOnce<1>)
    CopyRows(const DeviceEncode* jobs, const Tile* tiles) {
  constexpr int kPiece = 16;
  const Tile tile = tiles[blockIdx.x];
  const EncodeRun run = jobs[tile.job].run;
  const auto bytes = static_cast<int>(RowBytes(run.source.type, run.dim));
  const int pieces = (bytes + kPiece - 1) / kPiece;
  const std::int64_t left = run.units - FirstRow(tile);
  const int rows = left < kTileRows ? static_cast<int>(left) : kTileRows;
  const std::uint32_t not_finite = run.source.type == ElementType::kE4m3 ? 0x7fu : 0x7cu;
  std::uint32_t found = 0;
  for (int i = static_cast<int>(threadIdx.x); i < rows * pieces; i += kBlockThreads) {
    const std::int64_t token = FirstRow(tile) + i / pieces;
    const int begin = i % pieces * kPiece;
    const int count = bytes - begin < kPiece ? bytes - begin : kPiece;
    const auto* from = reinterpret_cast<const std::uint8_t*>(RowAt(run, token)) + begin;
    auto* to = reinterpret_cast<std::uint8_t*>(run.out) + token * bytes + begin;
    Piece<kPiece> piece;
    if (count == kPiece) {
      Copy<kPiece>(piece.bytes, from);
      Copy<kPiece>(to, piece.bytes);
    } else {
      for (int b = 0; b < count; ++b) to[b] = piece.bytes[b] = from[b];
    }
    if (!IsFp8(run.source.type)) continue;
    for (int b = 0; b < count; ++b) found += (piece.bytes[b] & 0x7fu) >= not_finite ? 1u : 0u;
  }
  Count(found, jobs[tile.job].saturated);
}

// A block a page of one head: its largest magnitude first, then its rows.
__global__ void __launch_bounds__(kBlockThreads, kBlocksAtOnce<1>)
    EncodeFp8Page(const DeviceEncode* jobs, const Tile* tiles) {
  __shared__ std::int32_t largest_of_warp[kBlockThreads / 32];
  const Tile tile = tiles[blockIdx.x];
  const EncodeRun run = jobs[tile.job].run;
  const int tokens = run.codec.group, octets = Octets(run.dim), thread = threadIdx.x;
  const auto load = [&](int i, int channel, int count) {
    return Load(RowAt(run, std::int64_t{tile.index} * tokens + i / octets), run.source.type,
                channel, count);
  };
  const auto count_at = [&](int channel) {
    return run.dim - channel < kOctet ? run.dim - channel : kOctet;
  };
  std::int32_t largest = 0;
  for (int i = thread; i < tokens * octets; i += kBlockThreads) {
    const int channel = i % octets * kOctet;
    const std::int32_t of_octet = Largest(load(i, channel, count_at(channel)));
    largest = of_octet > largest ? of_octet : largest;
  }
  largest = MaxOf(largest, 32);
  if (thread % 32 == 0) largest_of_warp[thread / 32] = largest;
  __syncthreads();
  KVT_UNROLL
  for (int i = 0; i < kBlockThreads / 32; ++i)
    largest = largest_of_warp[i] > largest ? largest_of_warp[i] : largest;

  const float scale = Fp8PageScale(Integer<float>::Value(largest));
  const std::int64_t codes = std::int64_t{tokens} * run.dim;
  auto* out = reinterpret_cast<std::uint8_t*>(run.out) + tile.index * (codes + 4);
  for (int i = thread; i < tokens * octets; i += kBlockThreads) {
    const int channel = i % octets * kOctet;
    Octet octet = load(i, channel, count_at(channel));
    Divide(octet, scale);  // nothing overflows
    StoreAs(octet, count_at(channel),
            reinterpret_cast<E4m3*>(out) + std::int64_t{i / octets} * run.dim + channel);
  }
  if (thread == 0) StoreFloat(scale, out + codes);
}

// For sm_100 the compiler takes half as many registers again.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kKiviChannelBlocks = 5;
#else
constexpr int kKiviChannelBlocks = kBlocksAtOnce<1>;
#endif

template <int kBits>
__global__ void __launch_bounds__(kBlockThreads, kKiviChannelBlocks)
    EncodeKiviChannel(const DeviceEncode* jobs, const Tile* tiles) {
  const Tile tile = tiles[blockIdx.x];
  const EncodeRun run = jobs[tile.job].run;
  const std::int64_t item = std::int64_t{tile.index} * kBlockThreads + threadIdx.x;
  const int octets = Octets(run.dim);
  if (item >= std::int64_t{run.units} * octets) return;
  const int channel = static_cast<int>(item % octets) * kOctet;
  if (run.source.type == ElementType::kFp16) {
    EncodeChannels<kBits, true>(run, item / octets, channel);
  } else {
    EncodeChannels<kBits, false>(run, item / octets, channel);
  }
}

template <int kBits>
__global__ void __launch_bounds__(kBlockThreads, kBlocksAtOnce<1>)
    EncodeKiviToken(const DeviceEncode* jobs, const Tile* tiles) {
  const Tile tile = tiles[blockIdx.x];
  const EncodeRun run = jobs[tile.job].run;
  const std::int64_t item = std::int64_t{tile.index} * kBlockThreads + threadIdx.x;
  const int groups = run.dim / run.codec.group;
  if (item >= std::int64_t{run.units} * groups) return;
  const int group = static_cast<int>(item % groups);
  if (run.source.type == ElementType::kFp16) {
    EncodeGroup<kBits, true>(run, item / groups, group);
  } else {
    EncodeGroup<kBits, false>(run, item / groups, group);
  }
}

using Kernel = void (*)(const DeviceEncode*, const Tile*);
// Those of rows.
template <int kOctets>
Kernel OfRows(EncodeKernel kernel) {
  switch (kernel) {
    case EncodeKernel::kElements:
      return EncodeRows<Elements, kOctets>;
    case EncodeKernel::kInt8PerTokenHead:
      return EncodeRows<PerTokenHead<Int8PerTokenHead>, kOctets>;
    case EncodeKernel::kFp8PerTokenHead:
      return EncodeRows<PerTokenHead<Fp8PerTokenHead>, kOctets>;
    case EncodeKernel::kLlamaQ8:
      return EncodeRows<Q8, kOctets>;
    case EncodeKernel::kLlamaQ4:
      return EncodeRows<Q4, kOctets>;
    case EncodeKernel::kNvfp4:
      return EncodeRows<Nvfp4<false>, kOctets>;
    case EncodeKernel::kNvfp4FourOverSix:
      return EncodeRows<Nvfp4<true>, kOctets>;
    case EncodeKernel::kInt4PerTokenHead:
      return EncodeRows<Int4, kOctets>;
    case EncodeKernel::kRotate:
      return RotateRows<kOctets>;
    default:
      return nullptr;
  }
}
Kernel Of(EncodeKernel kernel, bool wide) {
  switch (kernel) {
    case EncodeKernel::kCopy:
      return CopyRows;
    case EncodeKernel::kMlaFp8:
      return EncodeRows<Mla, kWideOctets>;
    case EncodeKernel::kFp8Page:
      return EncodeFp8Page;
    case EncodeKernel::kKiviChannel2:
      return EncodeKiviChannel<2>;
    case EncodeKernel::kKiviChannel4:
      return EncodeKiviChannel<4>;
    case EncodeKernel::kKiviChannel8:
      return EncodeKiviChannel<8>;
    case EncodeKernel::kKiviToken2:
      return EncodeKiviToken<2>;
    case EncodeKernel::kKiviToken4:
      return EncodeKiviToken<4>;
    case EncodeKernel::kKiviToken8:
      return EncodeKiviToken<8>;
    default:
      return wide ? OfRows<kWideOctets>(kernel) : OfRows<1>(kernel);
  }
}

}  // namespace

int LaunchEncode(EncodeLaunch launch, const DeviceEncode* jobs, const Tile* tiles,
                 std::int64_t count, CUstream_st* stream) {
  return Launch(Of(launch.kernel, launch.wide), count, kBlockThreads, stream, jobs, tiles);
}

}  // namespace kvtier::kernels
