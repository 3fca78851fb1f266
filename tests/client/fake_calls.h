#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "client/client.h"
#include "tests/client/fake_server.h"
#include "tests/support/status_matchers.h"

// What the tests of the client ask of a FakeServer: one small model and its values.
namespace kvtier::client {

using kvtier::testing::FakeServer;
using kvtier::testing::FakeService;
using kvtier::testing::IsOk;

constexpr std::uint32_t kLayers = 2;
constexpr std::uint32_t kHeads = 3;
constexpr std::uint32_t kKDim = 4;
constexpr std::uint32_t kVDim = 2;

inline std::unique_ptr<Client> ConnectTo(const FakeServer& server, ClientOptions options = {}) {
  auto client = Client::Connect(server.address(), options);
  EXPECT_THAT(client, IsOk());
  return *std::move(client);
}

inline v1::RegisterModelRequest Model() {
  v1::RegisterModelRequest request;
  request.mutable_spec()->set_name("tiny");
  for (std::uint32_t i = 0; i < kLayers; ++i) {
    v1::LayerSpec& layer = *request.mutable_spec()->add_layers();
    layer.set_kv_heads(kHeads);
    layer.set_k_head_dim(kKDim);
    layer.set_v_head_dim(kVDim);
  }
  return request;
}

// The two bytes of one value, told by where it stands.
inline void AppendValue(std::string& bytes, std::uint64_t layer, std::uint64_t token,
                        std::uint64_t head, std::uint64_t channel) {
  bytes.push_back(static_cast<char>(token));
  bytes.push_back(static_cast<char>(layer * 64 + head * 8 + channel));
}

inline std::string Values(std::uint32_t layer, std::uint64_t first, std::uint64_t tokens,
                          std::uint64_t dim) {
  std::string bytes;
  for (std::uint64_t t = first; t < first + tokens; ++t) {
    for (std::uint64_t h = 0; h < kHeads; ++h) {
      for (std::uint64_t d = 0; d < dim; ++d) AppendValue(bytes, layer, t, h, d);
    }
  }
  return bytes;
}

inline v1::AppendChunk Chunk(std::uint32_t layer, std::uint64_t first, std::uint32_t tokens) {
  v1::AppendChunk chunk;
  chunk.set_first_layer(layer);
  chunk.set_num_layers(1);
  chunk.set_first_token(first);
  chunk.set_num_tokens(tokens);
  chunk.set_k(Values(layer, first, tokens, kKDim));
  chunk.set_v(Values(layer, first, tokens, kVDim));
  return chunk;
}

inline AppendOptions Open(const std::string& sequence) {
  AppendOptions options;
  options.open.set_sequence(sequence);
  options.open.set_model_id("model-1");
  return options;
}

inline void Store(Client& client, const std::string& sequence, std::uint32_t tokens) {
  ASSERT_THAT(client.RegisterModel(Model()), IsOk());
  auto stream = client.OpenAppend(Open(sequence));
  ASSERT_THAT(stream, IsOk());
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    ASSERT_THAT((*stream)->Send(Chunk(layer, 0, tokens)), IsOk());
  }
  ASSERT_THAT((*stream)->Finish(), IsOk());
}

}  // namespace kvtier::client
