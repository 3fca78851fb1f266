// What a client keeps up: leases while they are wanted, and its work with a server that restarts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

#include "client/error_reason.h"
#include "client/lease_keeper.h"
#include "tests/e2e/live_server.h"
#include "tests/support/status_matchers.h"

namespace kvtier::testing {
namespace {

using client::ErrorReason;
using client::LeaseKeeper;

v1::AcquireRequest LeaseOn(const std::string& sequence) {
  v1::AcquireRequest request;
  request.set_sequence(sequence);
  request.set_duration_ms(600);
  return request;
}

absl::Status ReadBy(client::Client& client, std::uint64_t lease) {
  v1::ReadRequest request;
  request.add_sequences()->set_lease_id(lease);
  return client.Read(request, {}).status();
}

TEST(LeaseKeeper, LeasesLastAsLongAsTheyAreWanted) {
  LiveServer server({"--memory=16MiB"});
  client::Client& client = server.client();
  const std::string model = client.RegisterModel(SmallModel("auto")).value().model_id();
  ASSERT_THAT(AppendAll(client, model, "s", 100), IsOk());
  std::uint64_t id = 0;
  {
    LeaseKeeper keeper(client);
    auto kept = keeper.Acquire(LeaseOn("s"));
    auto released = keeper.Acquire(LeaseOn("s"));
    ASSERT_THAT(kept, IsOk());
    ASSERT_THAT(released, IsOk());
    const std::uint64_t gone = (*released)->id();
    released->reset();
    EXPECT_EQ(ErrorReason(ReadBy(client, gone)), "LEASE_ENDED");
    v1::RemoveRequest remove;
    remove.set_sequence("s");
    EXPECT_THAT(client.Remove(remove), IsOk());
    std::this_thread::sleep_for(std::chrono::milliseconds(1800));  // three times as long
    id = (*kept)->id();
    EXPECT_EQ((*kept)->tokens(), 100u);
    EXPECT_THAT(ReadBy(client, id), IsOk());
    EXPECT_THAT((*kept)->status(), IsOk());
  }
  EXPECT_EQ(ErrorReason(ReadBy(client, id)), "LEASE_ENDED");
}

TEST(LeaseKeeper, SaysThatALeaseHasEnded) {
  LiveServer server({"--memory=16MiB"});
  client::Client& client = server.client();
  const std::string model = client.RegisterModel(SmallModel("auto")).value().model_id();
  ASSERT_THAT(AppendAll(client, model, "s", 100), IsOk());
  LeaseKeeper keeper(client);
  const auto lease = keeper.Acquire(LeaseOn("s")).value();
  v1::ReleaseRequest release;
  release.set_lease_id(lease->id());
  EXPECT_THAT(client.Release(release), IsOk());  // behind its back
  for (int look = 0; look < 200 && lease->status().ok(); ++look)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(ErrorReason(lease->status()), "LEASE_ENDED") << lease->status();
  v1::AcquireRequest nothing;
  nothing.set_model_id(model);
  nothing.mutable_prompt()->add_token_ids(7);
  const auto empty = keeper.Acquire(nothing);
  ASSERT_THAT(empty, IsOk());
  EXPECT_EQ((*empty)->id(), 0u);
  EXPECT_THAT((*empty)->status(), IsOk());
}

TEST(Reconnect, AClientGoesOnWithAServerThatRestarts) {
  auto server = std::make_unique<LiveServer>(std::vector<std::string>{"--memory=16MiB"});
  const std::string address = server->listen();
  std::atomic<int> restarts = 0;
  const auto client = server->Connect({.tell = {}, .on_restart = [&] { ++restarts; }});
  const std::string model = client->RegisterModel(SmallModel("auto")).value().model_id();
  ASSERT_THAT(AppendAll(*client, model, "s", 100), IsOk());
  LeaseKeeper keeper(*client);
  const auto lease = keeper.Acquire(LeaseOn("s")).value();
  EXPECT_EQ(restarts, 0);
  server->process().Signal(SIGKILL);
  server->process().Wait(10);
  server.reset();
  const Process again({KVTIER_KVTIERD, "--listen=" + address, "--health-listen=127.0.0.1:0",
                       "--metrics-listen=", "--memory=16MiB"});
  const auto began = std::chrono::steady_clock::now();
  absl::Status appended;
  for (int tries = 0; tries < 200; ++tries) {
    appended = AppendAll(*client, model, "s", 100);
    if (appended.ok()) break;
    EXPECT_EQ(appended.code(), absl::StatusCode::kUnavailable) << appended;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_THAT(appended, IsOk()) << again.Output();
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10));
  EXPECT_EQ(restarts, 1);
  for (int look = 0; look < 200 && lease->status().ok(); ++look)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_FALSE(lease->status().ok());
  v1::LookupRequest lookup;
  lookup.set_model_id("not one of this client's");
  lookup.add_prompts();
  EXPECT_EQ(ErrorReason(client->Lookup(lookup).status()), "UNKNOWN_MODEL");
}

}  // namespace
}  // namespace kvtier::testing
