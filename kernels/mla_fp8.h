#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/row.h"

// `fp8_ds_mla`, the cell of DeepSeek's sparse MLA (vLLM's v1/attention/backends/mla/
// flashmla_sparse.py): 512 latent channels as E4M3, an fp32 scale for each 128 of them, rounded up
// to a power of two, then the 64 rotary channels as bf16: 656 bytes a token.
namespace kvtier::kernels {

struct MlaFp8 {
  static constexpr int kLatent = 512;
  static constexpr int kTile = 128;
  static constexpr int kRope = 64;
  static constexpr int kDim = kLatent + kRope;
  static constexpr int kTiles = kLatent / kTile;
  static constexpr int kScaleBytes = 4 * kTiles;
  static constexpr int kCodeBytes = kLatent + 2 * kRope;

  KVT_HD static float TileScale(float largest) {
    const float measured = largest / E4m3::kLargest;
    const std::uint32_t bits = Bits(measured > 1e-4f ? measured : 1e-4f);
    return FromBits((bits + 0x7fffffu) & 0x7f800000u);
  }

  // Returns how many rotary values saturated; latent ones don't.
  KVT_HD static std::uint32_t Encode(const float* x, std::uint8_t* row) {
    for (int tile = 0; tile < kTiles; ++tile) {
      const float* values = x + tile * kTile;
      const float scale = TileScale(Integer<float>::Value(LargestMagnitudeOf(values, kTile)));
      const float inverse = 1.0f / scale;
      for (int i = 0; i < kTile; ++i)
        row[tile * kTile + i] = RoundInRange<E4m3>(values[i] * inverse).bits;
      std::memcpy(row + kLatent + 4 * tile, &scale, sizeof scale);
    }
    Bf16 stored[kRope];
    const std::uint32_t saturated = StoreRow(x + kLatent, kRope, stored);
    std::memcpy(row + kLatent + kScaleBytes, stored, sizeof stored);
    return saturated;
  }

  KVT_HD static void Decode(const std::uint8_t* row, float* out) {
    for (int tile = 0; tile < kTiles; ++tile) {
      float scale;
      std::memcpy(&scale, row + kLatent + 4 * tile, sizeof scale);
      for (int i = 0; i < kTile; ++i)
        out[tile * kTile + i] = ToFloat(E4m3{row[tile * kTile + i]}) * scale;
    }
    Bf16 rope[kRope];
    std::memcpy(rope, row + kLatent + kScaleBytes, sizeof rope);
    for (int i = 0; i < kRope; ++i) out[kLatent + i] = ToFloat(rope[i]);
  }
};

}  // namespace kvtier::kernels
