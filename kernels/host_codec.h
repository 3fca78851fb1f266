#pragma once

#include <cstdint>
#include <span>

#include "kernels/codec_run.h"

// The codecs on the CPU. Thread-safe for disjoint outputs.
namespace kvtier::kernels {

// Both return how many values saturated.
std::uint64_t EncodeOnHost(const EncodeRun& run);
std::uint64_t DecodeOnHost(const DecodeRun& run);

// The largest |x| of `tokens` rows; a NaN counts as larger than infinity.
float LargestMagnitude(const ConstRows& rows, int dim, std::int64_t tokens);
// The same of each head, as many as `largest` takes, which begin `head_stride` elements apart; in
// the order in which they lie in memory.
void LargestMagnitudes(const ConstRows& rows, int dim, std::int64_t tokens,
                       std::int64_t head_stride, std::span<float> largest);

}  // namespace kvtier::kernels
