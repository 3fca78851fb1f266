#include "service/rpc/read_chunk.h"

#include <algorithm>
#include <string>
#include <vector>

#include "cachestore/base/status_macros.h"

namespace kvtier::service {
namespace {

using cachestore::Side;
using StoredParts = google::protobuf::RepeatedPtrField<v1::StoredPart>;

// The strings keep their memory, so this clears nothing.
std::byte* Room(std::int64_t bytes, std::string& out) {
  out.resize(static_cast<std::size_t>(bytes));
  return reinterpret_cast<std::byte*>(out.data());
}

// One side of a chunk as stored. How many bytes.
absl::StatusOr<std::int64_t> WriteStored(cachestore::SequenceReader& reader,
                                         const ChunkPlace& place, Side side, StoredParts& parts,
                                         std::string& rows) {
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
    KVT_RETURN_IF_ERROR(
        reader.FillPart(place.layer, side, page, Room(part_bytes, *part.mutable_data())));
    bytes += part_bytes;
  }
  if (span.rows == 0) {
    rows.clear();
    return bytes;
  }
  const std::int64_t row_bytes = span.rows * heads.count() * tensor.model->source_row_bytes();
  KVT_RETURN_IF_ERROR(reader.FillRows(place.layer, side, span, Room(row_bytes, rows)));
  return bytes + row_bytes;
}

}  // namespace

absl::StatusOr<std::int64_t> WriteChunk(cachestore::SequenceReader& reader, const ChunkPlace& place,
                                        v1::ReadChunk& chunk) {
  const cachestore::LayerOutput& layer = reader.layers()[place.layer];
  chunk.set_sequence_index(static_cast<std::uint32_t>(place.sequence));
  chunk.set_layer(static_cast<std::uint32_t>(layer.layer));
  chunk.set_first_token(static_cast<std::uint64_t>(place.first_token));
  chunk.set_num_tokens(static_cast<std::uint32_t>(place.tokens));
  if (reader.stored()) {
    KVT_ASSIGN_OR_RETURN(
        const std::int64_t k,
        WriteStored(reader, place, Side::kK, *chunk.mutable_k_parts(), *chunk.mutable_k()));
    KVT_ASSIGN_OR_RETURN(
        const std::int64_t v,
        WriteStored(reader, place, Side::kV, *chunk.mutable_v_parts(), *chunk.mutable_v()));
    return k + v;
  }
  const std::int64_t k = place.tokens * layer.k_bytes_per_token();
  const std::int64_t v = place.tokens * layer.v_bytes_per_token();
  KVT_RETURN_IF_ERROR(reader.Fill(place.layer, place.first_token, place.tokens,
                                  Room(k, *chunk.mutable_k()), Room(v, *chunk.mutable_v())));
  return k + v;
}

}  // namespace kvtier::service
