// A client that follows takes its time from the writer: layers as they come, however long that is.

#include <chrono>
#include <thread>
#include <vector>

#include "client/error_reason.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/live_server.h"
#include "tests/support/status_matchers.h"

namespace kvtier::testing {
namespace {

using ::testing::ElementsAre;

constexpr std::uint32_t kTokens = 100;

TEST(Follow, OutlastsASilenceAndEndsWithTheSeal) {
  LiveServer server;
  const auto model = server.client().RegisterModel(SmallModel("auto"));
  ASSERT_THAT(model, IsOk());
  const auto stream = OpenStream(server.client(), model->model_id(), "s");
  ASSERT_THAT(stream, IsOk());
  ASSERT_THAT((*stream)->Send(SmallChunk(0, 0, kTokens)), IsOk());
  client::ClientOptions options;
  options.stall_limit = absl::Milliseconds(500);
  const auto decode = client::Client::Connect(server.listen(), options);
  ASSERT_THAT(decode, IsOk());

  // What is sent and done once a layer has come, in a thread that the reader doesn't wait for.
  std::vector<std::thread> prefill;
  std::vector<std::uint32_t> layers;
  client::ReadHandlers handlers;
  handlers.on_chunk = [&](const v1::ReadChunk& chunk) {
    layers.push_back(chunk.layer());
    prefill.emplace_back([&, first = layers.size() == 1] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      if (first) {
        EXPECT_THAT((*stream)->Send(SmallChunk(1, 0, kTokens)), IsOk());
        return;
      }
      v1::SealRequest seal;
      seal.set_sequence("s");
      seal.set_tokens(kTokens);
      EXPECT_THAT(server.client().Seal(seal), IsOk());
    });
    return absl::OkStatus();
  };
  v1::ReadRequest request;
  request.set_follow(true);
  request.add_sequences()->set_sequence("s");
  const auto result = (*decode)->Read(request, handlers);
  for (std::thread& thread : prefill) thread.join();
  ASSERT_THAT(result, IsOk());
  EXPECT_THAT(layers, ElementsAre(0, 1));
  EXPECT_THAT(result->summary.tokens(), ElementsAre(kTokens));
  EXPECT_EQ(result->manifest.sequences(0).committed_tokens(), 0u);

  v1::RemoveRequest remove;
  remove.set_sequence("s");
  ASSERT_THAT(server.client().Remove(remove), IsOk());
  EXPECT_EQ(client::ErrorReason((*decode)->Read(request, handlers).status()), "UNKNOWN_SEQUENCE");
}

// Who has read what there was goes on from there.
TEST(Follow, BeginsWhereItIsTold) {
  LiveServer server;
  const auto model = server.client().RegisterModel(SmallModel("auto"));
  ASSERT_THAT(model, IsOk());
  ASSERT_THAT(AppendAll(server.client(), model->model_id(), "s", kTokens), IsOk());
  v1::SealRequest seal;
  seal.set_sequence("s");
  seal.set_tokens(kTokens);
  ASSERT_THAT(server.client().Seal(seal), IsOk());
  v1::ReadRequest request;
  request.set_follow(true);
  request.add_sequences()->set_sequence("s");
  request.mutable_sequences(0)->set_first_token(70);
  std::vector<std::uint64_t> first;
  client::ReadHandlers handlers;
  handlers.on_chunk = [&](const v1::ReadChunk& chunk) {
    first.push_back(chunk.first_token());
    return absl::OkStatus();
  };
  const auto result = server.client().Read(request, handlers);
  ASSERT_THAT(result, IsOk());
  EXPECT_THAT(first, ElementsAre(70, 70));
  EXPECT_THAT(result->summary.tokens(), ElementsAre(kTokens - 70));
}

}  // namespace
}  // namespace kvtier::testing
