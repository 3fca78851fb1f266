#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/element.h"

namespace kvtier::cachestore {

using kernels::ElementType;

enum class LayerKind { kFull, kSlidingWindow, kMla };
enum class RopeState { kAfter, kBefore };

// The shape of one layer's K and V. Layers of a model may differ.
struct LayerSpec {
  LayerKind kind = LayerKind::kFull;
  int window = 0;  // tokens; sliding-window layers only
  int kv_heads = 0;
  int k_head_dim = 0;
  int v_head_dim = 0;  // 0 for MLA only
};

struct ModelSpec {
  std::string name;
  std::string revision;
  ElementType source = ElementType::kBf16;
  RopeState k_rope = RopeState::kAfter;
  int hash_block_tokens = 16;
  std::vector<LayerSpec> layers;
};

// Which tokens a sliding-window layer keeps.
enum class Retention {
  kAll,
  kWindow,  // the pages that its window sees (Model::windows); what is behind them goes
};

// How a model's layers are stored: a format, the layers that keep the source dtype instead, and
// what is kept of them.
struct FormatPolicy {
  std::string kv_cache_dtype = "auto";
  std::vector<std::string> skip_layers;  // indices and/or "sliding_window"
  Retention retention = Retention::kAll;
};

// Scales of one layer: empty, one for all heads, or one a head. Q's are kept for readers only.
struct LayerScales {
  int layer = 0;
  std::vector<float> k;
  std::vector<float> v;
  std::vector<float> q;
};

// What a client asks for. The model id is the fingerprint of all of it but `scales_source` and
// `max_tokens`.
struct ModelRequest {
  ModelSpec spec;
  FormatPolicy policy;
  int page_tokens = 0;  // 0: the server's default, rounded up to what the formats need
  std::vector<LayerScales> scales;
  std::string scales_source;
  std::int64_t max_tokens = 0;  // 0: kDefaultMaxTokens
};

// Of one model.
inline constexpr int kMaxLayers = 1024;
inline constexpr int kMaxHeads = 1024;  // of a layer
inline constexpr int kMaxWindows = 8;   // different ones, under Retention::kWindow
inline constexpr std::int64_t kDefaultMaxTokens = 32768;

// Everything that can be said of a request before its format is known: names, counts, shapes.
// INVALID_ARGUMENT.
absl::Status CheckSpec(const ModelSpec& spec);

// 32 hexadecimal digits, the same in every process and version for the same request.
std::string ModelIdOf(const ModelRequest& request);

// The path of the first field in which two requests differ, "policy.kv_cache_dtype" say; empty
// where they are one model.
std::string FirstDifference(const ModelRequest& a, const ModelRequest& b);

}  // namespace kvtier::cachestore
