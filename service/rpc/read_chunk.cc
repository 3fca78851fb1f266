#include "service/rpc/read_chunk.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cachestore/base/status_macros.h"

namespace kvtier::service {
namespace {

using cachestore::Side;
using StoredParts = google::protobuf::RepeatedPtrField<v1::StoredPart>;

// Where the next bytes of a chunk go: to what is left of its room, which `say` is told, or inside
// the message. The strings there keep their memory, so this clears nothing.
template <class Say>
std::byte* Next(ChunkRoom& room, std::int64_t bytes, std::string& inside, Say say) {
  if (room.at == nullptr) {
    inside.resize(static_cast<std::size_t>(bytes));
    return reinterpret_cast<std::byte*>(inside.data());
  }
  say(static_cast<std::uint64_t>(room.at - room.base));
  return std::exchange(room.at, room.at + bytes);
}

std::byte* NextRows(ChunkRoom& room, std::int64_t bytes, Side side, v1::ReadChunk& chunk) {
  if (side == Side::kK) {
    return Next(room, bytes, *chunk.mutable_k(),
                [&](std::uint64_t offset) { chunk.set_k_offset(offset); });
  }
  return Next(room, bytes, *chunk.mutable_v(),
              [&](std::uint64_t offset) { chunk.set_v_offset(offset); });
}

// One side of a chunk as stored. How many bytes.
absl::StatusOr<std::int64_t> WriteStored(cachestore::SequenceReader& reader,
                                         const ChunkPlace& place, Side side, ChunkRoom& room,
                                         v1::ReadChunk& chunk) {
  StoredParts& parts = side == Side::kK ? *chunk.mutable_k_parts() : *chunk.mutable_v_parts();
  const cachestore::StoredSpan span =
      reader.Span(place.layer, side, place.first_token, place.tokens);
  const cachestore::TensorPins& tensor = reader.pinned(place.layer, side);
  const cachestore::HeadRange heads = reader.heads(place.layer);
  // Not cleared: the parts of the chunk before keep their memory for these.
  while (parts.size() > span.pages()) parts.RemoveLast();
  while (parts.size() < span.pages()) parts.Add();
  std::int64_t bytes = 0;
  for (int i = 0; i < parts.size(); ++i) {
    const std::int64_t page = span.first_page + i;
    v1::StoredPart& part = parts[i];
    part.set_page(static_cast<std::uint32_t>(page));
    const std::vector<std::int64_t> tokens = cachestore::PartTokens(tensor, heads, page);
    const bool alike = std::count(tokens.begin(), tokens.end(), tokens[0]) ==
                       static_cast<std::ptrdiff_t>(tokens.size());
    part.mutable_tokens()->Assign(tokens.begin(), alike ? tokens.begin() + 1 : tokens.end());
    const std::int64_t part_bytes = cachestore::PartBytes(tensor.model->layout, heads.count());
    std::byte* const data = Next(room, part_bytes, *part.mutable_data(),
                                 [&](std::uint64_t offset) { part.set_offset(offset); });
    KVT_RETURN_IF_ERROR(reader.FillPart(place.layer, side, page, data));
    bytes += part_bytes;
  }
  const std::int64_t row_bytes = span.rows * heads.count() * tensor.model->source_row_bytes();
  std::byte* const rows = NextRows(room, row_bytes, side, chunk);
  if (row_bytes == 0) return bytes;
  KVT_RETURN_IF_ERROR(reader.FillRows(place.layer, side, span, rows));
  return bytes + row_bytes;
}

}  // namespace

absl::StatusOr<std::int64_t> WriteChunk(cachestore::SequenceReader& reader, const ChunkPlace& place,
                                        const ChunkRoom& room, v1::ReadChunk& chunk) {
  const cachestore::LayerOutput& layer = reader.layers()[place.layer];
  chunk.set_sequence_index(static_cast<std::uint32_t>(place.sequence));
  chunk.set_layer(static_cast<std::uint32_t>(layer.layer));
  chunk.set_first_token(static_cast<std::uint64_t>(place.first_token));
  chunk.set_num_tokens(static_cast<std::uint32_t>(place.tokens));
  ChunkRoom left = room;
  if (reader.stored()) {
    KVT_ASSIGN_OR_RETURN(const std::int64_t k, WriteStored(reader, place, Side::kK, left, chunk));
    KVT_ASSIGN_OR_RETURN(const std::int64_t v, WriteStored(reader, place, Side::kV, left, chunk));
    return k + v;
  }
  const std::int64_t k = place.tokens * layer.k_bytes_per_token();
  const std::int64_t v = place.tokens * layer.v_bytes_per_token();
  if (room.target != nullptr) {
    KVT_RETURN_IF_ERROR(
        reader.Fill(place.layer, place.first_token, place.tokens, room.target->k, room.target->v));
    return k + v;
  }
  std::byte* const k_data = NextRows(left, k, Side::kK, chunk);
  std::byte* const v_data = NextRows(left, v, Side::kV, chunk);
  KVT_RETURN_IF_ERROR(reader.Fill(place.layer, place.first_token, place.tokens, k_data, v_data));
  return k + v;
}

}  // namespace kvtier::service
