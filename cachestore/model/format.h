#pragma once

#include <string>
#include <vector>

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
  // Options, in parentheses behind the name.
  bool page_scale = false;                                  // kFp8: scale=page
  bool e4m3_scales = false;                                 // kKivi: scales=fp8_e4m3
  kernels::Rotation k_rotation = kernels::Rotation::kNone;  // k_rotation=hadamard

  friend bool operator==(const Format&, const Format&) = default;
};

// Parses a kv_cache_dtype: one of FormatNames(), "fp8" for fp8_e4m3, or
// kivi(k_bits,v_bits,group_size,residual_tokens); behind each, in parentheses, its options.
// INVALID_ARGUMENT lists what there is.
absl::StatusOr<Format> ParseFormat(const std::string& kv_cache_dtype);

// The formats that have a name, each by its shortest, in the order in which they are listed.
std::vector<std::string> FormatNames();

// The shortest name that ParseFormat takes for this format.
std::string FormatName(const Format& format);

// How one tensor, K or V of a layer, is stored in pages of `page_tokens`.
struct TensorFormat {
  kernels::Codec codec;
  ResidualRule residual;
};
TensorFormat KFormat(const Format& format, ElementType source, int page_tokens);
TensorFormat VFormat(const Format& format, ElementType source, int page_tokens);

}  // namespace kvtier::cachestore
