#include "kernels/codec_table.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "kernels/hadamard.h"
#include "kernels/llama_block.h"
#include "kernels/mla_fp8.h"
#include "kernels/nvfp4.h"

namespace kvtier::kernels {
namespace {

template <int kN>
int Always(const Codec&) {
  return kN;
}
int Group(const Codec& codec) { return codec.group; }

UnitSize ElementRow(const Codec& codec, int dim) {
  return {std::int64_t{dim} * ElementBytes(codec.element), 0};
}
UnitSize PerTokenHeadRow(const Codec&, int dim) { return {dim, 4}; }
UnitSize Int4Row(const Codec&, int dim) { return {dim / 2, 4}; }
UnitSize Q8Row(const Codec&, int dim) { return {dim, dim / kLlamaBlock * 2}; }
UnitSize Q4Row(const Codec&, int dim) { return {dim / 2, dim / kLlamaBlock * 2}; }
UnitSize Nvfp4Row(const Codec&, int dim) { return {dim / 2, dim / Nvfp4Block::kValues}; }
UnitSize MlaRow(const Codec&, int dim) {
  if (dim == 0) return {};
  return {MlaFp8::kCodeBytes, MlaFp8::kScaleBytes};
}
UnitSize Fp8PageUnit(const Codec& codec, int dim) {
  if (dim == 0) return {};
  return {std::int64_t{codec.group} * dim, 4};
}
UnitSize KiviUnit(const Codec& codec, int dim, int tokens) {
  const std::int64_t values = std::int64_t{dim} * tokens;
  const std::int64_t scale_and_minimum = codec.element == ElementType::kE4m3 ? 2 : 4;
  return {values * codec.bits / 8, values / codec.group * scale_and_minimum};
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
  return codec.element == ElementType::kE5m2 ? 0x1p-3 : 0x1p-4;
}
double E4m3Error(const Codec&) { return 0x1p-4; }
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
// Half the step from 4 to 6.
double Nvfp4Error(const Codec&) { return 1.0 + 0x1p-10; }
// Of rotated values half a step and, at the ends, what the zero point's rounding cuts off, and
// bf16's rounding; turned back, a mean of such errors.
double Int4Error(const Codec&) { return 1.07; }

constexpr float kNoLimit = std::numeric_limits<float>::max();
float AnyMagnitude(const Codec&) { return kNoLimit; }
float KiviMagnitude(const Codec& codec) {
  return codec.element == ElementType::kE4m3 ? kKiviE4m3Limit : kKiviLimit;
}
template <class Block>
float LlamaMagnitude(const Codec&) {
  return Block::kLargestMagnitude;
}
// The transform adds up all channels.
float Int4Magnitude(const Codec&) { return kNoLimit / kMaxHeadDim; }

constexpr CodecRow kRows[] = {
    {.id = CodecId::kRaw,
     .name = "raw",
     .group = "-",
     .scale = "none",
     .equal_to = "the source, or its cast: exact",
     .read_by = "all",
     .takes_scale = false,
     .unit_tokens = Always<1>,
     .unit_size = ElementRow,
     .dim_multiple = Always<1>,
     .error_budget = RawError,
     .largest_magnitude = AnyMagnitude},
    {.id = CodecId::kFp8,
     .name = "fp8",
     .group = "tensor or KV head",
     .scale = "fp32, known beforehand",
     .equal_to = "vLLM's reshape_and_cache_flash: exact",
     .read_by = "vLLM, SGLang",
     .takes_scale = true,
     .unit_tokens = Always<1>,
     .unit_size = ElementRow,
     .dim_multiple = Always<1>,
     .error_budget = Fp8Error,
     .largest_magnitude = AnyMagnitude},
    {.id = CodecId::kInt8PerTokenHead,
     .name = "int8_per_token_head",
     .group = "token x head",
     .scale = "fp32",
     .equal_to = "vLLM's cell: exact",
     .read_by = "vLLM TRITON_ATTN",
     .takes_scale = false,
     .unit_tokens = Always<1>,
     .unit_size = PerTokenHeadRow,
     .dim_multiple = Always<4>,
     .error_budget = Int8Error,
     .largest_magnitude = AnyMagnitude},
    {.id = CodecId::kFp8PerTokenHead,
     .name = "fp8_per_token_head",
     .group = "token x head",
     .scale = "fp32",
     .equal_to = "vLLM's cell: exact",
     .read_by = "vLLM TRITON_ATTN",
     .takes_scale = false,
     .unit_tokens = Always<1>,
     .unit_size = PerTokenHeadRow,
     .dim_multiple = Always<4>,
     .error_budget = Fp8RowError,
     .largest_magnitude = AnyMagnitude},
    {.id = CodecId::kKiviChannel,
     .name = "kivi_channel",
     .group = "channel x group of tokens",
     .scale = "fp16 or fp8_e4m3, and a minimum",
     .equal_to = "KIVI's, of fp16 sources: exact but for scales that underflow",
     .read_by = "none",
     .takes_scale = false,
     .unit_tokens = Group,
     .unit_size = KiviChannelUnit,
     .dim_multiple = Always<2>,
     .error_budget = KiviError,
     .largest_magnitude = KiviMagnitude},
    {.id = CodecId::kKiviToken,
     .name = "kivi_token",
     .group = "token x group of channels",
     .scale = "fp16 or fp8_e4m3, and a minimum",
     .equal_to = "KIVI's, of fp16 sources: exact but for scales that underflow",
     .read_by = "none",
     .takes_scale = false,
     .unit_tokens = Always<1>,
     .unit_size = KiviTokenUnit,
     .dim_multiple = Group,
     .error_budget = KiviError,
     .largest_magnitude = KiviMagnitude},
    {.id = CodecId::kLlamaQ8,
     .name = "q8_0",
     .group = "32 channels",
     .scale = "fp16",
     .equal_to = "llama.cpp's reference: exact but for d below 2^-128",
     .read_by = "llama.cpp",
     .takes_scale = false,
     .unit_tokens = Always<1>,
     .unit_size = Q8Row,
     .dim_multiple = Always<kLlamaBlock>,
     .error_budget = Q8Error,
     .largest_magnitude = LlamaMagnitude<LlamaQ8>},
    {.id = CodecId::kLlamaQ4,
     .name = "q4_0",
     .group = "32 channels",
     .scale = "fp16",
     .equal_to = "llama.cpp's reference: exact but for d below 2^-128",
     .read_by = "llama.cpp",
     .takes_scale = false,
     .unit_tokens = Always<1>,
     .unit_size = Q4Row,
     .dim_multiple = Always<kLlamaBlock>,
     .error_budget = Q4Error,
     .largest_magnitude = LlamaMagnitude<LlamaQ4>},
    {.id = CodecId::kNvfp4,
     .name = "nvfp4",
     .group = "16 channels",
     .scale = "fp8_e4m3, and an fp32 of all known beforehand",
     .equal_to = "vLLM's: scales within a code, 99.9 % of codes",
     .read_by = "vLLM FLASHINFER, scales moved",
     .takes_scale = true,
     .unit_tokens = Always<1>,
     .unit_size = Nvfp4Row,
     .dim_multiple = Always<Nvfp4Block::kValues>,
     .error_budget = Nvfp4Error,
     .largest_magnitude = AnyMagnitude},
    {.id = CodecId::kNvfp4FourOverSix,
     .name = "nvfp4_4over6",
     .group = "16 channels",
     .scale = "fp8_e4m3, and an fp32 of all known beforehand",
     .equal_to = "vLLM's: scales within a code, 99.9 % of codes",
     .read_by = "vLLM FLASHINFER, scales moved",
     .takes_scale = true,
     .unit_tokens = Always<1>,
     .unit_size = Nvfp4Row,
     .dim_multiple = Always<Nvfp4Block::kValues>,
     .error_budget = Nvfp4Error,
     .largest_magnitude = AnyMagnitude},
    {.id = CodecId::kInt4PerTokenHead,
     .name = "int4_per_token_head",
     .group = "token x head, rotated",
     .scale = "fp32 with the zero point in its lowest bits",
     .equal_to = "vLLM's cell: by error bound",
     .read_by = "vLLM TRITON_ATTN",
     .takes_scale = false,
     .unit_tokens = Always<1>,
     .unit_size = Int4Row,
     .dim_multiple = Always<2>,
     .error_budget = Int4Error,
     .largest_magnitude = Int4Magnitude},
    {.id = CodecId::kMlaFp8,
     .name = "fp8_ds_mla",
     .group = "128 latent channels",
     .scale = "fp32, a power of two",
     .equal_to = "vLLM's cell of 656 bytes: exact",
     .read_by = "vLLM FLASHMLA_SPARSE",
     .takes_scale = false,
     .unit_tokens = Always<1>,
     .unit_size = MlaRow,
     .dim_multiple = Always<MlaFp8::kDim>,
     .error_budget = E4m3Error,
     .largest_magnitude = AnyMagnitude},
    {.id = CodecId::kFp8Page,
     .name = "fp8_page",
     .group = "head x page",
     .scale = "fp32",
     .equal_to = "kvtier's own",
     .read_by = "none",
     .takes_scale = false,
     .unit_tokens = Group,
     .unit_size = Fp8PageUnit,
     .dim_multiple = Always<4>,
     .error_budget = E4m3Error,
     .largest_magnitude = AnyMagnitude},
};

}  // namespace

std::span<const CodecRow> CodecRows() { return kRows; }

const CodecRow& RowOf(CodecId id) {
  for (const CodecRow& row : kRows) {
    if (row.id == id) return row;
  }
  std::abort();  // a CodecId comes from this program or from a checked header
}

int DimMultiple(const Codec& codec) {
  const int multiple = RowOf(codec.id).dim_multiple(codec);
  return codec.rotation == Rotation::kNone ? multiple : std::max(multiple, 2);
}

bool StoresAsIs(const Codec& codec, ElementType type) {
  if (codec.rotation != Rotation::kNone) return false;
  switch (codec.id) {
    case CodecId::kRaw:
    case CodecId::kFp8:
      return codec.element == type;
    case CodecId::kLlamaQ8:
      return type == ElementType::kQ8;
    case CodecId::kLlamaQ4:
      return type == ElementType::kQ4;
    default:
      return false;
  }
}

float MagnitudeLimit(const Codec& codec, int dim) {
  const float limit = RowOf(codec.id).largest_magnitude(codec);
  if (codec.rotation == Rotation::kNone) return limit;
  const auto block = static_cast<float>(HadamardBlock(dim));
  return std::min(limit / std::sqrt(block), kNoLimit / block);
}

}  // namespace kvtier::kernels
