#include "client/client.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/error_reason.h"
#include "tests/client/fake_calls.h"

namespace kvtier::client {
namespace {

using kvtier::testing::ErrorWithReason;
using kvtier::testing::StatusIs;
using ::testing::_;
using ::testing::HasSubstr;

TEST(Client, CarriesCodeMessageAndReasonOfAnError) {
  const FakeServer server;
  const auto client = ConnectTo(server);
  v1::RegisterModelRequest request = Model();
  request.mutable_policy()->set_kv_cache_dtype("nonsense");
  const auto reply = client->RegisterModel(request);
  EXPECT_THAT(reply,
              StatusIs(absl::StatusCode::kInvalidArgument, "policy.kv_cache_dtype is nonsense"));
  EXPECT_EQ(ErrorReason(reply.status()), "UNKNOWN_FORMAT");
  EXPECT_EQ(ErrorReason(absl::InternalError("from here")), "");
}

TEST(Client, ReachesEveryUnaryMethod) {
  const FakeServer server;
  const auto client = ConnectTo(server);
  Store(*client, "a", 5);
  v1::SealRequest seal;
  seal.set_sequence("a");
  seal.set_tokens(4);
  EXPECT_THAT(client->Seal(seal), StatusIs(absl::StatusCode::kFailedPrecondition, _));
  seal.set_tokens(5);
  EXPECT_EQ(client->Seal(seal)->tokens(), 5u);
  v1::DescribeRequest describe;
  describe.set_sequence("a");
  EXPECT_EQ(client->Describe(describe)->info().committed_tokens(), 5u);
  EXPECT_EQ(client->ListSequences({})->sequences(0).sequence(), "a");
  EXPECT_EQ(client->Capacity({})->models(0).more_tokens(), 12'345u);
  EXPECT_EQ(client->Drain()->boot_id(), "boot-1");
  v1::RemoveRequest remove;
  remove.set_sequence("a");
  EXPECT_THAT(client->Remove(remove), IsOk());
  v1::AbortRequest abort;
  abort.set_sequence("a");
  const auto gone = client->Abort(abort);
  EXPECT_THAT(gone, StatusIs(absl::StatusCode::kNotFound, HasSubstr("sequence a")));
  EXPECT_EQ(ErrorReason(gone.status()), "UNKNOWN_SEQUENCE");
}

TEST(Client, SaysThatNoServerIsThere) {
  const auto client = Client::Connect("127.0.0.1:1", ClientOptions());
  ASSERT_THAT(client, IsOk());
  const auto reply = (*client)->Capacity({});
  EXPECT_THAT(reply, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("connect")));
  EXPECT_EQ(ErrorReason(reply.status()), "");
  EXPECT_THAT((*client)->OpenAppend(Open("a")), StatusIs(absl::StatusCode::kUnavailable, _));
  EXPECT_THAT((*client)->Read({}, {}), StatusIs(absl::StatusCode::kUnavailable, _));
}

TEST(Client, RefusesOptionsThatMeanNothing) {
  EXPECT_THAT(Client::Connect("", ClientOptions()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("address")));
  EXPECT_THAT(Client::Connect("127.0.0.1:99999", ClientOptions()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("want a port of 1 to 65535")));
  EXPECT_THAT(Client::Connect("x:1", ClientOptions{.call_limit = absl::ZeroDuration()}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("limit")));
  const FakeServer server;
  AppendOptions options = Open("a");
  options.max_unacked_chunks = 0;
  EXPECT_THAT(ConnectTo(server)->OpenAppend(options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("max_unacked_chunks is 0")));
}

TEST(AppendStream, SendsInOrderAndAddsUpTheAcks) {
  FakeServer server;
  const auto client = ConnectTo(server);
  ASSERT_THAT(client->RegisterModel(Model()), IsOk());
  auto stream = client->OpenAppend(Open("a"));
  ASSERT_THAT(stream, IsOk());
  EXPECT_EQ((*stream)->opened().received_tokens(), 0u);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    for (std::uint32_t token = 0; token < 100; token += 10) {
      ASSERT_THAT((*stream)->Send(Chunk(layer, token, 10)), IsOk());
    }
  }
  const auto progress = (*stream)->Finish();
  ASSERT_THAT(progress, IsOk());
  EXPECT_EQ(progress->chunks, 20u);
  EXPECT_EQ(progress->received_tokens, 100u);
  EXPECT_EQ(progress->committed_tokens, 100u);
  EXPECT_EQ(progress->skipped_tokens, 20u);
  EXPECT_EQ(progress->saturated_values, 40u);
  FakeService& service = server.service();
  EXPECT_EQ(service.opened.model_id(), "model-1");
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_EQ(service.sequences["a"].layers[layer].k, Values(layer, 0, 100, kKDim));
    EXPECT_EQ(service.sequences["a"].layers[layer].v, Values(layer, 0, 100, kVDim));
  }
  EXPECT_THAT((*stream)->Send(Chunk(0, 100, 1)),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("has ended")));
  EXPECT_THAT((*stream)->Finish(), StatusIs(absl::StatusCode::kFailedPrecondition, _));
}

TEST(AppendStream, SaysWhereASequenceStands) {
  const FakeServer server;
  const auto client = ConnectTo(server);
  Store(*client, "a", 33);
  const auto stream = client->OpenAppend(Open("a"));
  ASSERT_THAT(stream, IsOk());
  EXPECT_EQ((*stream)->opened().received_tokens(), 33u);
  EXPECT_EQ((*stream)->progress().received_tokens, 33u);
  EXPECT_EQ((*stream)->progress().chunks, 0u);
}

// While the server takes its time with the first chunk, no more than the window leaves the client.
TEST(AppendStream, HoldsBackWhatTheWindowDoesNotAllow) {
  FakeServer server;
  absl::Notification go_on;
  server.service().on_chunk = [&](const v1::AppendChunk&, int) {
    go_on.WaitForNotification();
    return grpc::Status::OK;
  };
  const auto client = ConnectTo(server);
  ASSERT_THAT(client->RegisterModel(Model()), IsOk());
  AppendOptions options = Open("a");
  options.max_unacked_chunks = 3;
  auto stream = client->OpenAppend(options);
  ASSERT_THAT(stream, IsOk());
  std::atomic<int> sent = 0;
  std::thread sender([&] {
    for (std::uint32_t i = 0; i < 10; ++i) {
      EXPECT_THAT((*stream)->Send(Chunk(0, i, 1)), IsOk());
      ++sent;
    }
  });
  while (sent < 3) absl::SleepFor(absl::Milliseconds(1));
  absl::SleepFor(absl::Milliseconds(50));  // time for a fourth to slip through
  EXPECT_EQ(sent, 3);
  EXPECT_EQ((*stream)->progress().chunks, 0u);
  go_on.Notify();
  sender.join();
  EXPECT_THAT((*stream)->Finish(), IsOk());
  EXPECT_EQ((*stream)->progress().chunks, 10u);
}

TEST(AppendStream, TellsTheServersErrorAndKeepsWhatWasAcknowledged) {
  FakeServer server;
  server.service().on_chunk = [](const v1::AppendChunk&, int number) {
    return number < 2
               ? grpc::Status::OK
               : ErrorWithReason(grpc::StatusCode::OUT_OF_RANGE, "first_token is 9", "TOKEN_GAP");
  };
  const auto client = ConnectTo(server);
  ASSERT_THAT(client->RegisterModel(Model()), IsOk());
  auto stream = client->OpenAppend(Open("a"));
  ASSERT_THAT(stream, IsOk());
  // The error may meet any later Send, or Finish.
  absl::Status status;
  for (std::uint32_t i = 0; i < 50 && status.ok(); ++i) status = (*stream)->Send(Chunk(0, i, 1));
  if (status.ok()) status = (*stream)->Finish().status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kOutOfRange, "first_token is 9"));
  EXPECT_EQ(ErrorReason(status), "TOKEN_GAP");
  EXPECT_EQ((*stream)->progress().chunks, 2u);
  EXPECT_EQ((*stream)->progress().received_tokens, 2u);
}

TEST(AppendStream, FinishTellsAnErrorOfTheLastChunk) {
  FakeServer server;
  server.service().on_chunk = [](const v1::AppendChunk&, int) {
    return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "the budget is full");
  };
  const auto client = ConnectTo(server);
  ASSERT_THAT(client->RegisterModel(Model()), IsOk());
  auto stream = client->OpenAppend(Open("a"));
  ASSERT_THAT(stream, IsOk());
  ASSERT_THAT((*stream)->Send(Chunk(0, 0, 1)), IsOk());
  EXPECT_THAT((*stream)->Finish(),
              StatusIs(absl::StatusCode::kResourceExhausted, "the budget is full"));
}

TEST(AppendStream, GivesUpOnAServerThatStandsStill) {
  FakeServer server;
  absl::Notification go_on;
  server.service().on_chunk = [&](const v1::AppendChunk&, int) {
    go_on.WaitForNotification();
    return grpc::Status::OK;
  };
  const auto client = ConnectTo(server, ClientOptions{.stall_limit = absl::Milliseconds(100)});
  ASSERT_THAT(client->RegisterModel(Model()), IsOk());
  auto stream = client->OpenAppend(Open("a"));
  ASSERT_THAT(stream, IsOk());
  ASSERT_THAT((*stream)->Send(Chunk(0, 0, 1)), IsOk());
  EXPECT_THAT((*stream)->Finish(),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("stood still for 0.1 s with 1 messages unacknowledged")));
  go_on.Notify();
}

TEST(AppendStream, TheStreamLimitEndsItToo) {
  FakeServer server;
  absl::Notification go_on;
  server.service().on_chunk = [&](const v1::AppendChunk&, int) {
    go_on.WaitForNotification();
    return grpc::Status::OK;
  };
  const auto client = ConnectTo(server, ClientOptions{.stream_limit = absl::Milliseconds(300)});
  ASSERT_THAT(client->RegisterModel(Model()), IsOk());
  auto stream = client->OpenAppend(Open("a"));
  ASSERT_THAT(stream, IsOk());
  ASSERT_THAT((*stream)->Send(Chunk(0, 0, 1)), IsOk());
  EXPECT_THAT((*stream)->Finish(), StatusIs(absl::StatusCode::kDeadlineExceeded, _));
  go_on.Notify();
}

TEST(AppendStream, ADroppedStreamIsCancelled) {
  FakeServer server;
  const auto client = ConnectTo(server);
  ASSERT_THAT(client->RegisterModel(Model()), IsOk());
  {
    auto stream = client->OpenAppend(Open("a"));
    ASSERT_THAT(stream, IsOk());
    ASSERT_THAT((*stream)->Send(Chunk(0, 0, 1)), IsOk());
  }
  const absl::Time patience = absl::Now() + absl::Seconds(10);
  while (server.service().cancelled == 0 && absl::Now() < patience) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(server.service().cancelled, 1);
}

}  // namespace
}  // namespace kvtier::client
