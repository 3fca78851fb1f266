#include "tests/e2e/live_server.h"

#include <bit>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "gtest/gtest.h"
#include "tests/support/variable.h"

namespace kvtier::testing {
namespace {

constexpr int kHeads = 2;
constexpr int kDim = 64;
constexpr auto kPoll = std::chrono::milliseconds(10);
constexpr auto kPatience = std::chrono::seconds(20);

std::string Bf16Bytes(float value, std::size_t count) {
  const auto bits = std::bit_cast<std::uint32_t>(value) >> 16;
  std::string bytes;
  for (std::size_t i = 0; i < count; ++i) {
    bytes.push_back(static_cast<char>(bits & 0xff));
    bytes.push_back(static_cast<char>(bits >> 8));
  }
  return bytes;
}

}  // namespace

LiveServer::LiveServer(const std::vector<std::string>& flags, const std::string& listen) {
  const std::string ready = folder_ / "ready.json";
  const std::string device = VariableOr("TEST_DEVICE", "host");
  // NOLINTNEXTLINE(bugprone-branch-clone): without an emulated GPU they are the same
  const char* const built = device == "host" ? KVTIER_KVTIERD : KVTIER_GPU_KVTIERD;
  std::vector<std::string> command = {
      VariableOr("TEST_KVTIERD", built), "--listen=" + listen, "--health-listen=127.0.0.1:0",
      "--metrics-listen=127.0.0.1:0",    "--device=" + device, "--ready-file=" + ready};
  command.insert(command.end(), flags.begin(), flags.end());
  process_ = std::make_unique<Process>(command);
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!std::ifstream(ready).good() && process_->running() &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kPoll);
  }
  const auto addresses = nlohmann::json::parse(std::ifstream(ready), nullptr, false);
  if (addresses.is_discarded()) {
    ADD_FAILURE() << "kvtierd did not get ready:\n" << process_->Output();
    return;
  }
  listen_ = addresses.at("listen");
  metrics_ = addresses.at("metrics");
  client_ = Connect();
}

std::unique_ptr<client::Client> LiveServer::Connect(const client::ClientOptions& options) const {
  auto client = client::Client::Connect(listen_, options);
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

v1::CapacityResponse LiveServer::Capacity() {
  auto capacity = client().Capacity({});
  EXPECT_TRUE(capacity.ok()) << capacity.status();
  return capacity.ok() ? *capacity : v1::CapacityResponse{};
}

std::int64_t LiveServer::WaitForFreeBytes(std::int64_t bytes) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  std::int64_t free = FreeBytes();
  while (free != bytes && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kPoll);
    free = FreeBytes();
  }
  return free;
}

v1::RegisterModelRequest SmallModel(const std::string& kv_cache_dtype, int layers) {
  v1::RegisterModelRequest request;
  request.mutable_spec()->set_name("small");
  request.mutable_spec()->set_source_dtype(v1::DTYPE_BF16);
  for (int i = 0; i < layers; ++i) {
    v1::LayerSpec& layer = *request.mutable_spec()->add_layers();
    layer.set_kind(v1::LAYER_KIND_FULL);
    layer.set_kv_heads(kHeads);
    layer.set_k_head_dim(kDim);
    layer.set_v_head_dim(kDim);
  }
  request.mutable_policy()->set_kv_cache_dtype(kv_cache_dtype);
  return request;
}

v1::AppendChunk SmallChunk(int layer, std::uint64_t first_token, std::uint32_t tokens,
                           float value) {
  v1::AppendChunk chunk;
  chunk.set_first_layer(static_cast<std::uint32_t>(layer));
  chunk.set_first_token(first_token);
  chunk.set_num_tokens(tokens);
  chunk.set_k(Bf16Bytes(value, std::size_t{tokens} * kHeads * kDim));
  chunk.set_v(chunk.k());
  return chunk;
}

absl::StatusOr<std::unique_ptr<client::AppendStream>> OpenStream(client::Client& client,
                                                                 const std::string& model_id,
                                                                 const std::string& sequence,
                                                                 std::uint64_t epoch) {
  client::AppendOptions options;
  options.open.set_sequence(sequence);
  options.open.set_model_id(model_id);
  options.open.set_writer_epoch(epoch);
  return client.OpenAppend(options);
}

void WaitForChunks(const client::AppendStream& stream, std::uint64_t chunks) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (stream.progress().chunks < chunks && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kPoll);
  }
  EXPECT_GE(stream.progress().chunks, chunks);
}

absl::Status AppendAll(client::Client& client, const std::string& model_id,
                       const std::string& sequence, std::uint32_t tokens, int layers) {
  auto stream = OpenStream(client, model_id, sequence);
  if (!stream.ok()) return stream.status();
  for (int layer = 0; layer < layers; ++layer) {
    if (absl::Status sent = (*stream)->Send(SmallChunk(layer, 0, tokens)); !sent.ok()) return sent;
  }
  return (*stream)->Finish().status();
}

}  // namespace kvtier::testing
