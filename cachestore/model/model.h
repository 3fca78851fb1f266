#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
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

// A window that sliding-window layers have under Retention::kWindow, and which pages they keep of a
// sequence: those that it sees of the newest token, and of two lengths before that. Whoever asks
// for a prompt again computes its last token anew, and hits a hash block before the end; who
// appends it again shares pages that are final in every layer, and begins where these end.
struct Window {
  int tokens = 0;
  int hash_block_tokens = 0;
  std::vector<std::size_t> layers;  // that have it

  // Of `length` tokens, the page of the first that is seen.
  std::int64_t FirstSeenPage(std::int64_t length, int page_tokens) const {
    return std::max<std::int64_t>(0, length - tokens) / page_tokens;
  }
  // The first page that is kept, where the first `pages` are final.
  std::int64_t FirstKeptPage(std::int64_t length, std::int64_t pages, int page_tokens) const {
    const std::int64_t shared = std::min(pages, length / page_tokens) * page_tokens;
    return FirstSeenPage(std::min(length - hash_block_tokens, shared), page_tokens);
  }
};

struct LayerModel {
  LayerSpec spec;
  std::string format;  // as resolved for this layer
  TensorModel k;
  TensorModel v;
  std::vector<float> q_scales;  // for readers: none, one, or one a head
  bool unit_scale = false;      // takes scales, and all are 1.0
  int window_index = -1;        // of Model::windows; -1: it keeps every token

  // Of one token.
  std::int64_t source_bytes() const {
    return (k.source_row_bytes() + v.source_row_bytes()) * spec.kv_heads;
  }
};

// A model as registered: what was asked for and what that comes to. Immutable.
struct Model {
  std::string id;
  ModelRequest request;
  std::string format;  // the policy's format as resolved
  int page_tokens = 0;
  std::int64_t max_tokens = kDefaultMaxTokens;
  std::vector<LayerModel> layers;
  std::vector<Window> windows;  // under Retention::kWindow, each once; else none
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
