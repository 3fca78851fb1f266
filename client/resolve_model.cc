#include "client/resolve_model.h"

#include <fmt/format.h>

#include <limits>
#include <utility>

#include "cachestore/base/status_macros.h"

namespace kvtier::client {
namespace {

using kernels::ElementType;

constexpr std::pair<v1::DType, ElementType> kTypes[] = {
    {v1::DTYPE_BF16, ElementType::kBf16},     {v1::DTYPE_FP16, ElementType::kFp16},
    {v1::DTYPE_FP32, ElementType::kFp32},     {v1::DTYPE_FP8_E4M3, ElementType::kE4m3},
    {v1::DTYPE_FP8_E5M2, ElementType::kE5m2}, {v1::DTYPE_Q8_0, ElementType::kQ8},
    {v1::DTYPE_Q4_0, ElementType::kQ4}};

cachestore::RopeState RopeOf(v1::RopeState rope) {
  return rope == v1::ROPE_STATE_BEFORE ? cachestore::RopeState::kBefore
                                       : cachestore::RopeState::kAfter;
}

}  // namespace

cachestore::LayerSpec LayerSpecOf(const v1::LayerSpec& layer) {
  cachestore::LayerSpec spec{.window = static_cast<int>(layer.window()),
                             .kv_heads = static_cast<int>(layer.kv_heads()),
                             .k_head_dim = static_cast<int>(layer.k_head_dim()),
                             .v_head_dim = static_cast<int>(layer.v_head_dim())};
  if (layer.kind() == v1::LAYER_KIND_SLIDING_WINDOW) {
    spec.kind = cachestore::LayerKind::kSlidingWindow;
  } else if (layer.kind() == v1::LAYER_KIND_MLA) {
    spec.kind = cachestore::LayerKind::kMla;
  }
  return spec;
}

std::optional<ElementType> ElementTypeOf(v1::DType dtype) {
  for (const auto& [wire, type] : kTypes) {
    if (wire == dtype) return type;
  }
  return std::nullopt;
}

v1::DType DtypeOf(ElementType type) {
  for (const auto& [wire, element] : kTypes) {
    if (element == type) return wire;
  }
  return v1::DTYPE_UNSPECIFIED;
}

absl::StatusOr<std::shared_ptr<const cachestore::Model>> ResolveRegistered(
    const v1::RegisterModelRequest& request, const v1::RegisterModelResponse& reply) {
  cachestore::ModelRequest model;
  const v1::ModelSpec& spec = request.spec();
  model.spec.name = spec.name();
  model.spec.revision = spec.revision();
  model.spec.source = ElementTypeOf(spec.source_dtype()).value_or(ElementType::kBf16);
  model.spec.k_rope = RopeOf(spec.k_rope());
  if (spec.hash_block_tokens() != 0)
    model.spec.hash_block_tokens = static_cast<int>(spec.hash_block_tokens());
  for (const v1::LayerSpec& layer : spec.layers()) model.spec.layers.push_back(LayerSpecOf(layer));
  const v1::FormatPolicy& policy = request.policy();
  if (!policy.kv_cache_dtype().empty()) model.policy.kv_cache_dtype = policy.kv_cache_dtype();
  if (policy.retention() == v1::RETENTION_WINDOW)
    model.policy.retention = cachestore::Retention::kWindow;
  model.policy.skip_layers.assign(policy.kv_cache_dtype_skip_layers().begin(),
                                  policy.kv_cache_dtype_skip_layers().end());
  model.page_tokens = static_cast<int>(request.page_tokens());
  for (const v1::LayerScales& scales : request.scales()) {
    model.scales.push_back({.layer = static_cast<int>(scales.layer()),
                            .k = {scales.k_scale().begin(), scales.k_scale().end()},
                            .v = {scales.v_scale().begin(), scales.v_scale().end()},
                            .q = {scales.q_scale().begin(), scales.q_scale().end()}});
  }
  KVT_ASSIGN_OR_RETURN(
      std::shared_ptr<const cachestore::Model> resolved,
      cachestore::ResolveModel(std::move(model), static_cast<int>(reply.page_tokens())));
  if (resolved->id == reply.model_id()) return resolved;
  return absl::FailedPreconditionError(fmt::format(
      "the server names the model {}, this client {}: it can't encode for it; send values",
      reply.model_id(), resolved->id));
}

absl::StatusOr<std::shared_ptr<const cachestore::Model>> ResolveStoredLayer(
    const v1::SequenceManifest& sequence, const v1::LayerManifest& layer) {
  constexpr std::uint32_t kMost = std::numeric_limits<int>::max();
  const std::uint32_t numbers[] = {layer.kv_heads(), layer.k_head_dim(), layer.v_head_dim(),
                                   sequence.page_tokens()};
  for (const std::uint32_t number : numbers) {
    if (number > kMost) return absl::DataLossError(fmt::format("{} is no size", number));
  }
  cachestore::ModelRequest model;
  model.spec.name = "stored";
  model.spec.source = ElementTypeOf(layer.dtype()).value_or(ElementType::kBf16);
  model.spec.k_rope = RopeOf(sequence.k_rope());
  model.spec.layers = {
      {.kind = layer.v_head_dim() == 0 ? cachestore::LayerKind::kMla : cachestore::LayerKind::kFull,
       .kv_heads = static_cast<int>(layer.kv_heads()),
       .k_head_dim = static_cast<int>(layer.k_head_dim()),
       .v_head_dim = static_cast<int>(layer.v_head_dim())}};
  model.policy.kv_cache_dtype = layer.kv_cache_dtype();
  model.page_tokens = static_cast<int>(sequence.page_tokens());
  return cachestore::ResolveModel(std::move(model), 0);
}

}  // namespace kvtier::client
