#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "tests/e2e/process.h"

namespace kvtier::testing {

// A kvtierd of this build on free ports, ready when the constructor returns; with the device that
// TEST_DEVICE names.
class LiveServer {
 public:
  explicit LiveServer(const std::vector<std::string>& flags = {},
                      const std::string& listen = "127.0.0.1:0");

  const std::string& listen() const { return listen_; }
  const std::string& metrics() const { return metrics_; }
  Process& process() { return *process_; }
  client::Client& client() { return *client_; }
  // Another connection.
  std::unique_ptr<client::Client> Connect(const client::ClientOptions& options = {}) const;

  v1::CapacityResponse Capacity();
  // Bytes of the budget that hold nothing.
  std::int64_t FreeBytes() { return static_cast<std::int64_t>(Capacity().memory().free()); }
  // Waits until that many bytes are free; what the last call saw.
  std::int64_t WaitForFreeBytes(std::int64_t bytes);

 private:
  TempFolder folder_;
  std::unique_ptr<Process> process_;
  std::string listen_;
  std::string metrics_;
  std::unique_ptr<client::Client> client_;
};

// A small model: `layers` layers of 2 KV heads of dim 64, bf16.
v1::RegisterModelRequest SmallModel(const std::string& kv_cache_dtype, int layers = 2);

// A chunk of `tokens` tokens of one layer of SmallModel, every value `value` (as bf16).
v1::AppendChunk SmallChunk(int layer, std::uint64_t first_token, std::uint32_t tokens,
                           float value = 0.5f);

// Opens a stream to all of a model's layers.
absl::StatusOr<std::unique_ptr<client::AppendStream>> OpenStream(client::Client& client,
                                                                 const std::string& model_id,
                                                                 const std::string& sequence,
                                                                 std::uint64_t epoch = 0);

// Waits until the server has acknowledged that many chunks.
void WaitForChunks(const client::AppendStream& stream, std::uint64_t chunks);

// Appends `tokens` tokens to every layer of SmallModel on one stream and finishes it.
absl::Status AppendAll(client::Client& client, const std::string& model_id,
                       const std::string& sequence, std::uint32_t tokens, int layers = 2);

}  // namespace kvtier::testing
