#pragma once

#include <cstdint>

#include "kernels/float_bits.h"

namespace kvtier::kernels {

// `auto`, `float16`, `bfloat16`: a row is [dim] values of type T. A cast that overflows T stores
// T's largest finite value. Returns how many values saturated.
template <class Source, class T>
KVT_HD std::uint32_t EncodeRawRow(const Source* x, int dim, T* row) {
  std::uint32_t saturated = 0;
  for (int c = 0; c < dim; ++c) {
    const float value = ToFloat(x[c]);
    saturated += Overflows<T>(value) ? 1u : 0u;
    row[c] = Saturate<T>(value);
  }
  return saturated;
}

template <class T>
KVT_HD void DecodeRawRow(const T* row, int dim, float* out) {
  for (int c = 0; c < dim; ++c) out[c] = ToFloat(row[c]);
}

}  // namespace kvtier::kernels
