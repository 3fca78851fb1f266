// Rotations in vectors, of rows of whole blocks. Included once per instruction set.
#if defined(KVT_HOST_HADAMARD) == defined(HWY_TARGET_TOGGLE)
#ifdef KVT_HOST_HADAMARD
#undef KVT_HOST_HADAMARD
#else
#define KVT_HOST_HADAMARD
#endif

#include <cstdint>

#include "kernels/hadamard.h"
#include "kernels/host_vectors.h"
#include "kernels/int4_per_token_head.h"

HWY_BEFORE_NAMESPACE();
namespace kvtier::kernels::HWY_NAMESPACE {
namespace {

#if KVT_VECTORS

// One stage within vectors: each lane meets the one 2^kStage away, where the upper of the two
// subtracts. a + -b has the bits of a - b.
template <int kStage>
HWY_INLINE FloatVector MeetLanes(FloatVector x) {
  const WordVector upper = hn::ShiftLeft<31 - kStage>(hn::Iota(Words(), 0));
  return SwapLanes<kStage>(x) + FloatOf(BitsOf(x) ^ (upper & Word(0x80000000u)));
}
HWY_INLINE FloatVector HadamardOfLanes(FloatVector x) {
  x = MeetLanes<1>(MeetLanes<0>(x));
  if constexpr (kBlock >= 16) x = MeetLanes<2>(x);
  if constexpr (kBlock >= 32) x = MeetLanes<3>(x);
  return x;
}
// The stages within a block. Even and odd channels meet without a shuffle.
HWY_INLINE FloatBlock HadamardInBlock(FloatBlock x) {
  return {HadamardOfLanes(x.even + x.odd), HadamardOfLanes(x.even - x.odd)};
}

// The stages between blocks that are `half` channels apart, and on to kRadix / 2 times that.
template <int kRadix>
void MeetBlocks(float* x, int dim, int half) {
  const Floats d;
  for (int begin = 0; begin < dim; begin += kRadix * half) {
    for (int i = begin; i < begin + half; i += kBlock / 2) {
      FloatVector v[kRadix];
      for (int r = 0; r < kRadix; ++r) v[r] = hn::LoadU(d, x + i + r * half);
      for (int step = 1; step < kRadix; step *= 2) {
        for (int r = 0; r < kRadix; ++r) {
          if ((r & step) != 0) continue;
          const FloatVector sum = v[r] + v[r + step];
          v[r + step] = v[r] - v[r + step];
          v[r] = sum;
        }
      }
      for (int r = 0; r < kRadix; ++r) hn::StoreU(v[r], d, x + i + r * half);
    }
  }
}
// Of blocks that went through HadamardInBlock, in block order.
inline void HadamardOfBlocks(float* x, int dim) {
  const int end = HadamardBlock(dim);
  int half = kBlock;
  for (; 8 * half <= end; half *= 8) MeetBlocks<8>(x, dim, half);
  if (4 * half <= end) return MeetBlocks<4>(x, dim, half);
  if (2 * half <= end) MeetBlocks<2>(x, dim, half);
}

// ApplyRotationSigns, of the block from channel c on.
HWY_INLINE FloatBlock WithRotationSigns(FloatBlock x, int c) {
  const WordVector signs = Word(~RotationSigns(c) >> (c % 32)), top = Word(0x80000000u);
  const WordVector to_top = Word(31) - hn::ShiftLeft<1>(hn::Iota(Words(), 0));
  return {FloatOf(BitsOf(x.even) ^ (hn::Shl(signs, to_top) & top)),
          FloatOf(BitsOf(x.odd) ^ (hn::Shl(signs, to_top - Word(1)) & top))};
}

// RotateRow, from any type.
template <class Source>
void RotateBlocks(const Source* x, int dim, float* out) {
  const FloatVector factor = Float(RotationFactor(dim));
  for (int c = 0; c < dim; c += kBlock) StoreInBlockOrder(HadamardInBlock(Load(x + c)), out + c);
  HadamardOfBlocks(out, dim);
  for (int c = 0; c < dim; c += kBlock) Store(Product(LoadInBlockOrder(out + c), factor), out + c);
}

#endif  // KVT_VECTORS

}  // namespace
}  // namespace kvtier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // per instruction set
