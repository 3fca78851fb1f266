#pragma once

#include <algorithm>
#include <cctype>
#include <string>
#include <utility>

#include "cachestore/model/format.h"
#include "cachestore/model/model_spec.h"
#include "cachestore/model/part_layout.h"

// Small models for tests.
namespace kvtier::cachestore::testing {

// As a test's name may have it.
inline std::string TestNameOf(std::string format) {
  for (char& c : format) c = std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  return format;
}

struct Shape {
  int layers = 1;
  int heads = 1;
  int dim = 32;
};

inline ModelSpec UniformSpec(const Shape& shape, ElementType source = ElementType::kBf16) {
  ModelSpec spec{.name = "model", .revision = "main", .source = source, .layers = {}};
  for (int i = 0; i < shape.layers; ++i) {
    spec.layers.push_back(
        {.kv_heads = shape.heads, .k_head_dim = shape.dim, .v_head_dim = shape.dim});
  }
  return spec;
}

// Layers that differ: in heads, in dims, K and V of one dim each, one without V.
inline ModelSpec IrregularSpec(ElementType source = ElementType::kBf16) {
  ModelSpec spec{.name = "irregular", .revision = "1", .source = source, .layers = {}};
  spec.layers = {
      {.kv_heads = 2, .k_head_dim = 40, .v_head_dim = 32},
      {.kv_heads = 2, .k_head_dim = 32, .v_head_dim = 64},
      {.kind = LayerKind::kSlidingWindow,
       .window = 64,
       .kv_heads = 4,
       .k_head_dim = 32,
       .v_head_dim = 32},
      {.kind = LayerKind::kMla, .kv_heads = 1, .k_head_dim = 72, .v_head_dim = 0},
  };
  return spec;
}

// Head dims rounded up to what the format takes; all layers MLA's where it takes no others.
inline void SuitTo(const std::string& kv_cache_dtype, ModelSpec& spec) {
  const Format format = ParseFormat(kv_cache_dtype).value();
  const kernels::Codec k = KFormat(format, spec.source, 16).codec;
  const kernels::Codec v = VFormat(format, spec.source, 16).codec;
  for (LayerSpec& layer : spec.layers) {
    if (k.id == kernels::CodecId::kMlaFp8)
      layer = {.kind = LayerKind::kMla, .kv_heads = layer.kv_heads, .k_head_dim = 576};
    layer.k_head_dim = static_cast<int>(AlignUp(layer.k_head_dim, kernels::DimMultiple(k)));
    layer.v_head_dim = static_cast<int>(AlignUp(layer.v_head_dim, kernels::DimMultiple(v)));
  }
}

// A magnitude that every layer takes, rounded to any source type, and no more than the test data's
// own.
inline float LargestFor(const std::string& kv_cache_dtype, const ModelSpec& spec) {
  const Format format = ParseFormat(kv_cache_dtype).value();
  float largest = 30000.0f;
  for (const LayerSpec& layer : spec.layers) {
    const kernels::Codec k = KFormat(format, spec.source, 16).codec;
    const kernels::Codec v = VFormat(format, spec.source, 16).codec;
    largest = std::min(largest, 0.99f * kernels::MagnitudeLimit(k, layer.k_head_dim));
    largest = std::min(largest, 0.99f * kernels::MagnitudeLimit(v, layer.v_head_dim));
  }
  return largest;
}

inline ModelRequest RequestOf(ModelSpec spec, const std::string& kv_cache_dtype,
                              int page_tokens = 0) {
  ModelRequest request;
  request.spec = std::move(spec);
  request.policy.kv_cache_dtype = kv_cache_dtype;
  request.page_tokens = page_tokens;
  return request;
}

}  // namespace kvtier::cachestore::testing
