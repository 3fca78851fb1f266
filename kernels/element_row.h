#pragma once

#include "kernels/codec.h"
#include "kernels/row.h"

namespace kvtier::kernels {

// A row of [dim] values x / scale of type T, saturating: `auto`, `float16` and `bfloat16` at scale
// 1; `fp8_e4m3` and `fp8_e5m2` with a scale known beforehand, an fp32 division rounded to nearest
// even as in vLLM's reshape_and_cache_flash (csrc/quantization/w8a8/fp8). scale: finite, > 0,
// normal. Returns how many values saturated; NaN stays NaN (0x7F in the 8-bit types),
// its payload is not promised.
template <class Source, class T>
KVT_HD std::uint32_t EncodeElementRow(const Source* x, int dim, float scale, T* row) {
  float values[kMaxHeadDim];
  DivideRow(x, dim, scale, values);
  return StoreRow(values, dim, row);
}

template <class T>
KVT_HD void DecodeElementRow(const T* row, int dim, float scale, float* out) {
  for (int c = 0; c < dim; ++c) out[c] = ToFloat(row[c]) * scale;
}

}  // namespace kvtier::kernels
