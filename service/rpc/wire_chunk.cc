// What an append's chunk brings: values inside the message or in shared memory, and parts.

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/model/part_header.h"
#include "service/rpc/wire.h"

namespace kvtier::service {
namespace {

using kernels::ElementType;

constexpr std::uint32_t kMaxChunkTokens = 1u << 20;
// One that takes no message must not keep a thread for longer than others can wait.
constexpr std::int64_t kMaxSharedChunkBytes = 64 << 20;

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

// The K or the V of a chunk's tokens that are not parts: inside the message, or in shared memory.
struct ChunkValues {
  const char* name = "";
  const std::string& inside;
  std::optional<std::uint64_t> offset;
  const std::byte* data = nullptr;
  std::int64_t bytes = 0;  // that were placed so far
};

// Sets where they begin; of those in shared memory, CheckEnd says whether they end there, too.
absl::Status FindBegin(const SourceLayout& layout, ChunkValues& values) {
  values.data = reinterpret_cast<const std::byte*>(values.inside.data());
  if (!values.offset.has_value()) return absl::OkStatus();
  if (!values.inside.empty()) {
    return Refuse(
        fmt::format("chunk.{0} has bytes and {0}_offset is set; want one of the two", values.name));
  }
  if (layout.memory == nullptr) {
    return Refuse(fmt::format("chunk.{}_offset is {}, and the stream's open had no transport_id",
                              values.name, *values.offset));
  }
  if (*values.offset % kShmAlignment != 0) {
    return Refuse(fmt::format("chunk.{}_offset is {}; want a multiple of {}", values.name,
                              *values.offset, kShmAlignment));
  }
  values.data = layout.memory->At(*values.offset, 0);
  if (values.data != nullptr) return absl::OkStatus();
  return Refuse(fmt::format("chunk.{}_offset is {}; the transport's memory has {} bytes",
                            values.name, *values.offset, layout.memory->size()));
}

absl::Status CheckEnd(const SourceLayout& layout, const ChunkValues& values,
                      const v1::AppendChunk& chunk) {
  const auto bytes = static_cast<std::uint64_t>(values.bytes);
  const bool fits = values.offset.has_value() ? layout.memory->At(*values.offset, bytes) != nullptr
                                              : values.inside.size() == bytes;
  if (fits) return absl::OkStatus();
  const std::string got = values.offset.has_value()
                              ? fmt::format("_offset is {} in a transport's memory of {}",
                                            *values.offset, layout.memory->size())
                              : fmt::format(" has {}", values.inside.size());
  return Refuse(fmt::format("chunk.{}{} bytes; {} tokens of {} layers from layer {} take {}{}",
                            values.name, got, chunk.num_tokens(), std::max(1u, chunk.num_layers()),
                            chunk.first_layer(), bytes,
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

absl::StatusOr<ChunkView> ChunkFrom(const v1::AppendChunk& chunk, const cachestore::Model& model,
                                    const cachestore::Shard& shard, const SourceLayout& layout) {
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

  ChunkValues k{.name = "k", .inside = chunk.k(), .offset = std::nullopt};
  ChunkValues v{.name = "v", .inside = chunk.v(), .offset = std::nullopt};
  if (chunk.has_k_offset()) k.offset = chunk.k_offset();
  if (chunk.has_v_offset()) v.offset = chunk.v_offset();
  out.on_device = layout.on_device && (k.offset.has_value() || v.offset.has_value());
  if (out.on_device && k.inside.size() + v.inside.size() > 0)
    return Refuse("chunk has bytes inside and in the transport's memory; want one of the two");
  KVT_RETURN_IF_ERROR(FindBegin(layout, k));
  KVT_RETURN_IF_ERROR(FindBegin(layout, v));
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
    k.bytes +=
        Place(k.data + k.bytes, type, layout.heads_first, {tokens(to.k.stored), heads, row}, to.k);
    if (layout.fused) {
      to.v = to.k;
      to.v.data += k_row * kernels::ElementBytes(type);
    } else {
      v.bytes += Place(v.data + v.bytes, type, layout.heads_first,
                       {tokens(to.v.stored), heads, v_row}, to.v);
    }
  }
  KVT_RETURN_IF_ERROR(CheckEnd(layout, k, chunk));
  KVT_RETURN_IF_ERROR(CheckEnd(layout, v, chunk));
  if (k.bytes + v.bytes > kMaxSharedChunkBytes) {
    return Refuse(
        fmt::format("chunk's k and v take {} bytes of the transport's memory; want at most {}",
                    k.bytes + v.bytes, kMaxSharedChunkBytes));
  }
  const auto piece = [&layout](const ChunkValues& values) {
    return values.offset.has_value()
               ? transport::DevicePiece{layout.memory->At(*values.offset, 0), values.bytes}
               : transport::DevicePiece{};
  };
  return ChunkView{.chunk = std::move(out), .k = piece(k), .v = piece(v)};
}

}  // namespace kvtier::service
