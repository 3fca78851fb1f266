#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/client.h"
#include "tests/client/fake_calls.h"

namespace kvtier::client {
namespace {

using kvtier::testing::StatusIs;
using ::testing::HasSubstr;

v1::ReadRequest ReadOf(const std::vector<std::string>& sequences) {
  v1::ReadRequest request;
  for (const std::string& sequence : sequences) request.add_sequences()->set_sequence(sequence);
  return request;
}

// Layers of a sequence, put together by ReadInto.
struct Assembled {
  std::vector<std::string> k, v;
};

absl::StatusOr<ReadResult> ReadWhole(Client& client, const v1::ReadRequest& request,
                                     std::vector<Assembled>& sequences) {
  sequences.clear();
  sequences.reserve(16);
  return client.ReadInto(
      request,
      [&](const v1::SequenceManifest& manifest) -> absl::StatusOr<std::vector<LayerTarget>> {
        Assembled& assembled = sequences.emplace_back();
        assembled.k.resize(static_cast<std::size_t>(manifest.layers_size()));
        assembled.v.resize(assembled.k.size());
        std::vector<LayerTarget> targets;
        for (std::size_t i = 0; i < assembled.k.size(); ++i) {
          const v1::LayerManifest& layer = manifest.layers(static_cast<int>(i));
          const std::uint64_t vectors = manifest.num_tokens() * layer.num_heads();
          assembled.k[i].resize(vectors * layer.k_head_dim() * 2);
          assembled.v[i].resize(vectors * layer.v_head_dim() * 2);
          targets.push_back({.k = std::as_writable_bytes(std::span(assembled.k[i])),
                             .v = std::as_writable_bytes(std::span(assembled.v[i]))});
        }
        return targets;
      });
}

// What a layer's values must be, in either layout.
std::string Expected(const v1::ReadRequest& request, std::uint64_t layer, std::uint64_t dim,
                     std::uint64_t first, std::uint64_t tokens) {
  const std::uint64_t heads = request.num_heads() > 0 ? request.num_heads() : kHeads;
  std::string bytes;
  for (std::uint64_t i = 0; i < tokens * heads; ++i) {
    const bool hnd = request.layout() == v1::LAYOUT_HND;
    const std::uint64_t token = hnd ? i % tokens : i / heads;
    const std::uint64_t head = request.first_head() + (hnd ? i / tokens : i % heads);
    for (std::uint64_t d = 0; d < dim; ++d) AppendValue(bytes, layer, first + token, head, d);
  }
  return bytes;
}

TEST(ClientRead, AssemblesEitherLayoutWithAndWithoutBlocks) {
  const FakeServer server;
  const auto client = ConnectTo(server);
  Store(*client, "a", 33);
  for (const v1::Layout layout : {v1::LAYOUT_NHD, v1::LAYOUT_HND}) {
    for (const std::uint32_t block : {0u, 4u, 16u, 64u}) {
      v1::ReadRequest request = ReadOf({"a"});
      request.set_layout(layout);
      request.set_block_tokens(block);
      std::vector<Assembled> sequences;
      const auto result = ReadWhole(*client, request, sequences);
      ASSERT_THAT(result, IsOk());
      EXPECT_EQ(result->summary.saturated_values(), 3u);
      EXPECT_EQ(result->manifest.sequences(0).num_tokens(), 33u);
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        EXPECT_EQ(sequences[0].k[layer], Expected(request, layer, kKDim, 0, 33)) << layout << block;
        EXPECT_EQ(sequences[0].v[layer], Expected(request, layer, kVDim, 0, 33)) << layout << block;
      }
    }
  }
}

TEST(ClientRead, AssemblesPartsOfSeveralSequences) {
  const FakeServer server;
  const auto client = ConnectTo(server);
  Store(*client, "a", 33);
  Store(*client, "b", 20);
  v1::ReadRequest request = ReadOf({"b", "a"});
  request.mutable_sequences(0)->set_first_token(5);
  request.mutable_sequences(0)->set_num_tokens(9);
  request.set_first_layer(1);
  request.set_first_head(1);
  request.set_num_heads(2);
  request.set_layout(v1::LAYOUT_HND);
  std::vector<Assembled> sequences;
  ASSERT_THAT(ReadWhole(*client, request, sequences), IsOk());
  ASSERT_EQ(sequences[0].k.size(), 1u);
  EXPECT_EQ(sequences[0].k[0], Expected(request, 1, kKDim, 5, 9));
  EXPECT_EQ(sequences[1].v[0], Expected(request, 1, kVDim, 0, 33));
}

// gRPC's own limit is 4 MiB; a server may send more.
TEST(ClientRead, TakesLargeChunks) {
  FakeServer server;
  server.service().read_chunk_tokens = 1 << 20;
  const auto client = ConnectTo(server);
  Store(*client, "a", 200'000);
  std::vector<Assembled> sequences;
  ASSERT_THAT(ReadWhole(*client, ReadOf({"a"}), sequences), IsOk());
  EXPECT_GT(sequences[0].k[0].size(), 4u << 20);
  EXPECT_EQ(sequences[0].k[0], Values(0, 0, 200'000, kKDim));
}

TEST(ClientRead, RefusesTargetsOfAnotherSize) {
  const FakeServer server;
  const auto client = ConnectTo(server);
  Store(*client, "a", 4);
  std::vector<std::byte> memory(4 * kHeads * kKDim * 2);
  const auto read = [&](std::vector<LayerTarget> targets) {
    return client->ReadInto(ReadOf({"a"}), [&](const v1::SequenceManifest&) { return targets; });
  };
  EXPECT_THAT(read({}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("2 layers, but 0")));
  EXPECT_THAT(read({{.k = memory, .v = memory}, {.k = memory, .v = memory}}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("96 for V; 96 and 48")));
}

TEST(ClientRead, AHandlersErrorEndsTheRead) {
  FakeServer server;
  server.service().read_chunk_tokens = 1;
  const auto client = ConnectTo(server);
  Store(*client, "a", 64);
  int chunks = 0;
  ReadHandlers handlers;
  handlers.on_chunk = [&](const v1::ReadChunk&) {
    return ++chunks < 3 ? absl::OkStatus() : absl::ResourceExhaustedError("the disk is full");
  };
  EXPECT_THAT(client->Read(ReadOf({"a"}), handlers),
              StatusIs(absl::StatusCode::kResourceExhausted, "the disk is full"));
  EXPECT_EQ(chunks, 3);
}

struct Tampered {
  std::function<void(v1::ReadResponse&)> change;
  const char* message;
};

TEST(ClientRead, NoticesWhatGotLostOnTheWay) {
  const std::vector<Tampered> tampered = {
      {[](v1::ReadResponse& m) {
         if (m.has_summary()) m.Clear();
       },
       "without a summary"},
      {[](v1::ReadResponse& m) {
         if (m.has_manifest()) m.Clear();
       },
       "not manifest, chunks"},
      {[](v1::ReadResponse& m) {
         if (m.has_chunk() && m.chunk().layer() == 1) m.Clear();
       },
       "layer 1 ended at token 0; the manifest says 33"},
      {[](v1::ReadResponse& m) {
         if (m.has_chunk()) m.mutable_chunk()->mutable_v()->pop_back();
       },
       "bytes of K and"},
      {[](v1::ReadResponse& m) {
         if (m.has_manifest()) m.mutable_manifest()->set_total_bytes(1);
       },
       "says 1 bytes"},
  };
  for (const Tampered& way : tampered) {
    FakeServer server;
    const auto client = ConnectTo(server);
    Store(*client, "a", 33);
    server.service().on_read = way.change;
    ReadHandlers handlers;
    handlers.on_chunk = [](const v1::ReadChunk&) { return absl::OkStatus(); };
    EXPECT_THAT(client->Read(ReadOf({"a"}), handlers),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr(way.message)));
  }
}

TEST(ClientRead, GivesUpOnAServerThatStandsStill) {
  FakeServer server;
  const auto client = ConnectTo(server, ClientOptions{.stall_limit = absl::Milliseconds(100)});
  Store(*client, "a", 33);
  absl::Notification go_on;
  server.service().on_read = [&](v1::ReadResponse& message) {
    if (message.has_summary()) go_on.WaitForNotification();
  };
  ReadHandlers handlers;
  handlers.on_chunk = [](const v1::ReadChunk&) { return absl::OkStatus(); };
  EXPECT_THAT(client->Read(ReadOf({"a"}), handlers),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("stood still for 0.1 s")));
  go_on.Notify();
}

// One client, many threads: each stream gets its own acks, each read its own bytes.

TEST(ClientRead, MayBeSharedByThreads) {
  FakeServer server;
  const auto client = ConnectTo(server);
  Store(*client, "a", 33);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 10; ++round) {
        std::vector<Assembled> sequences;
        EXPECT_THAT(ReadWhole(*client, ReadOf({"a"}), sequences), IsOk());
        EXPECT_EQ(sequences[0].k[1], Values(1, 0, 33, kKDim));
        EXPECT_THAT(client->Capacity({}), IsOk());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace kvtier::client
