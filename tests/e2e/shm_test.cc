// K and V through memory that client and server share: the same values as inside messages, in every
// format, layout and block size, put where the reader wants them, and nothing is left behind.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/error_reason.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/live_server.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace kvtier::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kLayers = 2;
constexpr int kHeads = 2;
constexpr int kDim = 64;
constexpr std::uint32_t kTokenBytes = kHeads * kDim * 2;  // of K, and of V, in bf16

// Finite bf16 values of all sizes below 2.
std::string RandomRows(Random& random, std::uint32_t tokens) {
  std::string bytes(std::size_t{tokens} * kTokenBytes, '\0');
  for (std::size_t i = 0; i < bytes.size(); i += 2) {
    const auto bits = static_cast<std::uint16_t>(random.Between(0, 0xffff) & 0xbfff);
    std::memcpy(bytes.data() + i, &bits, sizeof(bits));
  }
  return bytes;
}

class Shm : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    server_ = std::make_unique<LiveServer>(std::vector<std::string>{"--memory=128MiB"});
  }
  static void TearDownTestSuite() { server_.reset(); }

  // Both ends of the same sequences: smaller than what is read, so that the ring goes around.
  void SetUp() override {
    shared_ = server_->Connect({.transport = client::Transport::kShm, .shm_bytes = 10 << 20});
    inline_ = server_->Connect({.transport = client::Transport::kInline});
  }
  void TearDown() override {
    for (const auto* name : {"by shm", "inline"}) Remove(name);
    shared_.reset();
    EXPECT_EQ(WaitForRegions(0), 0);
  }

  static void Remove(const std::string& sequence) {
    v1::RemoveRequest request;
    request.set_sequence(sequence);
    server_->client().Remove(request).IgnoreError();
  }
  // Waits until the server has mapped so many; what the last look saw.
  static int WaitForRegions(int regions) {
    int mapped = -1;
    for (int look = 0; look < 1000 && mapped != regions; ++look) {
      if (look > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      mapped = 0;
      std::ifstream maps("/proc/" + std::to_string(server_->process().pid()) + "/maps");
      for (std::string line; std::getline(maps, line);)
        mapped += line.find("memfd:kvtier") != std::string::npos ? 1 : 0;
    }
    return mapped;
  }

  std::string Register(const std::string& format) {
    const auto registered = inline_->RegisterModel(SmallModel(format, kLayers));
    EXPECT_THAT(registered, IsOk());
    return registered.ok() ? registered->model_id() : "";
  }
  // `data[layer][0]` is K, `[1]` V.
  absl::Status Append(client::Client& client, const std::string& model, const std::string& sequence,
                      const std::vector<std::vector<std::string>>& data) {
    auto stream = OpenStream(client, model, sequence);
    if (!stream.ok()) return stream.status();
    const auto tokens = static_cast<std::uint32_t>(data[0][0].size() / kTokenBytes);
    for (std::uint32_t first = 0; first < tokens; first += 500) {
      const std::uint32_t count = std::min(500u, tokens - first);
      for (int layer = 0; layer < kLayers; ++layer) {
        const auto& rows = data[static_cast<std::size_t>(layer)];
        v1::AppendChunk chunk;
        chunk.set_first_layer(static_cast<std::uint32_t>(layer));
        chunk.set_first_token(first);
        chunk.set_num_tokens(count);
        chunk.set_k(
            rows[0].substr(std::size_t{first} * kTokenBytes, std::size_t{count} * kTokenBytes));
        chunk.set_v(
            rows[1].substr(std::size_t{first} * kTokenBytes, std::size_t{count} * kTokenBytes));
        if (absl::Status sent = (*stream)->Send(std::move(chunk)); !sent.ok()) return sent;
      }
    }
    return (*stream)->Finish().status();
  }
  std::vector<std::vector<std::string>> RandomData(std::uint32_t tokens) {
    std::vector<std::vector<std::string>> data(kLayers);
    for (auto& layer : data) layer = {RandomRows(random_, tokens), RandomRows(random_, tokens)};
    return data;
  }

  // K, V of layer 0, of layer 1, as ReadInto puts them together.
  static absl::StatusOr<std::vector<std::string>> ReadAll(client::Client& client,
                                                          const v1::ReadRequest& request) {
    std::vector<std::string> out;
    const auto place = [&](const v1::SequenceManifest& sequence)
        -> absl::StatusOr<std::vector<client::LayerTarget>> {
      std::vector<client::LayerTarget> targets;
      out.resize(static_cast<std::size_t>(sequence.layers_size()) * 2);
      for (std::size_t i = 0; i < out.size(); i += 2) {
        const bool fp8 = sequence.layers(static_cast<int>(i / 2)).dtype() == v1::DTYPE_FP8_E4M3;
        const std::size_t bytes =
            sequence.num_tokens() * sequence.layers(0).num_heads() * kDim * (fp8 ? 1 : 2);
        for (const std::size_t side : {i, i + 1}) out[side].resize(bytes);
        targets.push_back({.k = std::as_writable_bytes(std::span(out[i])),
                           .v = std::as_writable_bytes(std::span(out[i + 1]))});
      }
      return targets;
    };
    const auto read = client.ReadInto(request, place);
    if (!read.ok()) return read.status();
    return out;
  }

  static v1::ReadRequest RequestFor(const std::string& sequence) {
    v1::ReadRequest request;
    request.add_sequences()->set_sequence(sequence);
    return request;
  }

  static std::unique_ptr<LiveServer> server_;
  SeededRandom random_;
  std::unique_ptr<client::Client> shared_;
  std::unique_ptr<client::Client> inline_;
};
std::unique_ptr<LiveServer> Shm::server_;

TEST_F(Shm, EveryFormatLayoutAndBlockSizeGivesWhatMessagesGive) {
  constexpr std::uint32_t kTokens = 20'000;  // 20 MB a sequence
  const auto data = RandomData(kTokens);
  for (const auto* format : {"auto", "fp8_e4m3", "int8_per_token_head", "kivi2"}) {
    const std::string model = Register(format);
    ASSERT_THAT(Append(*shared_, model, "by shm", data), IsOk());
    ASSERT_THAT(Append(*inline_, model, "inline", data), IsOk());
    for (const v1::Layout layout : {v1::LAYOUT_NHD, v1::LAYOUT_HND}) {
      for (const std::uint32_t block_tokens : {0u, 48u}) {
        for (const v1::ReadAs as : {v1::READ_AS_SOURCE, v1::READ_AS_FP8_E4M3}) {
          v1::ReadRequest request = RequestFor("by shm");
          request.set_layout(layout);
          request.set_block_tokens(block_tokens);
          request.set_as(as);
          const auto by_shm = ReadAll(*shared_, request);
          request.mutable_sequences(0)->set_sequence("inline");
          const auto inside = ReadAll(*inline_, request);
          ASSERT_THAT(by_shm, IsOk()) << format;
          ASSERT_THAT(inside, IsOk()) << format;
          EXPECT_TRUE(*by_shm == *inside)
              << format << ", layout " << layout << ", blocks of " << block_tokens << ", as " << as;
        }
      }
    }
    Remove("by shm");
    Remove("inline");
  }
  EXPECT_EQ(shared_->transport(), "shm");
  EXPECT_EQ(inline_->transport(), "inline");
}

TEST_F(Shm, AWorkersOwnMemoryNeedsNoCopy) {
  constexpr std::uint32_t kTokens = 3000;
  const auto memory = shared_->Share(8 << 20).value();
  const auto data = RandomData(kTokens);
  const std::string model = Register("auto");
  client::AppendOptions options;
  options.open.set_sequence("by shm");
  options.open.set_model_id(model);
  options.open.set_transport_id(memory->transport_id());
  auto stream = shared_->OpenAppend(options);
  ASSERT_THAT(stream, IsOk());
  std::uint64_t at = 4096;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    v1::AppendChunk chunk;
    chunk.set_first_layer(layer);
    chunk.set_num_tokens(kTokens);
    for (const int side : {0, 1}) {
      const std::string& rows = data[layer][static_cast<std::size_t>(side)];
      std::memcpy(memory->At(at, rows.size()), rows.data(), rows.size());
      side == 0 ? chunk.set_k_offset(at) : chunk.set_v_offset(at);
      at += rows.size();
    }
    ASSERT_THAT((*stream)->Send(std::move(chunk)), IsOk());
  }
  ASSERT_THAT((*stream)->Finish(), IsOk());

  // All of it, layer after layer.
  v1::ReadRequest request = RequestFor("by shm");
  request.mutable_target()->set_transport_id(memory->transport_id());
  request.mutable_target()->set_offset(at);
  request.mutable_target()->set_bytes(4ull * kTokens * kTokenBytes);
  const auto whole = shared_->Read(request, {});
  ASSERT_THAT(whole, IsOk());
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    const v1::LayerManifest& manifest =
        whole->manifest.sequences(0).layers(static_cast<int>(layer));
    const std::string &k = data[layer][0], &v = data[layer][1];
    EXPECT_EQ(std::memcmp(memory->At(manifest.k_offset(), k.size()), k.data(), k.size()), 0);
    EXPECT_EQ(std::memcmp(memory->At(manifest.v_offset(), v.size()), v.data(), v.size()), 0);
  }
}

// As an engine keeps its cache: [blocks, K and V, block_tokens, heads, dim], by a block table.
TEST_F(Shm, AnEnginesOwnBlocksAreFilledAndNoOthers) {
  constexpr std::uint32_t kTokens = 1000, kBlock = 32, kBlocks = 100;
  constexpr std::uint64_t kBlockBytes = kBlock * kTokenBytes;
  constexpr std::uint64_t kLayerBytes = 2 * kBlockBytes * kBlocks;
  const auto memory = shared_->Share(kLayers * kLayerBytes).value();
  std::memset(memory->data(), 0x7e, static_cast<std::size_t>(memory->size()));
  const auto data = RandomData(kTokens);
  const std::string model = Register("auto");
  ASSERT_THAT(Append(*inline_, model, "inline", data), IsOk());

  v1::ReadRequest request = RequestFor("inline");
  request.set_block_tokens(kBlock);
  std::vector<std::uint32_t> table(kBlocks);
  for (std::uint32_t i = 0; i < kBlocks; ++i) table[i] = i;
  std::shuffle(table.begin(), table.end(), random_.engine());
  table.resize((kTokens + kBlock - 1) / kBlock);
  request.mutable_sequences(0)->mutable_block_ids()->Add(table.begin(), table.end());
  request.mutable_target()->set_transport_id(memory->transport_id());
  for (std::uint64_t layer = 0; layer < kLayers; ++layer) {
    v1::LayerBlocks& blocks = *request.mutable_target()->add_layers();
    blocks.set_k_offset(layer * kLayerBytes);
    blocks.set_v_offset(layer * kLayerBytes + kBlockBytes);
    blocks.set_k_block_stride(2 * kBlockBytes);
    blocks.set_v_block_stride(2 * kBlockBytes);
  }
  ASSERT_THAT(shared_->Read(request, {}), IsOk());

  std::string expected(static_cast<std::size_t>(memory->size()), '\x7e');
  for (std::uint64_t layer = 0; layer < kLayers; ++layer) {
    for (std::size_t i = 0; i < table.size(); ++i) {
      for (const std::uint64_t side : {0, 1}) {
        const std::string rows = data[layer][side].substr(i * kBlockBytes, kBlockBytes);
        const std::uint64_t at = layer * kLayerBytes + (2 * table[i] + side) * kBlockBytes;
        std::copy(rows.begin(), rows.end(), expected.begin() + static_cast<std::ptrdiff_t>(at));
      }
    }
  }
  EXPECT_EQ(std::memcmp(memory->data(), expected.data(), expected.size()), 0);
}

TEST_F(Shm, WhatIsFollowedComesThroughARing) {
  constexpr std::uint32_t kTokens = 5000;
  const auto data = RandomData(kTokens);
  const std::string model = Register("auto");
  ASSERT_THAT(Append(*shared_, model, "by shm", data), IsOk());
  v1::SealRequest seal;
  seal.set_sequence("by shm");
  seal.set_tokens(kTokens);
  ASSERT_THAT(server_->client().Seal(seal), IsOk());
  v1::ReadRequest request = RequestFor("by shm");
  request.set_follow(true);
  std::vector<std::string> k(kLayers), v(kLayers);
  const auto read =
      shared_->Read(request, {.on_manifest = {}, .on_chunk = [&](const v1::ReadChunk& chunk) {
                                k[chunk.layer()] += chunk.k();
                                v[chunk.layer()] += chunk.v();
                                return absl::OkStatus();
                              }});
  ASSERT_THAT(read, IsOk());
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_TRUE(k[layer] == data[layer][0] && v[layer] == data[layer][1]) << layer;
  }
}

TEST_F(Shm, CodesComeThroughARingAsInsideMessages) {
  const std::string model = Register("kivi2");
  ASSERT_THAT(Append(*inline_, model, "inline", RandomData(3000)), IsOk());
  const auto memory = shared_->Share(16 << 20).value();
  v1::ReadRequest request = RequestFor("inline");
  request.set_as(v1::READ_AS_STORED);
  std::string inside, by_ring;  // parts and rows of K, as they come
  std::size_t part_bytes = 0;
  const auto take = [&](const v1::ReadChunk& chunk) {
    for (const v1::StoredPart& part : chunk.k_parts()) inside += part.data();
    if (chunk.k_parts_size() > 0) part_bytes = chunk.k_parts(0).data().size();
    return absl::OkStatus();
  };
  ASSERT_THAT(inline_->Read(request, {.on_manifest = {}, .on_chunk = take}), IsOk());
  request.mutable_target()->set_transport_id(memory->transport_id());
  request.mutable_target()->set_bytes(static_cast<std::uint64_t>(memory->size()));
  request.mutable_target()->set_ring(true);
  const auto find = [&](const v1::ReadChunk& chunk) {
    for (const v1::StoredPart& part : chunk.k_parts()) {
      EXPECT_THAT(part.data(), IsEmpty());
      by_ring.append(reinterpret_cast<const char*>(memory->At(part.offset(), part_bytes)),
                     part_bytes);
    }
    return absl::OkStatus();
  };
  ASSERT_THAT(shared_->Read(request, {.on_manifest = {}, .on_chunk = find}), IsOk());
  EXPECT_GT(inside.size(), 0u);
  EXPECT_TRUE(by_ring == inside);
}

TEST_F(Shm, BlocksAsLargeAsTheRing) {
  constexpr std::uint32_t kTokens = 30'000;
  const auto data = RandomData(kTokens);
  const std::string model = Register("auto");
  ASSERT_THAT(Append(*shared_, model, "by shm", data), IsOk());
  v1::ReadRequest request = RequestFor("by shm");
  for (const std::uint32_t block_tokens : {4000u, 4096u}) {
    request.set_block_tokens(block_tokens);
    const auto read = ReadAll(*shared_, request);
    ASSERT_THAT(read, IsOk());
    EXPECT_TRUE((*read)[0] == data[0][0] && (*read)[3] == data[1][1]);
  }
}

// What this end breaks off the server may be working on still: no other gets that memory.
TEST_F(Shm, WhatIsBrokenOffIsNotLentAgain) {
  const std::string model = Register("auto");
  const auto data = RandomData(20'000);
  ASSERT_THAT(Append(*shared_, model, "by shm", data), IsOk());
  for (int i = 0; i < 5; ++i) {
    const auto broken = shared_->Read(RequestFor("by shm"),
                                      {.on_manifest = {}, .on_chunk = [](const v1::ReadChunk&) {
                                         return absl::CancelledError("enough");
                                       }});
    EXPECT_EQ(broken.status().code(), absl::StatusCode::kCancelled);
    const auto read = ReadAll(*shared_, RequestFor("by shm"));
    ASSERT_THAT(read, IsOk());
    EXPECT_TRUE((*read)[0] == data[0][0] && (*read)[3] == data[1][1]);
  }
  EXPECT_EQ(shared_->transport(), "shm");
}

TEST_F(Shm, AServerThatRestartedIsSharedWithAnew) {
  LiveServer first({"--memory=16MiB"});
  const auto client = first.Connect({.transport = client::Transport::kShm});
  const std::string model = client->RegisterModel(SmallModel("auto")).value().model_id();
  ASSERT_THAT(AppendAll(*client, model, "s", 100), IsOk());
  first.process().Signal(SIGKILL);
  first.process().Wait(10);
  LiveServer second({"--memory=16MiB", "--listen=" + first.listen()});
  ASSERT_THAT(client->RegisterModel(SmallModel("auto")), IsOk());
  EXPECT_THAT(AppendAll(*client, model, "s", 100), IsOk());
  EXPECT_THAT(ReadAll(*client, RequestFor("s")), IsOk());
  EXPECT_EQ(client->transport(), "shm");
}

TEST_F(Shm, WhereThereIsNoneMessagesDo) {
  LiveServer server({"--memory=16MiB", "--shm-socket="});
  std::string told;
  const auto client = server.Connect({.transport = client::Transport::kAuto,
                                      .tell = [&](const std::string& text) { told = text; }});
  const std::string model = client->RegisterModel(SmallModel("auto")).value().model_id();
  client::AppendOptions options;
  options.open.set_sequence("s");
  options.open.set_model_id(model);
  options.expected_bytes = 1 << 30;
  EXPECT_THAT(client->OpenAppend(options), IsOk());
  EXPECT_THAT(told, HasSubstr("inside gRPC messages: no shared memory here: shm_socket is empty"));
  const auto only_shm = server.Connect({.transport = client::Transport::kShm});
  const auto refused = OpenStream(*only_shm, model, "t");
  EXPECT_EQ(client::ErrorReason(refused.status()), "TRANSPORT_UNAVAILABLE");
}

}  // namespace
}  // namespace kvtier::testing
