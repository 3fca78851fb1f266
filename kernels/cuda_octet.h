#pragma once

#include <cstdint>

#include "kernels/codec_run.h"
#include "kernels/cuda_tiles.h"
#include "kernels/row.h"

// What a thread of the kernels reads and writes: up to kOctet values of consecutive channels of a
// row, in one piece where they are whole and aligned. Of kernel sources only; the host emulates
// them.
namespace kvtier::kernels {

template <int kBytes>
struct alignas(kBytes) Piece {
  std::uint8_t bytes[kBytes];
};

KVT_DEVICE bool Aligned(const void* at, int to) {
  return (reinterpret_cast<std::uintptr_t>(at) & static_cast<std::uintptr_t>(to - 1)) == 0;
}

// kBytes from or to an address of any alignment.
template <int kBytes>
KVT_DEVICE void Copy(std::uint8_t* to, const std::uint8_t* from) {
  if (Aligned(to, kBytes) && Aligned(from, kBytes)) {
    *reinterpret_cast<Piece<kBytes>*>(to) = *reinterpret_cast<const Piece<kBytes>*>(from);
    return;
  }
  for (int i = 0; i < kBytes; ++i) to[i] = from[i];
}
// The first `count` bytes of eight, the first in the lowest bits.
KVT_DEVICE std::uint64_t LoadBytes(const std::uint8_t* from, int count) {
  if (count == 8 && Aligned(from, 8)) return *reinterpret_cast<const std::uint64_t*>(from);
  if (count == 4 && Aligned(from, 4)) return *reinterpret_cast<const std::uint32_t*>(from);
  if (count == 2 && Aligned(from, 2)) return *reinterpret_cast<const std::uint16_t*>(from);
  std::uint64_t word = 0;
  for (int i = 0; i < count; ++i) word |= std::uint64_t{from[i]} << (8 * i);
  return word;
}
KVT_DEVICE void StoreBytes(std::uint64_t word, int count, std::uint8_t* to) {
  if (count == 8 && Aligned(to, 8)) {
    *reinterpret_cast<std::uint64_t*>(to) = word;
  } else if (count == 4 && Aligned(to, 4)) {
    *reinterpret_cast<std::uint32_t*>(to) = static_cast<std::uint32_t>(word);
  } else if (count == 2 && Aligned(to, 2)) {
    *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(word);
  } else {
    for (int i = 0; i < count; ++i) to[i] = static_cast<std::uint8_t>(word >> (8 * i));
  }
}
KVT_DEVICE float LoadFloat(const std::uint8_t* from) {
  return FromBits(static_cast<std::uint32_t>(LoadBytes(from, 4)));
}
KVT_DEVICE void StoreFloat(float x, std::uint8_t* to) { StoreBytes(Bits(x), 4, to); }

// Values beyond `count` read as 0.
struct Octet {
  float x[kOctet];
};

template <class T>
KVT_DEVICE Octet LoadAs(const T* from, int count) {
  Octet octet;
  constexpr int kBytes = kOctet * sizeof(T) > 16 ? 16 : kOctet * sizeof(T);
  constexpr int kEach = kBytes / sizeof(T);
  if (count == kOctet && Aligned(from, kBytes)) {
    KVT_UNROLL
    for (int piece = 0; piece < kOctet / kEach; ++piece) {
      struct alignas(kBytes) {
        T values[kEach];
      } loaded;
      loaded = *reinterpret_cast<const decltype(loaded)*>(from + piece * kEach);
      KVT_UNROLL
      for (int i = 0; i < kEach; ++i) octet.x[piece * kEach + i] = ToFloat(loaded.values[i]);
    }
    return octet;
  }
  KVT_UNROLL
  for (int i = 0; i < kOctet; ++i) octet.x[i] = i < count ? ToFloat(from[i]) : 0.0f;
  return octet;
}
KVT_DEVICE Octet Load(const std::byte* row, ElementType type, int channel, int count) {
  return VisitElement(type, [&](auto element) {
    return LoadAs(reinterpret_cast<const decltype(element)*>(row) + channel, count);
  });
}

KVT_DEVICE const std::byte* RowAt(const EncodeRun& run, std::int64_t token) {
  return run.source.data + token * run.source.token_stride * ElementBytes(run.source.type);
}

// Saturating; returns how many values did.
template <class T>
KVT_DEVICE std::uint32_t StoreAs(const Octet& octet, int count, T* to) {
  constexpr int kBytes = kOctet * sizeof(T) > 16 ? 16 : kOctet * sizeof(T);
  constexpr int kEach = kBytes / sizeof(T);
  T rounded[kOctet];
  std::uint32_t saturated = 0;
  if (static_cast<std::uint32_t>(LargestMagnitudeOf(octet.x, kOctet)) <= kLargestBits<T>) {
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i) rounded[i] = RoundInRange<T>(octet.x[i]);
  } else {
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i) {
      saturated += Overflows<T>(octet.x[i]) ? 1u : 0u;
      rounded[i] = Saturate<T>(octet.x[i]);
    }
  }
  if (count == kOctet && Aligned(to, kBytes)) {
    KVT_UNROLL
    for (int piece = 0; piece < kOctet / kEach; ++piece) {
      struct alignas(kBytes) {
        T values[kEach];
      } stored;
      KVT_UNROLL
      for (int i = 0; i < kEach; ++i) stored.values[i] = rounded[piece * kEach + i];
      *reinterpret_cast<decltype(stored)*>(to + piece * kEach) = stored;
    }
    return saturated;
  }
  KVT_UNROLL
  for (int i = 0; i < kOctet; ++i) {
    if (i < count) to[i] = rounded[i];
  }
  return saturated;
}
KVT_DEVICE std::uint32_t Store(const Octet& octet, std::byte* row, ElementType type, int channel,
                               int count) {
  return VisitElement(type, [&](auto element) {
    return StoreAs(octet, count, reinterpret_cast<decltype(element)*>(row) + channel);
  });
}

// By a power of two it is a multiplication: the same bits, many times faster.
KVT_DEVICE void Divide(Octet& octet, float scale) {
  const bool power = (Bits(scale) & 0x7fffffu) == 0;
  const float inverse = 1.0f / scale;
  KVT_UNROLL
  for (int i = 0; i < kOctet; ++i) octet.x[i] = power ? octet.x[i] * inverse : octet.x[i] / scale;
}

// A NaN stays the one it is, as on the host: a GPU's own multiplication gives another.
KVT_DEVICE void Multiply(Octet& octet, float scale) {
  constexpr std::uint32_t kQuiet = 0x00400000u;
  KVT_UNROLL
  for (int i = 0; i < kOctet; ++i) {
    const float x = octet.x[i];
    octet.x[i] = IsNan(x) ? FromBits(Bits(x) | kQuiet) : x * scale;
  }
}

KVT_DEVICE std::int64_t FirstRow(const Tile& tile) { return std::int64_t{tile.index} * kTileRows; }

// The lanes of a warp that hold one row, a power of two of them, each an octet of every
// kOctet * lanes channels: up to kOctets, which is 1 for all but wide rows.
template <int kOctets>
struct Team {
  int dim = 0;
  int lanes = 1;
  int lane = 0;
  int octets = 1;  // of a lane
  int row = 0;     // of the rows that the block's teams take at a time
  int rows = 1;

  KVT_DEVICE static Team Of(int dim, int thread) {
    Team team;
    team.dim = dim;
    while (team.lanes < 32 && team.lanes < Octets(dim)) team.lanes *= 2;
    team.lane = thread % team.lanes;
    team.octets = (Octets(dim) + team.lanes - 1) / team.lanes;
    team.row = thread / team.lanes;
    team.rows = kBlockThreads / team.lanes;
    return team;
  }
  KVT_DEVICE int Channel(int octet) const { return (octet * lanes + lane) * kOctet; }
  // How many values the octet has; 0 beyond the row's end.
  KVT_DEVICE int Count(int octet) const {
    const int left = dim - Channel(octet);
    return left < 0 ? 0 : (left < kOctet ? left : kOctet);
  }
};

// Both of all lanes that differ in bits below `width` only; all lanes of the warp must call.
KVT_DEVICE std::int32_t MaxOf(std::int32_t x, int width) {
  for (int step = 1; step < width; step *= 2) {
    const std::int32_t other = __shfl_xor_sync(0xffffffffu, x, step);
    x = other > x ? other : x;
  }
  return x;
}
KVT_DEVICE std::int32_t MinOf(std::int32_t x, int width) { return ~MaxOf(~x, width); }

// A team's row.
template <int kOctets>
struct TeamRow {
  Octet octet[kOctets];
};

template <int kOctets, class F>
KVT_DEVICE void ForOctets(const Team<kOctets>& team, F f) {
  KVT_UNROLL
  for (int i = 0; i < kOctets; ++i) {
    if (kOctets == 1 || i < team.octets) f(i);
  }
}

// As a non-negative integer, by which magnitudes are ordered.
KVT_DEVICE std::int32_t Largest(const Octet& octet) { return LargestMagnitudeOf(octet.x, kOctet); }

// What a thread counted, to its job's.
KVT_DEVICE void Count(std::uint32_t saturated, DeviceCount* of_job) {
  if (saturated > 0 && of_job != nullptr) atomicAdd(of_job, DeviceCount{saturated});
}

}  // namespace kvtier::kernels
