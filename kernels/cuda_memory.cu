// Bytes that are moved, zeroed and hashed, and values that are looked at.

#include "kernels/cuda_jobs.h"
#include "kernels/cuda_launch.h"
#include "kernels/cuda_octet.h"
#include "kernels/cuda_tiles.h"

namespace kvtier::kernels {
namespace {

__global__ void __launch_bounds__(kBlockThreads, kBlocksAtOnce<1>)
    Move(const DeviceMove* jobs, const Tile* tiles) {
  constexpr int kPiece = 16;
  const Tile tile = tiles[blockIdx.x];
  const DeviceMove job = jobs[tile.job];
  const std::int64_t begin = tile.index * kTileBytes;
  const std::int64_t end = begin + kTileBytes < job.bytes ? begin + kTileBytes : job.bytes;
  auto* to = reinterpret_cast<std::uint8_t*>(job.to);
  const auto* from = reinterpret_cast<const std::uint8_t*>(job.from);
  const std::int64_t step = kBlockThreads * kPiece;
  for (std::int64_t at = begin + threadIdx.x * kPiece; at < end; at += step) {
    Piece<kPiece> piece = {};
    const std::int64_t count = end - at < kPiece ? end - at : kPiece;
    if (count == kPiece) {
      if (from != nullptr) Copy<kPiece>(piece.bytes, from + at);
      Copy<kPiece>(to + at, piece.bytes);
      continue;
    }
    for (std::int64_t i = at; i < end; ++i) to[i] = from == nullptr ? 0 : from[i];
  }
}

__global__ void __launch_bounds__(kBlockThreads, kBlocksAtOnce<1>)
    LargestOfRows(const DeviceLargest* jobs, const Tile* tiles) {
  const Tile tile = tiles[blockIdx.x];
  const DeviceLargest job = jobs[tile.job];
  const std::int64_t first = FirstRow(tile);
  const std::int64_t rows = job.tokens - first < kTileRows ? job.tokens - first : kTileRows;
  const int octets = Octets(job.dim);
  const std::int64_t row_bytes = job.rows.token_stride * ElementBytes(job.rows.type);
  std::int32_t largest = 0;
  for (int at = threadIdx.x; at < rows * octets; at += kBlockThreads) {
    const int channel = at % octets * kOctet;
    const int left = job.dim - channel;
    const std::byte* row = job.rows.data + (first + at / octets) * row_bytes;
    const std::int32_t of_octet =
        Largest(Load(row, job.rows.type, channel, left < kOctet ? left : kOctet));
    largest = of_octet > largest ? of_octet : largest;
  }
  largest = MaxOf(largest, 32);
  if (threadIdx.x % 32 == 0) atomicMax(job.largest, static_cast<DeviceCount>(largest));
}

// XXH3 (xxhash's doc/xxhash_spec.md), 64 bits, seed 0, of more than kShortHash bytes: eight sums
// over stripes of 64 bytes, mixed after every block of 16 of them. What a block adds to the sums
// does not depend on them: blocks are summed side by side, then mixed one after the other.
constexpr std::uint64_t kMixPrime = 0x9e3779b1u;
constexpr std::uint64_t kLengthPrime = 0x9e3779b185ebca87ull;
constexpr std::uint64_t kLastPrime = 0x165667919e3779f9ull;
__constant__ const std::uint64_t kSecret[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull};
__constant__ const std::uint64_t kStart[8] = {
    0xc2b2ae3du,           kLengthPrime, 0xc2b2ae3d27d4eb4full, 0x165667b19e3779f9ull,
    0x85ebca77c2b2ae63ull, 0x85ebca77u,  0x27d4eb2f165667c5ull, kMixPrime};
constexpr int kStripe = 64;
constexpr int kStripes = 16;  // of a block
constexpr int kSums = 8;
constexpr int kSecretBytes = 192;
constexpr int kLanes = 4;  // each has two of the sums
constexpr int kTeams = kBlockThreads / kLanes;

KVT_DEVICE std::uint64_t Secret(int byte) {
  const int shift = byte % 8 * 8;
  const std::uint64_t low = kSecret[byte / 8] >> shift;
  return shift == 0 ? low : low | kSecret[byte / 8 + 1] << (64 - shift);
}

KVT_DEVICE std::uint64_t FoldedProduct(std::uint64_t a, std::uint64_t b) {
  return (a * b) ^ __umul64hi(a, b);
}

// What a stripe adds to the two sums of a lane.
struct TwoSums {
  std::uint64_t sum[2] = {};

  KVT_DEVICE void Add(const std::uint8_t* stripe, int lane, int secret) {
    const std::uint64_t x[2] = {LoadBytes(stripe + 16 * lane, 8),
                                LoadBytes(stripe + 16 * lane + 8, 8)};
    KVT_UNROLL
    for (int i = 0; i < 2; ++i) {
      const std::uint64_t key = x[i] ^ Secret(secret + 16 * lane + 8 * i);
      sum[i] += (key & 0xffffffffu) * (key >> 32);
      sum[1 - i] += x[i];
    }
  }
};

KVT_DEVICE std::uint64_t Mixed(std::uint64_t sum, int i) {
  return (sum ^ (sum >> 47) ^ Secret(kSecretBytes - kStripe + 8 * i)) * kMixPrime;
}

KVT_DEVICE std::uint64_t Merged(const std::uint64_t* sums, std::uint64_t bytes) {
  constexpr int kFrom = 11;
  std::uint64_t hash = bytes * kLengthPrime;
  for (int i = 0; i < kSums; i += 2)
    hash += FoldedProduct(sums[i] ^ Secret(kFrom + 8 * i), sums[i + 1] ^ Secret(kFrom + 8 * i + 8));
  hash = (hash ^ (hash >> 37)) * kLastPrime;
  return hash ^ (hash >> 32);
}

__global__ void __launch_bounds__(kBlockThreads, kBlocksAtOnce<1>) Hash(const DeviceHash* jobs) {
  __shared__ std::uint64_t of_block[kTeams][kSums];
  const DeviceHash job = jobs[blockIdx.x];
  const auto* data = reinterpret_cast<const std::uint8_t*>(job.from);
  const int thread = threadIdx.x, lane = thread % kLanes, team = thread / kLanes;
  constexpr int kBlock = kStripe * kStripes;
  const std::int64_t whole = (job.bytes - 1) / kBlock;  // blocks after which the sums are mixed
  std::uint64_t sum = kStart[thread % kSums];           // of the first kSums threads
  for (std::int64_t first = 0; first <= whole; first += kTeams) {
    const std::int64_t block = first + team;
    TwoSums sums;
    if (block <= whole) {
      const std::uint8_t* begin = data + block * kBlock;
      const std::int64_t left = (job.bytes - 1 - block * kBlock) / kStripe;
      const int stripes = block < whole ? kStripes : static_cast<int>(left);
      KVT_UNROLL_BY(4)
      for (int i = 0; i < stripes; ++i) sums.Add(begin + i * kStripe, lane, 8 * i);
      if (block == whole) sums.Add(data + job.bytes - kStripe, lane, kSecretBytes - kStripe - 7);
    }
    of_block[team][2 * lane] = sums.sum[0];
    of_block[team][2 * lane + 1] = sums.sum[1];
    __syncthreads();
    if (thread < kSums) {
      for (int i = 0; i < kTeams && first + i <= whole; ++i) {
        sum += of_block[i][thread];
        if (first + i < whole) sum = Mixed(sum, thread);
      }
    }
    __syncthreads();
  }
  if (thread < kSums) of_block[0][thread] = sum;
  __syncthreads();
  if (thread == 0) *job.out = Merged(of_block[0], static_cast<std::uint64_t>(job.bytes));
}

}  // namespace

int LaunchMove(const DeviceMove* jobs, const Tile* tiles, std::int64_t count, CUstream_st* stream) {
  return Launch(Move, count, kBlockThreads, stream, jobs, tiles);
}

int LaunchLargest(const DeviceLargest* jobs, const Tile* tiles, std::int64_t count,
                  CUstream_st* stream) {
  return Launch(LargestOfRows, count, kBlockThreads, stream, jobs, tiles);
}

int LaunchHash(const DeviceHash* jobs, std::int64_t count, CUstream_st* stream) {
  return Launch(Hash, count, kBlockThreads, stream, jobs);
}

}  // namespace kvtier::kernels
