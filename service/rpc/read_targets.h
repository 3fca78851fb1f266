#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cachestore/sequence_reader.h"
#include "kvtier/v1/kv_tier.pb.h"
#include "service/rpc/read_chunk.h"
#include "service/rpc/read_ring.h"
#include "service/rpc/transports.h"
#include "transport/region.h"

namespace kvtier::service {

// Where the values of one read go that its messages don't hold (ReadRequest.target): every byte of
// it is checked to lie in the memory of the read's transport before the first is written. Over NCCL
// each chunk is made in a slot of the transport's, and sent. Where the request names no target, its
// messages hold them. Not thread-safe.
class ReadTargets {
 public:
  ReadTargets() = default;
  // `request` must stay. `on_news`: there may be room in a ring again; from any thread, outside
  // locks. NOT_FOUND as Transports::Find.
  static absl::StatusOr<ReadTargets> Open(Transports& transports, const v1::ReadRequest& request,
                                          std::function<void()> on_news);

  // The next sequence's, of `range`, with the layers that `reader` says. INVALID_ARGUMENT where the
  // target has no room for it.
  absl::Status Add(const v1::SequenceRange& wanted, const cachestore::SequenceReader& reader,
                   const cachestore::ReadRange& range);

  // Where the next chunk goes, of so many bytes. Nothing: once the reader has given room back.
  // INVALID_ARGUMENT where a ring is too small for it.
  absl::StatusOr<std::optional<ChunkRoom>> Room(std::size_t sequence, std::size_t layer,
                                                std::int64_t bytes);
  // The chunk is there, of so many bytes: over NCCL it's sent, and says by which transfer.
  absl::Status Filled(const ChunkRoom& room, std::int64_t bytes, v1::ReadChunk& chunk);
  void SayOffsets(std::size_t sequence, v1::SequenceManifest& manifest) const;
  // Of a chunk, where one in a message is to have `message_bytes`.
  std::int64_t ChunkBytes(std::int64_t message_bytes) const;

 private:
  // Of K or V of one layer.
  struct Shape {
    const char* name = "";
    std::int64_t token_bytes = 0;
    std::int64_t first_token = 0;
    std::int64_t tokens = 0;
  };
  struct Blocks {
    std::uint64_t offset = 0;
    std::uint64_t stride = 0;
  };
  absl::StatusOr<cachestore::BlockTarget> Next(const Shape& shape);
  absl::StatusOr<cachestore::BlockTarget> InBlocks(const Shape& shape, const Blocks& blocks,
                                                   const v1::SequenceRange& wanted) const;
  absl::Status CheckBlockIds(const v1::SequenceRange& wanted, std::int64_t tokens) const;
  absl::Status OpenNccl(std::function<void()> on_news);
  absl::StatusOr<std::optional<ChunkRoom>> NcclRoom(std::int64_t bytes);

  bool whole() const;  // neither blocks nor a ring

  const v1::ReadRequest* request_ = nullptr;
  std::shared_ptr<const transport::Region> memory_;
  std::optional<ReadRing> ring_;
  std::shared_ptr<NcclTransport> nccl_;
  std::shared_ptr<const void> nccl_news_;
  std::vector<std::byte> parts_;  // of a chunk as stored, which is made on the host
  std::uint64_t used_ = 0;        // of a whole target's bytes
  std::vector<std::vector<LayerTarget>> sequences_;
};

}  // namespace kvtier::service
