#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "client/kv_file.h"
#include "client/stored_encoder.h"

namespace kvtier::client {

struct UploadOptions {
  AppendOptions append;                 // namespace, sequence, model id, ...; all layers and heads
  std::uint32_t chunk_tokens = 256;     // tokens of one layer in a message, at most
  std::uint64_t max_message_bytes = 0;  // of RegisterModel's reply; longer chunks are cut. 0: none
  // Set: what becomes final within a chunk travels as codes. The longer a chunk, the more does.
  std::shared_ptr<const StoredEncoder> encoder;
  bool seal = true;
  std::function<void(std::uint64_t bytes)> on_progress;  // of the file, sent so far; may be empty
};

struct UploadReport {
  std::uint64_t first_token = 0;        // where the sequence stood: tokens before it were not sent
  std::uint64_t sent_bytes = 0;         // of the file
  std::uint64_t transferred_bytes = 0;  // of K and V, as they travelled
  AppendProgress append;
  absl::Duration duration;  // from open to the last ack, or to Seal's reply
};

// Streams a file's K and V as one sequence, layer by layer, reading a chunk at a time, and seals
// it.
absl::StatusOr<UploadReport> Upload(Client& client, const KvFile& file,
                                    const UploadOptions& options);

// Tokens of a layer that one message can carry: `chunk_tokens`, or fewer. INVALID_ARGUMENT if not
// even one fits.
absl::StatusOr<std::uint32_t> ChunkTokens(const KvFile& file, std::uint32_t layer,
                                          const UploadOptions& options);

}  // namespace kvtier::client
