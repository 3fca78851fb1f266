#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvtier/v1/kv_tier.pb.h"

namespace kvtier::client {

struct AppendOptions {
  v1::AppendOpen open;
  // Chunks sent and not acknowledged yet before Send waits; at least 1.
  int max_unacked_chunks = 8;
  std::uint64_t expected_bytes = 0;  // of all chunks, where it's known: for Transport::kAuto
};

// What a stream brought about. After an error, everything up to here holds.
struct AppendProgress {
  std::uint64_t received_tokens = 0;   // least over the layers and heads of the stream
  std::uint64_t committed_tokens = 0;  // of the sequence
  std::uint64_t skipped_tokens = 0;    // resent ones, over all chunks
  std::uint64_t saturated_values = 0;  // over all chunks
  std::uint64_t chunks = 0;            // acknowledged
};

// One append stream. Send overlaps with the acks of earlier chunks, at most `max_unacked_chunks`
// of them; the message in flight and the one being built are all the memory it takes. Dropping an
// unfinished stream cancels it. One thread sends; progress() may be asked from any.
class AppendStream {
 public:
  class Reactor;
  explicit AppendStream(std::unique_ptr<Reactor> reactor);
  AppendStream(const AppendStream&) = delete;
  AppendStream& operator=(const AppendStream&) = delete;
  ~AppendStream();

  // The ack of the opening message: received_tokens is where to start.
  const v1::AppendResponse& opened() const;
  AppendProgress progress() const;

  // Queues a chunk; waits while the window is full. The error is the stream's: also that of an
  // earlier chunk. Move the chunk in: its payload is not copied.
  // `keeps` is held until the ack, or the stream's end: what the server takes values from
  // meanwhile.
  absl::Status Send(v1::AppendChunk chunk, std::shared_ptr<const void> keeps = nullptr);
  // Waits for the last ack and ends the stream. Nothing may be sent after it.
  absl::StatusOr<AppendProgress> Finish();

 private:
  const std::unique_ptr<Reactor> reactor_;
};

}  // namespace kvtier::client
