#include "kernels/codec_table.h"

#include <cstdlib>
#include <limits>

#include "kernels/llama_block.h"

namespace kvtier::kernels {
namespace {

int One(const Codec&) { return 1; }
int Two(const Codec&) { return 2; }
int Four(const Codec&) { return 4; }
int Group(const Codec& codec) { return codec.group; }
int LlamaBlock(const Codec&) { return kLlamaBlock; }

UnitSize ElementRow(const Codec& codec, int dim) {
  return {std::int64_t{dim} * ElementBytes(codec.element), 0};
}
UnitSize PerTokenHeadRow(const Codec&, int dim) { return {dim, 4}; }
UnitSize Q8Row(const Codec&, int dim) { return {dim, dim / kLlamaBlock * 2}; }
UnitSize Q4Row(const Codec&, int dim) { return {dim / 2, dim / kLlamaBlock * 2}; }
UnitSize KiviUnit(const Codec& codec, int dim, int tokens) {
  const std::int64_t values = std::int64_t{dim} * tokens;
  return {values * codec.bits / 8, values / codec.group * 4};
}
UnitSize KiviChannelUnit(const Codec& codec, int dim) { return KiviUnit(codec, dim, codec.group); }
UnitSize KiviTokenUnit(const Codec& codec, int dim) { return KiviUnit(codec, dim, 1); }

double RawError(const Codec& codec) {
  switch (codec.element) {
    case ElementType::kBf16:
      return 0x1p-8;
    case ElementType::kFp16:
      return 0x1p-11;
    default:
      return 0.0;  // fp32 holds all sources, and FP8 is stored of sources of that type only
  }
}
double Fp8Error(const Codec& codec) {
  return codec.element == ElementType::kE4m3 ? 0x1p-4 : 0x1p-3;
}
// Half a step, and the rounding of fp32 operations.
double Int8Error(const Codec&) { return 0.501; }
double Fp8RowError(const Codec&) { return 16.001; }  // E4M3's step at 448 is 32
// Half a step; the rest is what the fp16 level loses at the largest codes, rounding x - minimum and
// then the quotient.
double KiviError(const Codec& codec) { return 0.5 + (1 << codec.bits) * (0x1p-11 + 0x1p-12); }

// Half a step, and what d loses in fp16 at the largest code.
double Q8Error(const Codec&) { return 0.5 + 127 * 0x1p-11; }
// A whole step where a value lies as far out as the largest, on the other side: code 15 is 7 only.
double Q4Error(const Codec&) { return 1.0 + 8 * 0x1p-11; }

constexpr float kAny = std::numeric_limits<float>::max();

constexpr CodecRow kRows[] = {
    {CodecId::kRaw, "raw", One, ElementRow, One, RawError, kAny},
    {CodecId::kFp8, "fp8", One, ElementRow, One, Fp8Error, kAny},
    {CodecId::kInt8PerTokenHead, "int8_per_token_head", One, PerTokenHeadRow, Four, Int8Error,
     kAny},
    {CodecId::kFp8PerTokenHead, "fp8_per_token_head", One, PerTokenHeadRow, Four, Fp8RowError,
     kAny},
    {CodecId::kKiviChannel, "kivi_channel", Group, KiviChannelUnit, Two, KiviError, kKiviLimit},
    {CodecId::kKiviToken, "kivi_token", One, KiviTokenUnit, Group, KiviError, kKiviLimit},
    {CodecId::kLlamaQ8, "q8_0", One, Q8Row, LlamaBlock, Q8Error, LlamaQ8::kLargestMagnitude},
    {CodecId::kLlamaQ4, "q4_0", One, Q4Row, LlamaBlock, Q4Error, LlamaQ4::kLargestMagnitude},
};

}  // namespace

const CodecRow& RowOf(CodecId id) {
  for (const CodecRow& row : kRows) {
    if (row.id == id) return row;
  }
  std::abort();  // a CodecId comes from this program or from a checked header
}

}  // namespace kvtier::kernels
