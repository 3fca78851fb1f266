#pragma once

#include <string>
#include <utility>

#include "cachestore/model/model_spec.h"

// Small models for tests.
namespace kvtier::cachestore::testing {

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

inline ModelRequest RequestOf(ModelSpec spec, const std::string& kv_cache_dtype,
                              int page_tokens = 0) {
  ModelRequest request;
  request.spec = std::move(spec);
  request.policy.kv_cache_dtype = kv_cache_dtype;
  request.page_tokens = page_tokens;
  return request;
}

}  // namespace kvtier::cachestore::testing
