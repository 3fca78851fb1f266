#pragma once

#include "kernels/cuda_octet.h"
#include "kernels/hadamard.h"
#include "kernels/int4_per_token_head.h"

// Rotations of a team's row.
namespace kvtier::kernels {

// Hadamard of hadamard.h: the same sums, each lane those of its own values.
template <int kOctets>
KVT_DEVICE void Hadamard(const Team<kOctets>& team, TeamRow<kOctets>& row) {
  const int block = HadamardBlock(team.dim);
  KVT_UNROLL
  for (int half = 1; half < kOctet; half *= 2) {
    if (half >= block) return;
    ForOctets(team, [&](int o) {
      KVT_UNROLL
      for (int i = 0; i < kOctet; ++i) {
        if ((i & half) != 0) continue;
        float* x = row.octet[o].x;
        const float sum = x[i] + x[i + half];
        x[i + half] = x[i] - x[i + half];
        x[i] = sum;
      }
    });
  }
  for (int step = 1; step < team.lanes && step * kOctet < block; step *= 2) {
    const bool upper = (team.lane & step) != 0;
    ForOctets(team, [&](int o) {
      KVT_UNROLL
      for (int i = 0; i < kOctet; ++i) {
        float& x = row.octet[o].x[i];
        const float other = __shfl_xor_sync(0xffffffffu, x, step);
        x = upper ? other - x : x + other;
      }
    });
  }
  KVT_UNROLL
  for (int step = 1; step < kOctets; step *= 2) {
    if (step * team.lanes * kOctet >= block) return;
    KVT_UNROLL
    for (int o = 0; o < kOctets; ++o) {
      if ((o & step) != 0 || o + step >= team.octets) continue;
      KVT_UNROLL
      for (int i = 0; i < kOctet; ++i) {
        const float low = row.octet[o].x[i], high = row.octet[o + step].x[i];
        row.octet[o].x[i] = low + high;
        row.octet[o + step].x[i] = low - high;
      }
    }
  }
}
template <int kOctets>
KVT_DEVICE void Multiply(const Team<kOctets>& team, TeamRow<kOctets>& row, float factor) {
  ForOctets(team, [&](int o) {
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i) row.octet[o].x[i] *= factor;
  });
}

__constant__ const RotationSignWords kDeviceSigns = kRotationSigns;

template <int kOctets>
KVT_DEVICE void ApplyRotationSigns(const Team<kOctets>& team, TeamRow<kOctets>& row) {
  ForOctets(team, [&](int o) {
    const int channel = team.Channel(o);
    if (team.Count(o) == 0) return;
    const std::uint32_t signs = ~kDeviceSigns.words[channel / 32] >> (channel % 32);
    KVT_UNROLL
    for (int i = 0; i < kOctet; ++i)
      row.octet[o].x[i] = FromBits(Bits(row.octet[o].x[i]) ^ (signs >> i) << 31);
  });
}

// RotateRow of hadamard.h.
template <int kOctets>
KVT_DEVICE void Rotate(const Team<kOctets>& team, TeamRow<kOctets>& row) {
  Hadamard(team, row);
  Multiply(team, row, RotationFactor(team.dim));
}

}  // namespace kvtier::kernels
