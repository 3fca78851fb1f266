#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "client/gpu_client.h"
#include "tests/e2e/live_server.h"
#include "tests/support/scrape.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"
#include "tests/support/variable.h"

namespace kvtier::testing {

using client::GpuClient;
using client::GpuOptions;

inline constexpr int kLayers = 2;
inline constexpr int kHeads = 2;
inline constexpr int kDim = 64;
inline constexpr std::int64_t kRow = kDim * 2;  // bytes of a head's token, in bf16
inline constexpr std::int64_t kTokenBytes = kHeads * kRow;

// Memory of the worker's GPU, by way of pinned host memory.
class GpuBytes {
 public:
  explicit GpuBytes(std::size_t bytes)
      : size_(bytes),
        gpu_(client::AllocateOnGpu(static_cast<std::int64_t>(bytes)).value()),
        host_(client::AllocatePinned(static_cast<std::int64_t>(bytes)).value()) {
    Set(std::string(bytes, '\x5a'));
  }
  void Set(const std::string& bytes) {
    std::memcpy(host_.get(), bytes.data(), size_);
    Copy(gpu_.get(), host_.get(), cudaMemcpyHostToDevice);
  }
  std::string Get() const {
    Copy(host_.get(), gpu_.get(), cudaMemcpyDeviceToHost);
    return {reinterpret_cast<const char*>(host_.get()), size_};
  }
  std::byte* data() const { return gpu_.get(); }
  transport::DevicePiece piece() const { return {data(), static_cast<std::int64_t>(size_)}; }

 private:
  void Copy(std::byte* to, const std::byte* from, cudaMemcpyKind kind) const {
    const client::GpuStream stream = client::MakeGpuStream().value();
    EXPECT_EQ(cudaMemcpyAsync(to, from, size_, kind, stream.get()), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
  }

  std::size_t size_;
  client::GpuMemory gpu_;
  client::PinnedMemory host_;
};

// Finite bf16 values of all sizes below 2.
inline std::string RandomRows(Random& random, std::int64_t tokens) {
  std::string bytes(static_cast<std::size_t>(tokens * kTokenBytes), '\0');
  for (std::size_t i = 0; i < bytes.size(); i += 2) {
    const auto bits = static_cast<std::uint16_t>(random.Between(0, 0xffff) & 0xbfff);
    std::memcpy(bytes.data() + i, &bits, sizeof(bits));
  }
  return bytes;
}

using Rows = std::vector<std::string>;  // K, V of layer 0, of layer 1

inline v1::ReadRequest RequestFor(const std::string& sequence) {
  v1::ReadRequest request;
  request.add_sequences()->set_sequence(sequence);
  return request;
}

// A server with a GPU, and a worker with another, or the same as if on another host.
class GpuTransfers : public ::testing::Test {
 protected:
  // With a GPU that isn't the server's, as the substitutes see it.
  void Start(const std::vector<std::string>& flags = {}, const std::string& device = "cuda:0") {
    std::vector<std::string> all = {"--memory=128MiB", std::string("--nccl-library=") + KVTIER_NCCL,
                                    "--nccl-memory=1MiB"};
    all.insert(all.end(), flags.begin(), flags.end());
    {
      const Variable of_server("TEST_DEVICE", device);
      server_.emplace(all);
    }
    host_.emplace("NCCL_HOSTID", "worker");
    client_ = server_->Connect({.transport = client::Transport::kInline});
    gpu_ = Make({});
    ASSERT_NE(gpu_, nullptr);
  }
  std::unique_ptr<GpuClient> Make(GpuOptions options) {
    options.nccl_library = KVTIER_NCCL;
    options.deadline = absl::Seconds(5);
    options.tell = [this](const std::string& said) { said_ += said + "\n"; };
    auto made = GpuClient::Make(*client_, options);
    EXPECT_THAT(made, IsOk());
    return made.ok() ? *std::move(made) : nullptr;
  }

  std::string Register(const std::string& format) {
    const auto registered = client_->RegisterModel(SmallModel(format, kLayers));
    EXPECT_THAT(registered, IsOk());
    return registered.ok() ? registered->model_id() : "";
  }

  Rows RandomData(std::int64_t tokens) {
    Rows rows(2 * kLayers);
    for (std::string& each : rows) each = RandomRows(random_, tokens);
    return rows;
  }

  // NHD, `step` tokens a chunk.
  static absl::Status Append(GpuClient& gpu, const std::string& model, const std::string& sequence,
                             const Rows& rows, std::int64_t step = 500) {
    client::AppendOptions options;
    options.open.set_sequence(sequence);
    options.open.set_model_id(model);
    auto stream = gpu.OpenAppend(options);
    if (!stream.ok()) return stream.status();
    std::vector<GpuBytes> memory;
    for (const std::string& each : rows) memory.emplace_back(each.size()).Set(each);
    const client::GpuStream computes = client::MakeGpuStream().value();
    const auto tokens = static_cast<std::int64_t>(rows[0].size()) / kTokenBytes;
    for (std::int64_t first = 0; first < tokens; first += step) {
      const std::int64_t count = std::min(step, tokens - first);
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        client::GpuChunk chunk;
        chunk.place.set_first_layer(layer);
        chunk.place.set_first_token(static_cast<std::uint64_t>(first));
        chunk.place.set_num_tokens(static_cast<std::uint32_t>(count));
        chunk.k = {memory[2 * layer].data() + first * kTokenBytes, count * kTokenBytes};
        chunk.v = {memory[2 * layer + 1].data() + first * kTokenBytes, count * kTokenBytes};
        const absl::Status sent = (*stream)->Send(chunk, computes.get());
        if (!sent.ok()) return sent;
      }
    }
    return (*stream)->Finish().status();
  }

  static std::size_t RowBytes(const v1::SequenceManifest& sequence) {
    return sequence.layers(0).dtype() == v1::DTYPE_FP8_E4M3 ? kDim : kDim * 2;
  }

  // As ReadInto puts them together.
  static absl::StatusOr<Rows> ReadOnHost(client::Client& client, const v1::ReadRequest& request) {
    Rows out;
    const auto read =
        client.ReadInto(request,
                        [&](const v1::SequenceManifest& sequence)
                            -> absl::StatusOr<std::vector<client::LayerTarget>> {
                          std::vector<client::LayerTarget> targets;
                          out.assign(2 * kLayers, std::string(sequence.num_tokens() *
                                                                  sequence.layers(0).num_heads() *
                                                                  RowBytes(sequence),
                                                              '\0'));
                          for (std::size_t i = 0; i < out.size(); i += 2) {
                            targets.push_back({.k = std::as_writable_bytes(std::span(out[i])),
                                               .v = std::as_writable_bytes(std::span(out[i + 1]))});
                          }
                          return targets;
                        });
    if (!read.ok()) return read.status();
    return out;
  }
  static absl::StatusOr<Rows> ReadOnGpu(GpuClient& gpu, const v1::ReadRequest& request) {
    std::vector<GpuBytes> memory;
    const auto read =
        gpu.Read(request,
                 [&](const v1::SequenceManifest& sequence)
                     -> absl::StatusOr<std::vector<client::GpuLayerTarget>> {
                   memory.clear();
                   std::vector<client::GpuLayerTarget> targets;
                   for (int i = 0; i < 2 * kLayers; ++i) {
                     memory.emplace_back(sequence.num_tokens() * sequence.layers(0).num_heads() *
                                         RowBytes(sequence));
                   }
                   for (std::size_t i = 0; i < memory.size(); i += 2) {
                     targets.push_back(
                         {.k = {.data = memory[i].data()}, .v = {.data = memory[i + 1].data()}});
                   }
                   return targets;
                 });
    if (!read.ok()) return read.status();
    Rows out;
    for (const GpuBytes& each : memory) out.push_back(each.Get());
    return out;
  }
  // Waits until so many are open at the server; how many are.
  int WaitForTransports(int wanted) {
    int open = -1;
    for (int look = 0; look < 100 && open != wanted; ++look) {
      if (look > 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      open = static_cast<int>(Series(Scrape(server_->metrics()))["kvtier_transports"]);
    }
    return open;
  }

  SeededRandom random_;
  std::string said_;
  std::optional<LiveServer> server_;
  std::optional<Variable> host_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<GpuClient> gpu_;  // goes first
};

}  // namespace kvtier::testing
