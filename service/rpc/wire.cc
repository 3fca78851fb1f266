#include "service/rpc/wire.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/base/text.h"

namespace kvtier::service {
namespace {

using cachestore::Error;
using cachestore::Reason;
using kernels::ElementType;

constexpr std::size_t kMaxNamespaceBytes = 128;
constexpr std::size_t kMaxSequenceBytes = 512;
constexpr std::size_t kMaxIdentifierBytes = 64;
constexpr std::size_t kMaxSourceBytes = 256;
constexpr int kMaxSkipLayers = 2048;
constexpr std::uint64_t kMaxTokens = std::uint64_t{1} << 32;

absl::StatusOr<int> IntFrom(std::uint32_t value, const std::string& field) {
  if (value <= static_cast<std::uint32_t>(std::numeric_limits<int>::max()))
    return static_cast<int>(value);
  return Refuse(
      fmt::format("{} is {}; want at most {}", field, value, std::numeric_limits<int>::max()));
}

// Values are quoted in errors and kept with the model: both are bounded.
absl::Status CheckLength(const std::string& value, const char* field, std::size_t most) {
  if (value.size() <= most) return absl::OkStatus();
  return Refuse(fmt::format("{} has {} bytes; want at most {}", field, value.size(), most));
}

absl::Status CheckPolicy(const v1::FormatPolicy& policy) {
  KVT_RETURN_IF_ERROR(
      CheckLength(policy.kv_cache_dtype(), "policy.kv_cache_dtype", kMaxIdentifierBytes));
  if (policy.kv_cache_dtype_skip_layers_size() > kMaxSkipLayers) {
    return Refuse(fmt::format("policy.kv_cache_dtype_skip_layers has {} entries; want at most {}",
                              policy.kv_cache_dtype_skip_layers_size(), kMaxSkipLayers));
  }
  for (const std::string& item : policy.kv_cache_dtype_skip_layers()) {
    KVT_RETURN_IF_ERROR(
        CheckLength(item, "policy.kv_cache_dtype_skip_layers", kMaxIdentifierBytes));
  }
  return absl::OkStatus();
}

absl::StatusOr<ElementType> SourceFrom(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_BF16:
      return ElementType::kBf16;
    case v1::DTYPE_FP16:
      return ElementType::kFp16;
    case v1::DTYPE_FP32:
      return ElementType::kFp32;
    case v1::DTYPE_FP8_E4M3:
      return ElementType::kE4m3;
    case v1::DTYPE_FP8_E5M2:
      return ElementType::kE5m2;
    case v1::DTYPE_Q8_0:
      return ElementType::kQ8;
    case v1::DTYPE_Q4_0:
      return ElementType::kQ4;
    default:
      return Refuse(
          fmt::format("spec.source_dtype is {}; want DTYPE_BF16, DTYPE_FP16, DTYPE_FP32, "
                      "DTYPE_FP8_E4M3, DTYPE_FP8_E5M2, DTYPE_Q8_0 or DTYPE_Q4_0",
                      static_cast<int>(dtype)));
  }
}

absl::StatusOr<cachestore::LayerKind> KindFrom(v1::LayerKind kind, int index) {
  switch (kind) {
    case v1::LAYER_KIND_UNSPECIFIED:
    case v1::LAYER_KIND_FULL:
      return cachestore::LayerKind::kFull;
    case v1::LAYER_KIND_SLIDING_WINDOW:
      return cachestore::LayerKind::kSlidingWindow;
    case v1::LAYER_KIND_MLA:
      return cachestore::LayerKind::kMla;
    default:
      return Refuse(fmt::format("spec.layers[{}].kind is {}; want FULL, SLIDING_WINDOW or MLA",
                                index, static_cast<int>(kind)));
  }
}

absl::StatusOr<cachestore::LayerSpec> LayerFrom(const v1::LayerSpec& layer, int index) {
  cachestore::LayerSpec spec;
  KVT_ASSIGN_OR_RETURN(spec.kind, KindFrom(layer.kind(), index));
  const std::string field = fmt::format("spec.layers[{}].", index);
  KVT_ASSIGN_OR_RETURN(spec.window, IntFrom(layer.window(), field + "window"));
  KVT_ASSIGN_OR_RETURN(spec.kv_heads, IntFrom(layer.kv_heads(), field + "kv_heads"));
  KVT_ASSIGN_OR_RETURN(spec.k_head_dim, IntFrom(layer.k_head_dim(), field + "k_head_dim"));
  KVT_ASSIGN_OR_RETURN(spec.v_head_dim, IntFrom(layer.v_head_dim(), field + "v_head_dim"));
  return spec;
}

absl::StatusOr<cachestore::RopeState> RopeFrom(v1::RopeState rope) {
  if (rope == v1::ROPE_STATE_UNSPECIFIED || rope == v1::ROPE_STATE_AFTER)
    return cachestore::RopeState::kAfter;
  if (rope == v1::ROPE_STATE_BEFORE) return cachestore::RopeState::kBefore;
  return Refuse(fmt::format("spec.k_rope is {}; want ROPE_STATE_AFTER or ROPE_STATE_BEFORE",
                            static_cast<int>(rope)));
}

absl::StatusOr<cachestore::Retention> RetentionFrom(v1::Retention retention) {
  if (retention == v1::RETENTION_UNSPECIFIED || retention == v1::RETENTION_ALL)
    return cachestore::Retention::kAll;
  if (retention == v1::RETENTION_WINDOW) return cachestore::Retention::kWindow;
  return Refuse(fmt::format("policy.retention is {}; want RETENTION_ALL or RETENTION_WINDOW",
                            static_cast<int>(retention)));
}

absl::StatusOr<bool> Saturates(v1::NonFinitePolicy policy) {
  if (policy == v1::NON_FINITE_POLICY_UNSPECIFIED || policy == v1::NON_FINITE_POLICY_REFUSE)
    return false;
  if (policy == v1::NON_FINITE_POLICY_SATURATE) return true;
  return Refuse(
      fmt::format("non_finite is {}; want NON_FINITE_POLICY_REFUSE or NON_FINITE_POLICY_SATURATE",
                  static_cast<int>(policy)));
}

absl::StatusOr<bool> IsHnd(v1::Layout layout) {
  if (layout == v1::LAYOUT_UNSPECIFIED || layout == v1::LAYOUT_NHD) return false;
  if (layout == v1::LAYOUT_HND) return true;
  return Refuse(
      fmt::format("layout is {}; want LAYOUT_NHD or LAYOUT_HND", static_cast<int>(layout)));
}

absl::StatusOr<cachestore::Shard> ShardFrom(std::uint32_t first_layer, std::uint32_t num_layers,
                                            std::uint32_t first_head, std::uint32_t num_heads) {
  cachestore::Shard shard;
  KVT_ASSIGN_OR_RETURN(shard.first_layer, IntFrom(first_layer, "first_layer"));
  KVT_ASSIGN_OR_RETURN(shard.num_layers, IntFrom(num_layers, "num_layers"));
  KVT_ASSIGN_OR_RETURN(shard.first_head, IntFrom(first_head, "first_head"));
  KVT_ASSIGN_OR_RETURN(shard.num_heads, IntFrom(num_heads, "num_heads"));
  return shard;
}

}  // namespace

absl::Status Refuse(const std::string& message) { return Error(Reason::kInvalidField, message); }

absl::StatusOr<std::string> NamespaceFrom(const std::string& name_space) {
  KVT_ASSIGN_OR_RETURN(cachestore::SequenceKey key, KeyFrom(name_space, "any"));
  return std::move(key.name_space);
}

absl::StatusOr<cachestore::SequenceKey> KeyFrom(const std::string& name_space,
                                                const std::string& sequence, const char* field) {
  cachestore::SequenceKey key{name_space.empty() ? "default" : name_space, sequence};
  KVT_RETURN_IF_ERROR(cachestore::CheckText("namespace", key.name_space, 1, kMaxNamespaceBytes));
  KVT_RETURN_IF_ERROR(cachestore::CheckText(field, key.id, 1, kMaxSequenceBytes));
  return key;
}

absl::StatusOr<std::int64_t> TokensFrom(std::uint64_t tokens, const char* field) {
  if (tokens < kMaxTokens) return static_cast<std::int64_t>(tokens);
  return Refuse(fmt::format("{} is {}; want less than {}", field, tokens, kMaxTokens));
}

absl::StatusOr<cachestore::ModelRequest> ModelRequestFrom(const v1::RegisterModelRequest& request) {
  cachestore::ModelRequest model;
  const v1::ModelSpec& spec = request.spec();
  model.spec.name = spec.name();
  model.spec.revision = spec.revision();
  KVT_ASSIGN_OR_RETURN(model.spec.source, SourceFrom(spec.source_dtype()));
  KVT_ASSIGN_OR_RETURN(model.spec.k_rope, RopeFrom(spec.k_rope()));
  if (spec.hash_block_tokens() != 0) {
    KVT_ASSIGN_OR_RETURN(model.spec.hash_block_tokens,
                         IntFrom(spec.hash_block_tokens(), "spec.hash_block_tokens"));
  }
  for (int i = 0; i < spec.layers_size(); ++i) {
    KVT_ASSIGN_OR_RETURN(const cachestore::LayerSpec layer, LayerFrom(spec.layers(i), i));
    model.spec.layers.push_back(layer);
  }
  KVT_RETURN_IF_ERROR(CheckPolicy(request.policy()));
  KVT_RETURN_IF_ERROR(CheckLength(request.scales_source(), "scales_source", kMaxSourceBytes));
  if (!request.policy().kv_cache_dtype().empty())
    model.policy.kv_cache_dtype = request.policy().kv_cache_dtype();
  KVT_ASSIGN_OR_RETURN(model.policy.retention, RetentionFrom(request.policy().retention()));
  model.policy.skip_layers.assign(request.policy().kv_cache_dtype_skip_layers().begin(),
                                  request.policy().kv_cache_dtype_skip_layers().end());
  KVT_ASSIGN_OR_RETURN(model.page_tokens, IntFrom(request.page_tokens(), "page_tokens"));
  for (const v1::LayerScales& scales : request.scales()) {
    cachestore::LayerScales& layer = model.scales.emplace_back();
    KVT_ASSIGN_OR_RETURN(layer.layer, IntFrom(scales.layer(), "scales.layer"));
    layer.k.assign(scales.k_scale().begin(), scales.k_scale().end());
    layer.v.assign(scales.v_scale().begin(), scales.v_scale().end());
    layer.q.assign(scales.q_scale().begin(), scales.q_scale().end());
  }
  model.scales_source = request.scales_source();
  KVT_ASSIGN_OR_RETURN(model.max_tokens, TokensFrom(request.max_tokens(), "max_tokens"));
  return model;
}

cachestore::Prompt PromptFrom(const v1::Prompt& prompt) {
  cachestore::Prompt out;
  out.salt = prompt.salt();
  out.adapter = prompt.adapter();
  out.token_ids.assign(prompt.token_ids().begin(), prompt.token_ids().end());
  out.block_hashes.assign(prompt.block_hashes().begin(), prompt.block_hashes().end());
  for (const v1::ExtraKey& extra : prompt.extra_keys())
    out.extra_keys.push_back({extra.block(), extra.key()});
  return out;
}

absl::StatusOr<cachestore::PinKind> PinKindFrom(v1::PinKind kind) {
  switch (kind) {
    case v1::PIN_KIND_UNSPECIFIED:
    case v1::PIN_KIND_SOFT:
      return cachestore::PinKind::kSoft;
    case v1::PIN_KIND_HARD:
      return cachestore::PinKind::kHard;
    default:
      return Refuse(fmt::format("kind is {}; want SOFT or HARD", static_cast<int>(kind)));
  }
}

absl::StatusOr<cachestore::Pressure> PressureFrom(v1::Pressure pressure) {
  switch (pressure) {
    case v1::PRESSURE_UNSPECIFIED:
    case v1::PRESSURE_EVICT:
      return cachestore::Pressure::kEvict;
    case v1::PRESSURE_LADDER:
      return cachestore::Pressure::kLadder;
    default:
      return Refuse(
          fmt::format("pressure is {}; want EVICT or LADDER", static_cast<int>(pressure)));
  }
}

absl::StatusOr<std::int64_t> QuotaFrom(std::uint64_t bytes) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 50;
  if (bytes <= kMost) return static_cast<std::int64_t>(bytes);
  return Refuse(fmt::format("quota_bytes is {}; want at most {}", bytes, kMost));
}

absl::StatusOr<absl::Duration> GrantDurationFrom(std::uint64_t milliseconds) {
  constexpr std::uint64_t kDay = 24 * 60 * 60 * 1000;
  if (milliseconds <= kDay) return absl::Milliseconds(static_cast<std::int64_t>(milliseconds));
  return Refuse(fmt::format("duration_ms is {}; want at most {}", milliseconds, kDay));
}

absl::StatusOr<cachestore::WriterRequest> WriterRequestFrom(const v1::AppendOpen& open) {
  cachestore::WriterRequest request;
  KVT_ASSIGN_OR_RETURN(request.key, KeyFrom(open.namespace_(), open.sequence()));
  KVT_RETURN_IF_ERROR(CheckLength(open.model_id(), "model_id", kMaxIdentifierBytes));
  request.model_id = open.model_id();
  KVT_ASSIGN_OR_RETURN(request.shard, ShardFrom(open.first_layer(), open.num_layers(),
                                                open.first_head(), open.num_heads()));
  request.epoch = open.writer_epoch();
  request.prompt = PromptFrom(open.prompt());
  return request;
}

absl::StatusOr<SourceLayout> SourceLayoutFrom(const v1::AppendOpen& open) {
  SourceLayout layout{.fused = open.fused_kv()};
  KVT_ASSIGN_OR_RETURN(layout.saturate_non_finite, Saturates(open.non_finite()));
  KVT_ASSIGN_OR_RETURN(layout.heads_first, IsHnd(open.layout()));
  return layout;
}

absl::StatusOr<cachestore::ReadFormat> ReadFormatFrom(const v1::ReadRequest& request) {
  cachestore::ReadFormat format{.per_tensor_scales_only = request.per_tensor_scales_only(),
                                .stored = request.as() == v1::READ_AS_STORED};
  static constexpr std::pair<v1::ReadAs, ElementType> kTypes[] = {
      {v1::READ_AS_BF16, ElementType::kBf16},
      {v1::READ_AS_FP16, ElementType::kFp16},
      {v1::READ_AS_FP32, ElementType::kFp32},
      {v1::READ_AS_FP8_E4M3, ElementType::kE4m3},
      {v1::READ_AS_FP8_E5M2, ElementType::kE5m2}};
  for (const auto& [as, type] : kTypes) {
    if (request.as() == as) format.as = type;
  }
  const bool source = request.as() == v1::READ_AS_UNSPECIFIED || request.as() == v1::READ_AS_SOURCE;
  if (!format.as.has_value() && !source && !format.stored) {
    return Refuse(
        fmt::format("as is {}; want SOURCE, BF16, FP16, FP32, FP8_E4M3, FP8_E5M2 or STORED",
                    static_cast<int>(request.as())));
  }
  if (format.stored && request.block_tokens() > 0) {
    return Refuse(fmt::format("block_tokens is {}; a read as STORED goes page by page, want 0",
                              request.block_tokens()));
  }
  const bool fp8 = format.as.has_value() && kernels::IsFp8(*format.as);
  if (!fp8 && (request.has_k_scale() || request.has_v_scale())) {
    return Refuse("k_scale or v_scale is set; they go with FP8 output only");
  }
  if (!fp8 && request.measure_scales())
    return Refuse("measure_scales is set; it goes with FP8 output only");
  const bool placed = request.target().bytes() > 0 || request.target().layers_size() > 0;
  if (placed && format.stored && !request.target().ring())
    return Refuse("target is set and as is STORED; codes go into messages, or into a ring");
  if (request.target().layers_size() > 0 && request.target().ring())
    return Refuse("target.layers and target.ring are both set; want one of the two");
  if (request.target().layers_size() > 0 && request.block_tokens() == 0)
    return Refuse("target.layers is set and block_tokens is 0; want the tokens of a block");
  if (request.follow() && format.stored)
    return Refuse("follow is set and as is STORED; what is received is followed as values");
  if (request.follow() && request.measure_scales())
    return Refuse("follow and measure_scales are set; what is still to come can't be measured");
  if (request.follow() && request.within_windows())
    return Refuse("follow and within_windows are set; where a window begins is known at the end");
  format.measure_scales = request.measure_scales();
  format.accept_k_rotation = request.accept_k_rotation();
  if (request.has_k_scale()) format.k_scale = request.k_scale();
  if (request.has_v_scale()) format.v_scale = request.v_scale();
  KVT_ASSIGN_OR_RETURN(const bool hnd, IsHnd(request.layout()));
  format.layout = hnd ? cachestore::TokenLayout::kHnd : cachestore::TokenLayout::kNhd;
  if (request.block_tokens() > 4096)
    return Refuse(fmt::format("block_tokens is {}; want 0 to 4096", request.block_tokens()));
  format.block_tokens = static_cast<int>(request.block_tokens());
  return format;
}

absl::StatusOr<cachestore::ReadRange> ReadRangeFrom(const v1::ReadRequest& request,
                                                    const v1::SequenceRange& range) {
  if (request.follow() && range.lease_id() != 0) {
    return Refuse(
        fmt::format("sequences.lease_id is {} and follow is set; a lease fixes a length: "
                    "name the sequence",
                    range.lease_id()));
  }
  if (range.block_ids_size() > 0 && request.target().layers_size() == 0)
    return Refuse("sequences.block_ids is set, and target.layers, which it goes with, isn't");
  cachestore::ReadRange out;
  KVT_ASSIGN_OR_RETURN(out.shard, ShardFrom(request.first_layer(), request.num_layers(),
                                            request.first_head(), request.num_heads()));
  KVT_ASSIGN_OR_RETURN(out.first_token, TokensFrom(range.first_token(), "sequences.first_token"));
  KVT_RETURN_IF_ERROR(CheckLength(range.model_id(), "sequences.model_id", kMaxIdentifierBytes));
  out.within_windows = request.within_windows();
  if (range.num_tokens() > 0) {
    KVT_ASSIGN_OR_RETURN(out.tokens, TokensFrom(range.num_tokens(), "sequences.num_tokens"));
  }
  return out;
}

}  // namespace kvtier::service
