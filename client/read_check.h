#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvtier/v1/kv_tier.pb.h"

namespace kvtier::client {

// Bytes of a row of `dim` values; nothing for a type that this client does not know.
std::optional<std::uint64_t> RowBytes(v1::DType dtype, std::uint32_t dim);
bool IsFp8(v1::DType dtype);

// Of one layer of a manifest: later, and fewer, than the sequence's where the read is within
// windows.
std::uint64_t FirstToken(const v1::SequenceManifest& sequence, const v1::LayerManifest& layer);
std::uint64_t LayerTokens(const v1::SequenceManifest& sequence, const v1::LayerManifest& layer);

// Of K, V and parts, of a v1::AppendChunk or a v1::ReadChunk.
template <class Chunk>
std::uint64_t ChunkBytes(const Chunk& chunk) {
  std::uint64_t bytes = chunk.k().size() + chunk.v().size();
  for (const auto* parts : {&chunk.k_parts(), &chunk.v_parts()}) {
    for (const v1::StoredPart& part : *parts) bytes += part.data().size();
  }
  return bytes;
}

// What a read asked for: values; codes, of which only that all bytes come that were promised is
// looked at here, not what parts hold; or values as they are received (ReadRequest.follow), whose
// length the summary says.
enum class ReadKind { kValues, kStored, kFollowed };

// Holds a read's chunks against its manifest, so that what takes them need not doubt them: layer,
// tokens and bytes of each, scales of FP8 output, and at the end that nothing is missing. DATA_LOSS
// says what came and what was promised.
class ReadCheck {
 public:
  // `sequences`: as many as were asked for.
  absl::Status Begin(const v1::ReadManifest& manifest, int sequences,
                     ReadKind kind = ReadKind::kValues);
  absl::Status Take(const v1::ReadChunk& chunk) {
    return Take(chunk, {chunk.k().size(), chunk.v().size()});
  }
  // One whose K and V are elsewhere: what Expected says, so that only its place can be wrong.
  struct Sizes {
    std::uint64_t k = 0;
    std::uint64_t v = 0;
  };
  absl::StatusOr<Sizes> Expected(const v1::ReadChunk& chunk) const;
  absl::Status Take(const v1::ReadChunk& chunk, const Sizes& sizes);
  absl::Status End(const v1::ReadSummary& summary = {});

  // Chunks as stored say of their parts only where these are: their bytes can't be counted.
  void PartsAreElsewhere() { counts_ = false; }

  std::uint64_t bytes() const { return bytes_; }  // of the chunks so far
  const v1::ReadManifest& manifest() const { return manifest_; }
  const v1::SequenceManifest& sequence_of(const v1::ReadChunk& chunk) const;
  // Of a chunk that Take passed: the place of its layer in the sequence's manifest.
  std::size_t layer_index(const v1::ReadChunk& chunk) const;

 private:
  v1::ReadManifest manifest_;
  absl::Status CheckPlace(const v1::ReadChunk& chunk) const;
  std::optional<Sizes> SizesOf(const v1::ReadChunk& chunk) const;
  // What a read that followed turned out to be.
  absl::Status Learn(const v1::ReadSummary& summary);

  ReadKind kind_ = ReadKind::kValues;
  bool counts_ = true;
  std::uint64_t bytes_ = 0;
  std::vector<std::vector<std::uint64_t>> next_token_;  // by sequence and layer of the manifest
};

// One stretch of bytes that lies together both in a chunk and in the whole layer.
struct ByteRun {
  std::uint64_t chunk_offset = 0;
  std::uint64_t layer_offset = 0;
  std::uint64_t size = 0;
};

// How the tokens of a read lie: in a chunk as whole blocks, in the layer as one array of `tokens`.
struct ReadGeometry {
  v1::Layout layout = v1::LAYOUT_NHD;
  std::uint64_t block_tokens = 0;  // as asked for; 0: a chunk is one block
  std::uint64_t tokens = 0;        // of the layer
  std::uint64_t heads = 0;
  std::uint64_t vector_bytes = 0;  // one head of one token
};

// Calls `take` for each run of a chunk with the tokens [first, first + count) of the layer (counted
// from the read's first token), in the chunk's order; stops at an error and returns it.
absl::Status ForEachRun(const ReadGeometry& geometry, std::uint64_t first, std::uint64_t count,
                        const std::function<absl::Status(const ByteRun&)>& take);

}  // namespace kvtier::client
