#include "client/read_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>

#include "cachestore/base/status_macros.h"
#include "client/resolve_model.h"

namespace kvtier::client {
namespace {

absl::Status Loss(const std::string& message) { return absl::DataLossError(message); }

std::string Name(const v1::SequenceManifest& sequence, std::uint64_t layer) {
  return fmt::format("sequence {}, layer {}", sequence.sequence(), layer);
}

// Nothing if the product or sum does not fit: a manifest like that can only be wrong.
std::optional<std::uint64_t> Product(std::initializer_list<std::uint64_t> factors) {
  std::uint64_t product = 1;
  for (const std::uint64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product)) return std::nullopt;
  }
  return product;
}

absl::Status CheckScales(const std::string& name, const v1::LayerManifest& layer) {
  const auto check = [&](const char* part, int scales) {
    if (scales == 1 || scales == static_cast<int>(layer.num_heads())) return absl::OkStatus();
    return Loss(fmt::format("{} comes with {} {} scales for {} heads", name, scales, part,
                            layer.num_heads()));
  };
  if (layer.q_scale_size() > 0) {
    KVT_RETURN_IF_ERROR(check("Q", layer.q_scale_size()));
  }
  if (!IsFp8(layer.dtype())) return absl::OkStatus();
  KVT_RETURN_IF_ERROR(check("K", layer.k_scale_size()));
  return layer.v_head_dim() == 0 ? absl::OkStatus() : check("V", layer.v_scale_size());
}

absl::StatusOr<std::uint64_t> CheckSequence(const v1::SequenceManifest& sequence) {
  std::uint64_t bytes = 0;
  for (int i = 0; i < sequence.layers_size(); ++i) {
    const v1::LayerManifest& layer = sequence.layers(i);
    const std::string name = Name(sequence, layer.layer());
    if (layer.layer() != sequence.layers(0).layer() + static_cast<std::uint32_t>(i)) {
      return Loss(fmt::format("{} stands in place {} of the manifest", name, i));
    }
    if (!RowBytes(layer.dtype(), 0)) {
      return Loss(fmt::format("{} has the unknown type {}", name, static_cast<int>(layer.dtype())));
    }
    KVT_RETURN_IF_ERROR(CheckScales(name, layer));
    // Of 32-bit dims, in range.
    const std::uint64_t row =
        *RowBytes(layer.dtype(), layer.k_head_dim()) + *RowBytes(layer.dtype(), layer.v_head_dim());
    const std::uint64_t first = FirstToken(sequence, layer);
    if (first < sequence.first_token() || first - sequence.first_token() > sequence.num_tokens()) {
      return Loss(fmt::format("{} begins at token {}; the sequence has {} from {} on", name, first,
                              sequence.num_tokens(), sequence.first_token()));
    }
    const auto size = Product({LayerTokens(sequence, layer), layer.num_heads(), row});
    if (!size || __builtin_add_overflow(bytes, *size, &bytes)) {
      return Loss(fmt::format("{} is larger than 64 bits can say", name));
    }
  }
  return bytes;
}

}  // namespace

std::optional<std::uint64_t> RowBytes(v1::DType dtype, std::uint32_t dim) {
  const std::optional<kernels::ElementType> type = ElementTypeOf(dtype);
  if (type.has_value()) return static_cast<std::uint64_t>(kernels::RowBytes(*type, dim));
  return std::nullopt;
}

bool IsFp8(v1::DType dtype) { return dtype == v1::DTYPE_FP8_E4M3 || dtype == v1::DTYPE_FP8_E5M2; }

std::uint64_t FirstToken(const v1::SequenceManifest& sequence, const v1::LayerManifest& layer) {
  return layer.has_first_token() ? layer.first_token() : sequence.first_token();
}

std::uint64_t LayerTokens(const v1::SequenceManifest& sequence, const v1::LayerManifest& layer) {
  return sequence.num_tokens() - (FirstToken(sequence, layer) - sequence.first_token());
}

absl::Status ReadCheck::Begin(const v1::ReadManifest& manifest, int sequences, ReadKind kind) {
  kind_ = kind;
  if (manifest.sequences_size() != sequences) {
    return Loss(fmt::format("the manifest has {} sequences; {} were asked for",
                            manifest.sequences_size(), sequences));
  }
  std::uint64_t bytes = 0;
  for (const v1::SequenceManifest& sequence : manifest.sequences()) {
    KVT_ASSIGN_OR_RETURN(const std::uint64_t size, CheckSequence(sequence));
    if (__builtin_add_overflow(bytes, size, &bytes)) {
      return Loss("the manifest is larger than 64 bits can say");
    }
    std::vector<std::uint64_t>& next = next_token_.emplace_back();
    for (const v1::LayerManifest& layer : sequence.layers())
      next.push_back(FirstToken(sequence, layer));
  }
  const bool unknown = kind == ReadKind::kFollowed && manifest.total_bytes() == 0;
  if (kind != ReadKind::kStored && !unknown && bytes != manifest.total_bytes()) {
    return Loss(fmt::format("the manifest says {} bytes, but its layers take {}",
                            manifest.total_bytes(), bytes));
  }
  manifest_ = manifest;
  return absl::OkStatus();
}

absl::Status ReadCheck::CheckPlace(const v1::ReadChunk& chunk) const {
  if (chunk.sequence_index() >= next_token_.size()) {
    return Loss(fmt::format("a chunk is of sequence {}; the manifest has {}",
                            chunk.sequence_index(), next_token_.size()));
  }
  const v1::SequenceManifest& sequence = sequence_of(chunk);
  const std::string name = Name(sequence, chunk.layer());
  const std::vector<std::uint64_t>& next_token = next_token_[chunk.sequence_index()];
  if (next_token.empty() || chunk.layer() < sequence.layers(0).layer() ||
      layer_index(chunk) >= next_token.size()) {
    return Loss(fmt::format("a chunk is of {}, which the manifest does not have", name));
  }
  const std::uint64_t next = next_token[layer_index(chunk)];
  const bool open_ended = kind_ == ReadKind::kFollowed && sequence.num_tokens() == 0;
  const std::uint64_t left =
      open_ended ? ~next : sequence.first_token() + sequence.num_tokens() - next;
  if (chunk.first_token() != next || chunk.num_tokens() == 0 || chunk.num_tokens() > left) {
    return Loss(fmt::format("{}: a chunk brings {} tokens from {}; from {} on {} are expected",
                            name, chunk.num_tokens(), chunk.first_token(), next, left));
  }
  return absl::OkStatus();
}

std::optional<ReadCheck::Sizes> ReadCheck::SizesOf(const v1::ReadChunk& chunk) const {
  const v1::LayerManifest& layer = sequence_of(chunk).layers(static_cast<int>(layer_index(chunk)));
  const auto size = [&](std::uint32_t dim) {
    return Product({chunk.num_tokens(), layer.num_heads(), *RowBytes(layer.dtype(), dim)});
  };
  const auto k = size(layer.k_head_dim()), v = size(layer.v_head_dim());
  if (!k || !v) return std::nullopt;
  return Sizes{.k = *k, .v = *v};
}

absl::StatusOr<ReadCheck::Sizes> ReadCheck::Expected(const v1::ReadChunk& chunk) const {
  KVT_RETURN_IF_ERROR(CheckPlace(chunk));
  if (const std::optional<Sizes> sizes = SizesOf(chunk)) return *sizes;
  return Loss("a chunk is larger than 64 bits can say");
}

absl::Status ReadCheck::Take(const v1::ReadChunk& chunk, const Sizes& sizes) {
  KVT_RETURN_IF_ERROR(CheckPlace(chunk));
  bytes_ += ChunkBytes(chunk) - chunk.k().size() - chunk.v().size() + sizes.k + sizes.v;
  next_token_[chunk.sequence_index()][layer_index(chunk)] += chunk.num_tokens();
  if (kind_ == ReadKind::kStored) return absl::OkStatus();
  const Sizes want = SizesOf(chunk).value_or(Sizes());
  if (sizes.k != want.k || sizes.v != want.v) {
    return Loss(
        fmt::format("{}: a chunk of {} tokens brings {} bytes of K and {} of V; {} and {} "
                    "are expected",
                    Name(sequence_of(chunk), chunk.layer()), chunk.num_tokens(), sizes.k, sizes.v,
                    want.k, want.v));
  }
  return absl::OkStatus();
}

absl::Status ReadCheck::Learn(const v1::ReadSummary& summary) {
  if (summary.tokens_size() != manifest_.sequences_size()) {
    return Loss(fmt::format("the summary has the tokens of {} sequences; the manifest has {}",
                            summary.tokens_size(), manifest_.sequences_size()));
  }
  for (int s = 0; s < summary.tokens_size(); ++s) {
    v1::SequenceManifest& sequence = *manifest_.mutable_sequences(s);
    if (sequence.num_tokens() != 0 && sequence.num_tokens() != summary.tokens(s)) {
      return Loss(fmt::format("the summary says {} tokens of sequence {}; the manifest says {}",
                              summary.tokens(s), sequence.sequence(), sequence.num_tokens()));
    }
    sequence.set_num_tokens(summary.tokens(s));
  }
  if (manifest_.total_bytes() == 0) manifest_.set_total_bytes(bytes_);
  return absl::OkStatus();
}

absl::Status ReadCheck::End(const v1::ReadSummary& summary) {
  if (kind_ == ReadKind::kFollowed) {
    KVT_RETURN_IF_ERROR(Learn(summary));
  }
  for (std::size_t s = 0; s < next_token_.size(); ++s) {
    const v1::SequenceManifest& sequence = manifest_.sequences(static_cast<int>(s));
    const std::uint64_t end = sequence.first_token() + sequence.num_tokens();
    for (std::size_t i = 0; i < next_token_[s].size(); ++i) {
      if (next_token_[s][i] == end) continue;
      return Loss(fmt::format("{} ended at token {}; the manifest says {}",
                              Name(sequence, sequence.layers(static_cast<int>(i)).layer()),
                              next_token_[s][i], end));
    }
  }
  if (counts_ && bytes_ != manifest_.total_bytes()) {
    return Loss(
        fmt::format("{} bytes came; the manifest says {}", bytes_, manifest_.total_bytes()));
  }
  return absl::OkStatus();
}

const v1::SequenceManifest& ReadCheck::sequence_of(const v1::ReadChunk& chunk) const {
  return manifest_.sequences(static_cast<int>(chunk.sequence_index()));
}

std::size_t ReadCheck::layer_index(const v1::ReadChunk& chunk) const {
  return chunk.layer() - sequence_of(chunk).layers(0).layer();
}

absl::Status ForEachRun(const ReadGeometry& geometry, std::uint64_t first, std::uint64_t count,
                        const std::function<absl::Status(const ByteRun&)>& take) {
  const std::uint64_t token_bytes = geometry.heads * geometry.vector_bytes;
  if (token_bytes == 0) return absl::OkStatus();
  if (geometry.layout != v1::LAYOUT_HND) {
    return take(
        {.chunk_offset = 0, .layer_offset = first * token_bytes, .size = count * token_bytes});
  }
  const std::uint64_t block = geometry.block_tokens == 0 ? count : geometry.block_tokens;
  for (std::uint64_t start = 0; start < count; start += block) {
    const std::uint64_t size = std::min(block, count - start) * geometry.vector_bytes;
    for (std::uint64_t head = 0; head < geometry.heads; ++head) {
      KVT_RETURN_IF_ERROR(
          take({.chunk_offset = start * token_bytes + head * size,
                .layer_offset = (head * geometry.tokens + first + start) * geometry.vector_bytes,
                .size = size}));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvtier::client
