#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "cachestore/model/model_spec.h"
#include "cachestore/model/residual_rule.h"
#include "kernels/codec.h"

namespace kvtier::cachestore {

// A storage format as its name says it, before any layer is known.
struct Format {
  enum class Kind { kSource, kCast, kFp8, kPlain, kKivi };

  Kind kind = Kind::kSource;
  ElementType element = ElementType::kBf16;         // kCast, kFp8
  kernels::CodecId codec = kernels::CodecId::kRaw;  // kPlain: a codec without parameters
  int k_bits = 0, v_bits = 0;                       // kKivi
  int group = 0;
  int residual_tokens = 0;

  friend bool operator==(const Format&, const Format&) = default;
};

// Parses a kv_cache_dtype: auto, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2, int8_per_token_head,
// fp8_per_token_head, q8_0, q4_0, kivi2, kivi4, k4v2,
// kivi(k_bits,v_bits,group_size,residual_tokens). INVALID_ARGUMENT lists what there is.
absl::StatusOr<Format> ParseFormat(const std::string& kv_cache_dtype);

// The shortest name that ParseFormat takes for this format.
std::string FormatName(const Format& format);

// How one tensor, K or V of a layer, is stored.
struct TensorFormat {
  kernels::Codec codec;
  ResidualRule residual;
};
TensorFormat KFormat(const Format& format, ElementType source);
TensorFormat VFormat(const Format& format, ElementType source);

}  // namespace kvtier::cachestore
