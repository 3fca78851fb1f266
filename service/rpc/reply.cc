#include "service/rpc/reply.h"

#include <algorithm>
#include <vector>

#include "cachestore/model/plan.h"

namespace kvtier::service {

v1::MemoryParts ToProto(const cachestore::MemoryParts& parts) {
  v1::MemoryParts out;
  out.set_codes(parts.use.codes);
  out.set_scales(parts.use.scales);
  out.set_residual(parts.use.residual);
  out.set_header(parts.use.header);
  out.set_slack(parts.slack);
  out.set_staging(parts.staging);
  out.set_free(parts.free);
  return out;
}

v1::MemoryParts ToProto(const cachestore::MemoryHeld& held) {
  return ToProto(cachestore::MemoryParts{.use = held.use, .slack = held.slack()});
}

v1::DType ToProto(kernels::ElementType type) {
  switch (type) {
    case kernels::ElementType::kBf16:
      return v1::DTYPE_BF16;
    case kernels::ElementType::kFp16:
      return v1::DTYPE_FP16;
    case kernels::ElementType::kFp32:
      return v1::DTYPE_FP32;
    case kernels::ElementType::kE4m3:
      return v1::DTYPE_FP8_E4M3;
    case kernels::ElementType::kE5m2:
      return v1::DTYPE_FP8_E5M2;
    case kernels::ElementType::kQ8:
      return v1::DTYPE_Q8_0;
    case kernels::ElementType::kQ4:
      return v1::DTYPE_Q4_0;
  }
  return v1::DTYPE_UNSPECIFIED;
}

v1::RopeState ToProto(cachestore::RopeState rope) {
  return rope == cachestore::RopeState::kAfter ? v1::ROPE_STATE_AFTER : v1::ROPE_STATE_BEFORE;
}

v1::ModelSpec ToProto(const cachestore::ModelSpec& spec) {
  v1::ModelSpec out;
  out.set_name(spec.name);
  out.set_revision(spec.revision);
  out.set_source_dtype(ToProto(spec.source));
  out.set_k_rope(ToProto(spec.k_rope));
  out.set_hash_block_tokens(static_cast<std::uint32_t>(spec.hash_block_tokens));
  for (const cachestore::LayerSpec& layer : spec.layers) {
    v1::LayerSpec& to = *out.add_layers();
    to.set_kind(layer.kind == cachestore::LayerKind::kFull ? v1::LAYER_KIND_FULL
                : layer.kind == cachestore::LayerKind::kSlidingWindow
                    ? v1::LAYER_KIND_SLIDING_WINDOW
                    : v1::LAYER_KIND_MLA);
    to.set_window(static_cast<std::uint32_t>(layer.window));
    to.set_kv_heads(static_cast<std::uint32_t>(layer.kv_heads));
    to.set_k_head_dim(static_cast<std::uint32_t>(layer.k_head_dim));
    to.set_v_head_dim(static_cast<std::uint32_t>(layer.v_head_dim));
  }
  return out;
}

v1::SequenceInfo ToProto(const cachestore::SequenceDescription& description) {
  const cachestore::Model& model = description.model->model();
  v1::SequenceInfo out;
  out.set_sequence(description.id);
  out.set_model_id(model.id);
  out.set_kv_cache_dtype(model.format);
  out.set_state(description.state == cachestore::SequenceState::kSealed ? v1::SEQUENCE_STATE_SEALED
                                                                        : v1::SEQUENCE_STATE_OPEN);
  out.set_committed_tokens(description.committed_tokens);
  out.set_evicted_tokens(description.evicted_tokens);
  *out.mutable_memory() = ToProto(description.held);
  out.set_source_bytes(cachestore::SourceBytes(model, description.committed_tokens));
  out.set_saturated_values(description.saturated_values);
  for (std::size_t i = 0; i < description.lowered_pages.size(); ++i) {
    if (description.lowered_pages[i] == 0) continue;
    v1::LoweredPages& lowered = *out.add_lowered();
    lowered.set_kv_cache_dtype(description.model->rungs()[i]->format);
    lowered.set_pages(static_cast<std::uint64_t>(description.lowered_pages[i]));
  }
  return out;
}

v1::LayerInfo ToProto(const cachestore::LayerDescription& layer,
                      const cachestore::LayerModel& model, int index) {
  v1::LayerInfo out;
  out.set_layer(static_cast<std::uint32_t>(index));
  out.set_kv_cache_dtype(model.format);
  out.set_received_tokens(layer.received_tokens);
  out.set_k_code_tokens(layer.k_code_tokens);
  out.set_v_code_tokens(layer.v_code_tokens);
  out.set_k_saturated_values(layer.k_saturated_values);
  out.set_v_saturated_values(layer.v_saturated_values);
  return out;
}

v1::SequenceManifest ManifestOf(const cachestore::SequenceReader& reader) {
  const cachestore::SequencePins& pins = reader.pins();
  v1::SequenceManifest out;
  out.set_model_id(pins.model->model().id);
  out.set_first_token(pins.first_token);
  out.set_num_tokens(pins.tokens);
  out.set_committed_tokens(pins.committed_tokens);
  out.set_sealed(pins.sealed);
  out.set_first_head(static_cast<std::uint32_t>(pins.shard.first_head));
  for (const cachestore::LayerOutput& layer : reader.layers()) {
    v1::LayerManifest& to = *out.add_layers();
    to.set_layer(static_cast<std::uint32_t>(layer.layer));
    if (layer.first_token != pins.first_token)
      to.set_first_token(static_cast<std::uint64_t>(layer.first_token));
    to.set_num_heads(static_cast<std::uint32_t>(layer.heads));
    to.set_k_head_dim(static_cast<std::uint32_t>(layer.k_dim));
    to.set_v_head_dim(static_cast<std::uint32_t>(layer.v_dim));
    to.set_dtype(ToProto(layer.element));
    to.mutable_k_scale()->Add(layer.k_scales.begin(), layer.k_scales.end());
    to.mutable_v_scale()->Add(layer.v_scales.begin(), layer.v_scales.end());
    to.mutable_q_scale()->Add(layer.q_scales.begin(), layer.q_scales.end());
    to.set_k_code_tokens(layer.k_code_tokens);
    to.set_v_code_tokens(layer.v_code_tokens);
    if (!reader.stored()) continue;
    const cachestore::LayerModel& model =
        pins.model->model().layers[static_cast<std::size_t>(layer.layer)];
    to.set_kv_cache_dtype(model.format);
    to.set_kv_heads(static_cast<std::uint32_t>(model.spec.kv_heads));
  }
  if (!reader.stored()) return out;
  const cachestore::Model& model = pins.model->model();
  out.set_page_tokens(static_cast<std::uint32_t>(model.page_tokens));
  out.set_k_rope(ToProto(model.request.spec.k_rope));
  return out;
}

void FillScales(const cachestore::ModelEntry& entry, v1::ScalesResponse& response) {
  const cachestore::Model& model = entry.model();
  const auto observed = entry.observed();
  response.set_model_id(model.id);
  response.set_name(model.request.spec.name);
  response.set_kv_cache_dtype(model.format);
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    const cachestore::LayerModel& layer = model.layers[i];
    v1::LayerObservation& to = *response.add_layers();
    to.set_layer(static_cast<std::uint32_t>(i));
    to.set_kv_cache_dtype(layer.format);
    const std::vector<float> k = layer.k.StatedScales();
    const std::vector<float> v = layer.v.StatedScales();
    to.mutable_k_scale()->Add(k.begin(), k.end());
    if (layer.v.dim() > 0) to.mutable_v_scale()->Add(v.begin(), v.end());
    to.mutable_q_scale()->Add(layer.q_scales.begin(), layer.q_scales.end());
    std::vector<cachestore::HeadMagnitudes> heads(static_cast<std::size_t>(layer.spec.kv_heads));
    if (!observed.empty()) heads = observed[i];
    std::int64_t tokens = heads.front().tokens;
    for (const cachestore::HeadMagnitudes& head : heads) {
      to.add_k_amax(head.k);
      if (layer.v.dim() > 0) to.add_v_amax(head.v);
      tokens = std::min(tokens, head.tokens);
    }
    to.set_tokens(static_cast<std::uint64_t>(tokens));
  }
}

}  // namespace kvtier::service
