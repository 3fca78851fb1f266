#include "client/stored_decoder.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cachestore/base/status_macros.h"
#include "client/read_check.h"
#include "client/resolve_model.h"
#include "kernels/host_codec.h"

namespace kvtier::client {
namespace {

using kernels::ElementType;

constexpr std::pair<v1::ReadAs, ElementType> kTypes[] = {
    {v1::READ_AS_BF16, ElementType::kBf16},
    {v1::READ_AS_FP16, ElementType::kFp16},
    {v1::READ_AS_FP32, ElementType::kFp32},
    {v1::READ_AS_FP8_E4M3, ElementType::kE4m3},
    {v1::READ_AS_FP8_E5M2, ElementType::kE5m2}};

constexpr std::uint64_t kMostTokens = std::uint64_t{1} << 32;

// An error of the shared checks: here it means that what came is not what was promised.
absl::Status Loss(const std::string& name, const absl::Status& status) {
  return absl::DataLossError(fmt::format("{}: {}", name, std::string(status.message())));
}

}  // namespace

struct StoredDecoder::Side {
  const Tensor& tensor;
  const Parts& parts;
  const std::string& rows;
  std::int64_t first_token = 0;
  std::int64_t tokens = 0;

  std::int64_t end() const { return first_token + tokens; }
  // Where rows begin.
  std::int64_t first_row() const {
    return std::clamp(static_cast<std::int64_t>(tensor.code_tokens), first_token, end());
  }
  std::int64_t row_bytes() const { return tensor.model.source_row_bytes(); }
  // Of a part, how many of a head's tokens are codes.
  std::int64_t CodesIn(const v1::StoredPart& part, int head) const {
    return part.tokens(part.tokens_size() > 1 ? head : 0);
  }
};

absl::StatusOr<StoredDecoder> StoredDecoder::Make(const v1::ReadRequest& wanted) {
  StoredDecoder decoder;
  cachestore::ReadFormat& format = decoder.format_;
  format.per_tensor_scales_only = wanted.per_tensor_scales_only();
  format.layout = wanted.layout() == v1::LAYOUT_HND ? cachestore::TokenLayout::kHnd
                                                    : cachestore::TokenLayout::kNhd;
  for (const auto& [as, type] : kTypes) {
    if (wanted.as() == as) format.as = type;
  }
  if (wanted.has_k_scale()) format.k_scale = wanted.k_scale();
  if (wanted.has_v_scale()) format.v_scale = wanted.v_scale();
  const bool fp8 = format.as.has_value() && kernels::IsFp8(*format.as);
  if (!fp8 && (format.k_scale.has_value() || format.v_scale.has_value())) {
    return absl::InvalidArgumentError("k_scale or v_scale is set; they go with FP8 output only");
  }
  if (wanted.block_tokens() > 0 || wanted.measure_scales()) {
    return absl::InvalidArgumentError(
        fmt::format("{} is set; a read of codes that is decoded here goes without",
                    wanted.block_tokens() > 0 ? "block_tokens" : "measure_scales"));
  }
  decoder.request_ = wanted;
  decoder.request_.set_as(v1::READ_AS_STORED);
  decoder.request_.set_accept_k_rotation(true);
  decoder.request_.clear_k_scale();
  decoder.request_.clear_v_scale();
  decoder.request_.clear_per_tensor_scales_only();
  return decoder;
}

absl::Status StoredDecoder::BeginLayer(const v1::SequenceManifest& sequence,
                                       v1::LayerManifest& layer) {
  const std::string name = fmt::format("sequence {}, layer {}", sequence.sequence(), layer.layer());
  const auto resolved = ResolveStoredLayer(sequence, layer);
  if (!resolved.ok()) return Loss(name, resolved.status());
  const std::uint64_t end = std::uint64_t{sequence.first_head()} + layer.num_heads();
  if (layer.num_heads() == 0 || end > layer.kv_heads()) {
    return absl::DataLossError(fmt::format("{}: {} heads from {} are read of {}", name,
                                           layer.num_heads(), sequence.first_head(),
                                           layer.kv_heads()));
  }
  const cachestore::Model& model = **resolved;
  const bool before_rope = model.request.spec.k_rope == cachestore::RopeState::kBefore;
  const ElementType out = format_.as.value_or(model.request.spec.source);
  const auto make = [&](const cachestore::TensorModel& tensor, cachestore::Side side,
                        google::protobuf::RepeatedField<float>& scales) -> absl::StatusOr<Tensor> {
    const bool k = side == cachestore::Side::kK;
    Tensor made{.model = tensor,
                .header = cachestore::MakePartHeader(tensor, side, before_rope),
                .heads = {static_cast<int>(sequence.first_head()), static_cast<int>(end)},
                .out = out,
                .code_tokens = k ? layer.k_code_tokens() : layer.v_code_tokens(),
                .name = fmt::format("{}, {}", name, k ? "k" : "v")};
    if (kernels::IsFp8(out)) {
      const cachestore::StoredScales stored{tensor.layout.codec, {scales.begin(), scales.end()}};
      cachestore::ReadFormat format = format_;
      format.as = out;  // the source's, where none is asked for
      KVT_ASSIGN_OR_RETURN(made.out_scales, cachestore::OutputScales(
                                                stored, format, k ? format.k_scale : format.v_scale,
                                                k ? "k_scale" : "v_scale"));
    }
    scales.Assign(made.out_scales.begin(), made.out_scales.end());
    return made;
  };
  Layer& to = layers_.back().emplace_back();
  KVT_ASSIGN_OR_RETURN(to.k,
                       make(model.layers[0].k, cachestore::Side::kK, *layer.mutable_k_scale()));
  if (layer.v_head_dim() > 0) {
    KVT_ASSIGN_OR_RETURN(to.v,
                         make(model.layers[0].v, cachestore::Side::kV, *layer.mutable_v_scale()));
  }
  layer.set_dtype(DtypeOf(out));
  layer.clear_kv_cache_dtype();
  layer.clear_kv_heads();
  return absl::OkStatus();
}

absl::StatusOr<v1::ReadManifest> StoredDecoder::Begin(const v1::ReadManifest& stored) {
  v1::ReadManifest manifest = stored;
  std::uint64_t bytes = 0;
  for (int s = 0; s < manifest.sequences_size(); ++s) {
    v1::SequenceManifest& sequence = *manifest.mutable_sequences(s);
    if (sequence.first_token() >= kMostTokens || sequence.num_tokens() >= kMostTokens) {
      return absl::DataLossError(fmt::format("sequence {}: {} tokens from {} can't be", s,
                                             sequence.num_tokens(), sequence.first_token()));
    }
    layers_.emplace_back();
    first_layers_.push_back(sequence.layers_size() > 0 ? sequence.layers(0).layer() : 0);
    for (v1::LayerManifest& layer : *sequence.mutable_layers()) {
      KVT_RETURN_IF_ERROR(BeginLayer(stored.sequences(s), layer));
      const ElementType out = layers_.back().back().k.out;
      bytes += LayerTokens(sequence, layer) * layer.num_heads() *
               static_cast<std::uint64_t>(kernels::RowBytes(out, layer.k_head_dim()) +
                                          kernels::RowBytes(out, layer.v_head_dim()));
    }
    sequence.clear_page_tokens();
    sequence.clear_k_rope();
  }
  manifest.set_total_bytes(bytes);
  return manifest;
}

absl::StatusOr<v1::ReadChunk> StoredDecoder::Decode(const v1::ReadChunk& stored) {
  const std::uint32_t s = stored.sequence_index();
  const Layer& layer = layers_[s][stored.layer() - first_layers_[s]];
  v1::ReadChunk chunk;
  chunk.set_sequence_index(s);
  chunk.set_layer(stored.layer());
  chunk.set_first_token(stored.first_token());
  chunk.set_num_tokens(stored.num_tokens());
  const auto first = static_cast<std::int64_t>(stored.first_token());
  const Side k{layer.k, stored.k_parts(), stored.k(), first, stored.num_tokens()};
  KVT_RETURN_IF_ERROR(DecodeSide(k, *chunk.mutable_k()));
  if (layer.v.has_value()) {
    const Side v{*layer.v, stored.v_parts(), stored.v(), first, stored.num_tokens()};
    KVT_RETURN_IF_ERROR(DecodeSide(v, *chunk.mutable_v()));
  } else if (stored.v_parts_size() > 0 || !stored.v().empty()) {
    return absl::DataLossError(fmt::format("{}: a V came of a layer without", layer.k.name));
  }
  return chunk;
}

// Parts and rows together must have every token; only then is memory taken for them.
absl::Status StoredDecoder::CheckParts(const Side& side) const {
  const Tensor& tensor = side.tensor;
  const cachestore::PartLayout& layout = tensor.model.layout;
  const std::int64_t rows = side.end() - side.first_row();
  const std::int64_t row_bytes = rows * tensor.heads.count() * side.row_bytes();
  if (side.rows.size() != static_cast<std::size_t>(row_bytes)) {
    return absl::DataLossError(fmt::format("{}: {} bytes of source came for {} tokens; {} are due",
                                           tensor.name, side.rows.size(), rows, row_bytes));
  }
  const std::int64_t first_page = side.first_token / layout.page_tokens;
  for (int i = 0; i < side.parts.size(); ++i) {
    const v1::StoredPart& part = side.parts[i];
    const std::int64_t page = first_page + i;
    const std::string name = fmt::format("{}, page {}", tensor.name, page);
    const int counts = part.tokens_size();
    if (part.page() != page || (counts != 1 && counts != tensor.heads.count())) {
      return absl::DataLossError(
          fmt::format("{} comes as page {} with {} counts of tokens", name, part.page(), counts));
    }
    const absl::Span<const std::byte> bytes(reinterpret_cast<const std::byte*>(part.data().data()),
                                            part.data().size());
    if (absl::Status status =
            cachestore::CheckPart(bytes, layout, tensor.header, tensor.heads, "part");
        !status.ok()) {
      return Loss(name, status);
    }
    const auto [least, most] = std::minmax_element(part.tokens().begin(), part.tokens().end());
    const std::uint32_t said = cachestore::HeaderOf(bytes.data()).tokens;
    if (*least != said || *most > static_cast<std::uint32_t>(layout.page_tokens)) {
      return absl::DataLossError(fmt::format("{}: {} to {} tokens are codes; its header says {}",
                                             name, *least, *most, said));
    }
    if (page * layout.page_tokens + *least <
        std::min(side.first_row(), (page + 1) * layout.page_tokens)) {
      return absl::DataLossError(fmt::format("{}: {} tokens are codes; rows begin at token {}",
                                             name, *least, side.first_row()));
    }
  }
  const std::int64_t last = first_page + side.parts.size() - 1;
  const bool short_of =
      side.first_token < side.first_row() && (last + 1) * layout.page_tokens < side.first_row();
  if (short_of || (!side.parts.empty() && last * layout.page_tokens >= side.end())) {
    return absl::DataLossError(
        fmt::format("{}: {} parts from page {} on came for tokens {} to {}, of which {} are codes",
                    tensor.name, side.parts.size(), first_page, side.first_token, side.end(),
                    side.first_row() - side.first_token));
  }
  return absl::OkStatus();
}

absl::Status StoredDecoder::DecodeSide(const Side& side, std::string& out) {
  KVT_RETURN_IF_ERROR(CheckParts(side));
  const Tensor& tensor = side.tensor;
  const std::int64_t heads = tensor.heads.count();
  const std::int64_t row = kernels::RowElements(tensor.out, tensor.model.dim());
  const std::int64_t row_bytes = row * kernels::ElementBytes(tensor.out);
  out.resize(static_cast<std::size_t>(side.tokens * heads * row_bytes));
  const bool nhd = format_.layout == cachestore::TokenLayout::kNhd;
  for (int h = 0; h < heads; ++h) {
    kernels::DecodeRun run{.dim = tensor.model.dim()};
    if (!tensor.out_scales.empty())
      run.out_scale =
          tensor.out_scales[tensor.out_scales.size() > 1 ? static_cast<std::size_t>(h) : 0];
    run.out = {reinterpret_cast<std::byte*>(out.data()) + h * (nhd ? 1 : side.tokens) * row_bytes,
               tensor.out, nhd ? heads * row : row};
    DecodeHead(side, h, run);
  }
  return absl::OkStatus();
}

// Cuts one head's tokens where pages end and where its codes end.
void StoredDecoder::DecodeHead(const Side& side, int head, kernels::DecodeRun run) {
  const Tensor& tensor = side.tensor;
  const cachestore::PartLayout& layout = tensor.model.layout;
  const bool nhd = format_.layout == cachestore::TokenLayout::kNhd;
  const std::int64_t first_page = side.first_token / layout.page_tokens;
  const std::int64_t rows = side.end() - side.first_row();
  for (std::int64_t token = side.first_token; token < side.end();) {
    const std::int64_t page = token / layout.page_tokens, in_page = token % layout.page_tokens;
    const auto index = static_cast<int>(page - first_page);
    const std::int64_t codes =
        index < side.parts.size() ? side.CodesIn(side.parts[index], head) : 0;
    std::int64_t until = side.end();
    if (in_page < codes) {
      const auto* const part = reinterpret_cast<const std::byte*>(side.parts[index].data().data());
      until = std::min(until, page * layout.page_tokens + codes);
      run.codec = layout.codec;
      run.scale = cachestore::EntryOf(part, tensor.heads.first + head).scale;
      run.in = part + layout.SliceOffset(head);
      run.first_token = in_page;
      run.tokens = until - token;
      saturated_ += kernels::DecodeOnHost(run);
      run.out.data += run.tokens * run.out.token_stride * kernels::ElementBytes(run.out.type);
    } else {
      // Rows lie as the layout says, one after another only in HND.
      const std::int64_t heads = tensor.heads.count();
      const std::int64_t row = token - side.first_row();
      run.codec = {.id = kernels::CodecId::kRaw, .element = tensor.model.source};
      run.in = reinterpret_cast<const std::byte*>(side.rows.data()) +
               (nhd ? row * heads + head : head * rows + row) * side.row_bytes();
      run.first_token = 0;
      run.tokens = 1;
      until = token + 1;
      saturated_ += kernels::DecodeOnHost(run);
      run.out.data += run.out.token_stride * kernels::ElementBytes(run.out.type);
    }
    token = until;
  }
}

}  // namespace kvtier::client
