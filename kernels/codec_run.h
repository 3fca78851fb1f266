#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/codec.h"

// The jobs a codec does: what every device takes, whoever runs them.
namespace kvtier::kernels {

// Rows of `dim` values, `token_stride` elements apart: consecutive tokens of one head, wherever
// they lie. `data` is aligned to its element.
struct ConstRows {
  const std::byte* data = nullptr;
  ElementType type = ElementType::kBf16;
  std::int64_t token_stride = 0;
};
struct Rows {
  std::byte* data = nullptr;
  ElementType type = ElementType::kBf16;
  std::int64_t token_stride = 0;
};

// Encodes `units` whole units of one head: source has units * UnitTokens rows, out takes units *
// UnitSize bytes.
struct EncodeRun {
  Codec codec;
  int dim = 0;
  float scale = 1.0f;  // kFp8
  ConstRows source;
  int units = 0;
  std::byte* out = nullptr;
};

// Decodes `tokens` rows from `first_token` of the head whose unit 0 lies at `in`. E4M3 and E5M2
// output is value / out_scale; it is a byte copy where the stored codes have that type and scale.
// Values beyond the output type saturate.
struct DecodeRun {
  Codec codec;
  int dim = 0;
  float scale = 1.0f;
  const std::byte* in = nullptr;
  std::int64_t first_token = 0;
  std::int64_t tokens = 0;
  float out_scale = 1.0f;
  Rows out;
};

}  // namespace kvtier::kernels
