#include "cachestore/model/model_spec.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/base/text.h"
#include "kernels/codec.h"

namespace kvtier::cachestore {
namespace {

using nlohmann::json;

// Of all layers together: a sequence keeps 16 bytes of index for each, outside the budget.
constexpr std::int64_t kMaxHeadsTogether = std::int64_t{1} << 16;
constexpr std::size_t kMaxName = 256;

const char* KindName(LayerKind kind) {
  switch (kind) {
    case LayerKind::kFull:
      return "full";
    case LayerKind::kSlidingWindow:
      return "sliding_window";
    case LayerKind::kMla:
      return "mla";
  }
  return "unknown";
}

absl::Status CheckRange(const std::string& field, std::int64_t got, std::int64_t low,
                        std::int64_t high) {
  if (got >= low && got <= high) return absl::OkStatus();
  return Error(Reason::kInvalidField,
               fmt::format("{} is {}; want {} to {}", field, got, low, high));
}

absl::Status CheckLayer(const LayerSpec& layer, std::size_t index) {
  const auto field = [&](const char* name) {
    return fmt::format("spec.layers[{}].{}", index, name);
  };
  KVT_RETURN_IF_ERROR(CheckRange(field("kv_heads"), layer.kv_heads, 1, kMaxHeads));
  KVT_RETURN_IF_ERROR(CheckRange(field("k_head_dim"), layer.k_head_dim, 1, kernels::kMaxHeadDim));
  const bool mla = layer.kind == LayerKind::kMla;
  KVT_RETURN_IF_ERROR(
      CheckRange(field("v_head_dim"), layer.v_head_dim, mla ? 0 : 1, kernels::kMaxHeadDim));
  const bool windowed = layer.kind == LayerKind::kSlidingWindow;
  if (windowed) return CheckRange(field("window"), layer.window, 1, 1 << 30);
  if (layer.window == 0) return absl::OkStatus();
  return Error(Reason::kInvalidField,
               fmt::format("{} is {} on a {} layer; want 0, or kind sliding_window",
                           field("window"), layer.window, KindName(layer.kind)));
}

// The request with every default written out, so that asking for a default and leaving it out are
// one model. Object keys are ordered by name and floats are written as their bits: the text is the
// same everywhere.
json Canonical(const ModelRequest& request) {
  json layers = json::array();
  for (const LayerSpec& layer : request.spec.layers) {
    layers.push_back({{"kind", KindName(layer.kind)},
                      {"window", layer.window},
                      {"kv_heads", layer.kv_heads},
                      {"k_head_dim", layer.k_head_dim},
                      {"v_head_dim", layer.v_head_dim}});
  }
  json scales = json::array();
  for (const LayerScales& layer : request.scales) {
    json k = json::array(), v = json::array(), q = json::array();
    for (const float x : layer.k) k.push_back(kernels::Bits(x));
    for (const float x : layer.v) v.push_back(kernels::Bits(x));
    for (const float x : layer.q) q.push_back(kernels::Bits(x));
    scales.push_back({{"layer", layer.layer}, {"k", k}, {"v", v}});
    if (!q.empty()) scales.back()["q"] = q;
  }
  json policy = {{"kv_cache_dtype", request.policy.kv_cache_dtype},
                 {"kv_cache_dtype_skip_layers", request.policy.skip_layers}};
  // Ids from before there was a choice stay.
  if (request.policy.retention == Retention::kWindow) policy["retention"] = "window";
  return {{"spec",
           {{"name", request.spec.name},
            {"revision", request.spec.revision},
            {"source_dtype", kernels::ElementName(request.spec.source)},
            {"k_rope", request.spec.k_rope == RopeState::kAfter ? "after" : "before"},
            {"hash_block_tokens", request.spec.hash_block_tokens},
            {"layers", layers}}},
          {"policy", policy},
          {"page_tokens", request.page_tokens},
          {"scales", scales}};
}

}  // namespace

absl::Status CheckSpec(const ModelSpec& spec) {
  KVT_RETURN_IF_ERROR(CheckText("spec.name", spec.name, 1, kMaxName));
  KVT_RETURN_IF_ERROR(CheckText("spec.revision", spec.revision, 0, kMaxName));
  KVT_RETURN_IF_ERROR(CheckRange("spec.hash_block_tokens", spec.hash_block_tokens, 1, 4096));
  KVT_RETURN_IF_ERROR(CheckRange("number of spec.layers",
                                 static_cast<std::int64_t>(spec.layers.size()), 1, kMaxLayers));
  std::int64_t heads = 0;
  for (std::size_t i = 0; i < spec.layers.size(); ++i) {
    KVT_RETURN_IF_ERROR(CheckLayer(spec.layers[i], i));
    heads += spec.layers[i].kv_heads;
  }
  return CheckRange("kv_heads of all spec.layers together", heads, 1, kMaxHeadsTogether);
}

std::string ModelIdOf(const ModelRequest& request) {
  const std::string text = Canonical(request).dump();
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::string FirstDifference(const ModelRequest& a, const ModelRequest& b) {
  const json patch = json::diff(Canonical(a), Canonical(b));
  if (patch.empty()) return {};
  std::string path = patch.front().at("path").get<std::string>().substr(1);
  std::replace(path.begin(), path.end(), '/', '.');
  return path;
}

}  // namespace kvtier::cachestore
