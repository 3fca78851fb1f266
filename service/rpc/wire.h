#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cachestore/chunk.h"
#include "cachestore/store.h"
#include "kvtier/v1/kv_tier.pb.h"
#include "transport/device_piece.h"
#include "transport/region.h"

// Proto to domain. All doubt about what a client sent ends here: what these return is within its
// bounds. Errors are INVALID_ARGUMENT (RESOURCE_EXHAUSTED for size) and name the field as the
// client wrote it.
namespace kvtier::service {

// INVALID_ARGUMENT, of a field that `message` names.
absl::Status Refuse(const std::string& message);

absl::StatusOr<std::string> NamespaceFrom(const std::string& name_space);
// `field`: what messages call the sequence.
absl::StatusOr<cachestore::SequenceKey> KeyFrom(const std::string& name_space,
                                                const std::string& sequence,
                                                const char* field = "sequence");

absl::StatusOr<cachestore::ModelRequest> ModelRequestFrom(const v1::RegisterModelRequest& request);

// Whether it fits its model is the store's to say.
cachestore::Prompt PromptFrom(const v1::Prompt& prompt);

// 0: as the store has it by default.
absl::StatusOr<absl::Duration> GrantDurationFrom(std::uint64_t milliseconds);
absl::StatusOr<cachestore::PinKind> PinKindFrom(v1::PinKind kind);
absl::StatusOr<cachestore::Pressure> PressureFrom(v1::Pressure pressure);
absl::StatusOr<std::int64_t> QuotaFrom(std::uint64_t bytes);

// Without on_end, which the caller sets.
absl::StatusOr<cachestore::WriterRequest> WriterRequestFrom(const v1::AppendOpen& open);

// Of what a client says where in a transport's memory.
inline constexpr std::uint64_t kShmAlignment = 16;

// How a stream lays out its chunks, where it has them, and where its sequence's residual begins to
// count.
struct SourceLayout {
  std::int64_t residual_origin = 0;
  // Where chunks have values that are not inside; null: nowhere.
  std::shared_ptr<const transport::Region> memory;
  bool on_device = false;    // that memory is the device's
  bool heads_first = false;  // HND
  bool fused = false;
  bool saturate_non_finite = false;
};
absl::StatusOr<SourceLayout> SourceLayoutFrom(const v1::AppendOpen& open);

// A view into `chunk` and the layout's memory, which must stay as they are while it is in use.
struct ChunkView {
  cachestore::Chunk chunk;
  // Of values in the layout's memory; else of no bytes.
  transport::DevicePiece k, v;
};
absl::StatusOr<ChunkView> ChunkFrom(const v1::AppendChunk& chunk, const cachestore::Model& model,
                                    const cachestore::Shard& shard, const SourceLayout& layout);

// A token count or position: below 2^32.
absl::StatusOr<std::int64_t> TokensFrom(std::uint64_t tokens, const char* field);

absl::StatusOr<cachestore::ReadFormat> ReadFormatFrom(const v1::ReadRequest& request);
absl::StatusOr<cachestore::ReadRange> ReadRangeFrom(const v1::ReadRequest& request,
                                                    const v1::SequenceRange& range);

}  // namespace kvtier::service
