#include "service/rpc/wire.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/base/text.h"
#include "cachestore/model/part_header.h"

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
constexpr std::uint32_t kMaxChunkTokens = 1u << 20;
constexpr std::uint64_t kMaxTokens = std::uint64_t{1} << 32;

absl::Status Refuse(const std::string& message) { return Error(Reason::kInvalidField, message); }

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

using StoredParts = google::protobuf::RepeatedPtrField<v1::StoredPart>;

bool HasParts(const v1::AppendChunk& chunk) {
  return chunk.k_parts_size() > 0 || chunk.v_parts_size() > 0;
}

// `row`: elements from one token's head to the next in memory.
struct Shape {
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t row = 0;
};

// Says where one layer's K or V lies in a chunk; returns how many bytes it takes there.
std::int64_t Place(const std::byte* data, ElementType type, bool heads_first, const Shape& shape,
                   cachestore::SourceTensor& out) {
  out.data = data;
  out.type = type;
  out.head_stride = heads_first ? shape.tokens * shape.row : shape.row;
  out.token_stride = heads_first ? shape.row : shape.heads * shape.row;
  return shape.heads * shape.tokens * shape.row * kernels::ElementBytes(type);
}

absl::Status CheckChunkBytes(const char* field, std::size_t got, std::int64_t want,
                             const v1::AppendChunk& chunk) {
  if (got == static_cast<std::size_t>(want)) return absl::OkStatus();
  return Refuse(fmt::format("chunk.{} has {} bytes; {} tokens of {} layers from layer {} take {}{}",
                            field, got, chunk.num_tokens(), std::max(1u, chunk.num_layers()),
                            chunk.first_layer(), want,
                            HasParts(chunk) ? ", those that come as parts left out" : ""));
}

struct StoredField {
  const char* name;
  const StoredParts& parts;
};

// Parts of one K or V: of pages inside the chunk that are codes to their end once it is in.
absl::StatusOr<cachestore::StoredPages> StoredFrom(const StoredField& field,
                                                   const cachestore::TensorModel& tensor, int heads,
                                                   const cachestore::Chunk& chunk,
                                                   std::int64_t origin) {
  const StoredParts& parts = field.parts;
  cachestore::StoredPages pages{.heads = heads};
  if (parts.empty()) return pages;
  const std::int64_t page_tokens = tensor.layout.page_tokens;
  const std::int64_t first = (chunk.first_token + page_tokens - 1) / page_tokens;
  const std::int64_t end =
      tensor.dim() == 0
          ? 0
          : tensor.residual.CodeTokens(chunk.first_token + chunk.tokens, origin) / page_tokens;
  const std::int64_t bytes =
      cachestore::PartBytes(cachestore::MakePartLayout(tensor.layout.codec, heads, tensor.dim(),
                                                       tensor.layout.page_tokens),
                            heads);
  for (int i = 0; i < parts.size(); ++i) {
    const std::int64_t page = parts[i].page();
    if (page < first || page >= end || page != std::int64_t{parts[0].page()} + i) {
      return Refuse(fmt::format(
          "chunk.{}[{}].page is {}; want consecutive pages, {}", field.name, i, page,
          first < end ? fmt::format("of {} to {} that these tokens make final", first, end - 1)
                      : "and these tokens make none final"));
    }
    if (parts[i].data().size() != static_cast<std::size_t>(bytes)) {
      return Refuse(fmt::format("chunk.{}[{}].data has {} bytes; a part of {} heads takes {}",
                                field.name, i, parts[i].data().size(), heads, bytes));
    }
    pages.parts.push_back(reinterpret_cast<const std::byte*>(parts[i].data().data()));
  }
  pages.begin = parts[0].page() * page_tokens - chunk.first_token;
  pages.end = pages.begin + parts.size() * page_tokens;
  return pages;
}

// Sets what comes as parts of the one layer that such a chunk has.
absl::Status SetStored(const v1::AppendChunk& chunk, const cachestore::LayerModel& layer, int heads,
                       const SourceLayout& layout, cachestore::Chunk& out) {
  if (layout.fused || chunk.num_layers() > 1) {
    return Refuse(fmt::format("chunk has k_parts or v_parts; they go with {}",
                              layout.fused ? "K and V apart: leave out fused_kv"
                                           : "one layer a chunk: leave out num_layers"));
  }
  cachestore::Chunk::Layer& to = out.layers.back();
  KVT_ASSIGN_OR_RETURN(to.k.stored, StoredFrom({"k_parts", chunk.k_parts()}, layer.k, heads, out,
                                               layout.residual_origin));
  KVT_ASSIGN_OR_RETURN(to.v.stored, StoredFrom({"v_parts", chunk.v_parts()}, layer.v, heads, out,
                                               layout.residual_origin));
  return absl::OkStatus();
}

}  // namespace

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

absl::StatusOr<cachestore::Chunk> ChunkFrom(const v1::AppendChunk& chunk,
                                            const cachestore::Model& model,
                                            const cachestore::Shard& shard,
                                            const SourceLayout& layout) {
  const std::int64_t first = chunk.first_layer();
  const std::int64_t end = first + std::max(1u, chunk.num_layers());
  if (first < shard.first_layer || end > shard.end_layer()) {
    return Refuse(fmt::format(
        "chunk.first_layer {} and num_layers {} are outside the stream's layers {} to {}", first,
        end - first, shard.first_layer, shard.end_layer() - 1));
  }
  if (chunk.num_tokens() == 0 || chunk.num_tokens() > kMaxChunkTokens) {
    return Refuse(
        fmt::format("chunk.num_tokens is {}; want 1 to {}", chunk.num_tokens(), kMaxChunkTokens));
  }
  cachestore::Chunk out{.tokens = chunk.num_tokens(),
                        .saturate_non_finite = layout.saturate_non_finite};
  KVT_ASSIGN_OR_RETURN(out.first_token, TokensFrom(chunk.first_token(), "chunk.first_token"));

  const auto* const k_data = reinterpret_cast<const std::byte*>(chunk.k().data());
  const auto* const v_data = reinterpret_cast<const std::byte*>(chunk.v().data());
  std::int64_t k_bytes = 0;
  std::int64_t v_bytes = 0;
  for (int i = static_cast<int>(first); i < end; ++i) {
    const cachestore::LayerModel& layer = model.layers[static_cast<std::size_t>(i)];
    const ElementType type = layer.k.source;
    const std::int64_t k_row = kernels::RowElements(type, layer.k.dim());
    const std::int64_t v_row = kernels::RowElements(type, layer.v.dim());
    const std::int64_t row = layout.fused ? k_row + v_row : k_row;
    const int heads = shard.HeadsIn(layer.spec.kv_heads);
    out.layers.push_back({.layer = i, .k = {}, .v = {}});
    cachestore::Chunk::Layer& to = out.layers.back();
    if (HasParts(chunk)) {
      KVT_RETURN_IF_ERROR(SetStored(chunk, layer, heads, layout, out));
    }
    const auto tokens = [&](const cachestore::StoredPages& stored) {
      return out.tokens - (stored.end - stored.begin);
    };
    k_bytes +=
        Place(k_data + k_bytes, type, layout.heads_first, {tokens(to.k.stored), heads, row}, to.k);
    if (layout.fused) {
      to.v = to.k;
      to.v.data += k_row * kernels::ElementBytes(type);
    } else {
      v_bytes += Place(v_data + v_bytes, type, layout.heads_first,
                       {tokens(to.v.stored), heads, v_row}, to.v);
    }
  }
  KVT_RETURN_IF_ERROR(CheckChunkBytes("k", chunk.k().size(), k_bytes, chunk));
  KVT_RETURN_IF_ERROR(CheckChunkBytes("v", chunk.v().size(), v_bytes, chunk));
  return out;
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
