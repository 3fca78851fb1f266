#pragma once

#include "kernels/portability.h"

// Walsh-Hadamard transforms in Sylvester's order, over blocks of the largest power of two that
// divides the head dim: 128 channels are one block, 96 three of 32. Each output is the same tree of
// additions however the loops are compiled.
namespace kvtier::kernels {

constexpr int HadamardBlock(int dim) { return dim & -dim; }

// In place, without a factor: twice gives HadamardBlock(dim) * x.
KVT_HD void Hadamard(float* x, int dim) {
  const int block = HadamardBlock(dim);
  for (int half = 1; half < block; half *= 2) {
    for (int begin = 0; begin < dim; begin += 2 * half) {
      for (int i = begin; i < begin + half; ++i) {
        const float sum = x[i] + x[i + half];
        x[i + half] = x[i] - x[i + half];
        x[i] = sum;
      }
    }
  }
}

// The factor that makes it its own inverse and keeps the products of rows: q.k is that of the
// rotated q and k.
KVT_HD float RotationFactor(int dim) {
  float factor = 1.0f;
  int left = HadamardBlock(dim);
  for (; left > 2; left /= 4) factor *= 0.5f;
  return left == 2 ? factor * 0.70710678f : factor;
}

// In place.
KVT_HD void RotateRow(float* x, int dim) {
  const float factor = RotationFactor(dim);
  Hadamard(x, dim);
  for (int i = 0; i < dim; ++i) x[i] *= factor;
}

}  // namespace kvtier::kernels
