#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "cachestore/sequence_reader.h"
#include "kvtier/v1/kv_tier.pb.h"
#include "service/rpc/nccl_transport.h"

namespace kvtier::service {

// What one message of a read is to hold.
struct ChunkPlace {
  std::size_t sequence = 0;  // of the request
  std::size_t layer = 0;     // of the reader
  std::int64_t first_token = 0;
  std::int64_t tokens = 0;
};

// Where K and V of one layer go that don't travel in messages.
struct LayerTarget {
  cachestore::BlockTarget k;
  cachestore::BlockTarget v;
};

// Where one chunk's K and V go: into the message; to where its layer has a target; or all of it,
// side by side, to `at`, in memory that begins at `base`. Over NCCL it's sent from `slot`.
struct ChunkRoom {
  const LayerTarget* target = nullptr;
  std::byte* at = nullptr;
  const std::byte* base = nullptr;
  std::shared_ptr<NcclTransport::Slot> slot = nullptr;
};

// Fills `chunk`, whose strings keep their memory from chunk to chunk, or says in it where its bytes
// are. How many bytes of K and V, as they travel.
absl::StatusOr<std::int64_t> WriteChunk(cachestore::SequenceReader& reader, const ChunkPlace& place,
                                        const ChunkRoom& room, v1::ReadChunk& chunk);

}  // namespace kvtier::service
