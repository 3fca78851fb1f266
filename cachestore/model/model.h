#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cachestore/model/format.h"
#include "cachestore/model/model_spec.h"
#include "cachestore/model/part_layout.h"

namespace kvtier::cachestore {

// K or V of one layer: its pages, its residual, its scales.
struct TensorModel {
  PartLayout layout;
  ResidualRule residual;
  ElementType source = ElementType::kBf16;
  std::vector<float> scales;  // FP8 with a scale known beforehand: one a head. Empty elsewhere
  bool per_head_scales = false;

  // One for all heads, or one a head; empty where the format takes none.
  std::vector<float> StatedScales() const {
    if (scales.empty() || per_head_scales) return scales;
    return {scales.front()};
  }

  // 0 where a layer has no such tensor (the V of MLA).
  int dim() const { return layout.dim; }
  int heads() const { return layout.heads; }
  std::int64_t source_row_bytes() const { return kernels::RowBytes(source, layout.dim); }
  std::int64_t residual_slot_use() const {
    return residual.capacity() * source_row_bytes() * layout.heads;
  }
  std::int64_t residual_slot_bytes() const { return AlignUp(residual_slot_use()); }
};

struct LayerModel {
  LayerSpec spec;
  std::string format;  // as resolved for this layer
  TensorModel k;
  TensorModel v;
  std::vector<float> q_scales;  // for readers: none, one, or one a head
  bool unit_scale = false;      // takes scales, and all are 1.0
};

// A model as registered: what was asked for and what that comes to. Immutable.
struct Model {
  std::string id;
  ModelRequest request;
  std::string format;  // the policy's format as resolved
  int page_tokens = 0;
  std::int64_t max_tokens = kDefaultMaxTokens;
  std::vector<LayerModel> layers;
  std::int64_t source_bytes_per_token = 0;
  int unit_scale_layers = 0;
  int scaled_layers = 0;  // whose format takes scales
  std::string scales_line;
  std::vector<std::string> notices;
};

// Resolves a request. `default_page_tokens` stands in where it asks for none. INVALID_ARGUMENT
// names the field.
absl::StatusOr<std::shared_ptr<const Model>> ResolveModel(ModelRequest request,
                                                          int default_page_tokens);

}  // namespace kvtier::cachestore
