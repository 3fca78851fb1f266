#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "cachestore/sequence_reader.h"
#include "kvtier/v1/kv_tier.pb.h"

namespace kvtier::service {

// What one message of a read is to hold.
struct ChunkPlace {
  std::size_t sequence = 0;  // of the request
  std::size_t layer = 0;     // of the reader
  std::int64_t first_token = 0;
  std::int64_t tokens = 0;
};

// Fills `chunk`, whose strings keep their memory from chunk to chunk. How many bytes of K and V, as
// they travel.
absl::StatusOr<std::int64_t> WriteChunk(cachestore::SequenceReader& reader, const ChunkPlace& place,
                                        v1::ReadChunk& chunk);

}  // namespace kvtier::service
