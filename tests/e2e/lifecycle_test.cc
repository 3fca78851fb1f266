// The process: how it starts, refuses to start, drains and ends, and what becomes of a writer that
// vanishes.
#include <sys/stat.h>

#include <csignal>
#include <filesystem>
#include <string>

#include "client/error_reason.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/live_server.h"
#include "tests/support/status_matchers.h"

namespace kvtier::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

TEST(Lifecycle, AVanishedWritersBytesComeBack) {
  LiveServer server({"--memory=64MiB", "--open-sequence-deadline=1s"});
  const std::int64_t free = server.FreeBytes();
  const auto registered = server.client().RegisterModel(SmallModel("kivi2"));
  ASSERT_THAT(registered, IsOk());
  {
    const auto other = server.Connect();
    auto stream = OpenStream(*other, registered->model_id(), "abandoned");
    ASSERT_THAT(stream, IsOk());
    ASSERT_THAT((*stream)->Send(SmallChunk(0, 0, 500)), IsOk());
    WaitForChunks(**stream, 1);
    EXPECT_LT(server.FreeBytes(), free);
    // The stream and its connection go without a word.
  }
  EXPECT_EQ(server.WaitForFreeBytes(free), free);
  EXPECT_THAT(AppendAll(server.client(), registered->model_id(), "abandoned", 16), IsOk());
}

TEST(Lifecycle, ASilentWriterIsToldThatItsSequenceWasGivenUp) {
  LiveServer server({"--memory=64MiB", "--open-sequence-deadline=1s"});
  const std::int64_t free = server.FreeBytes();
  const auto registered = server.client().RegisterModel(SmallModel("auto"));
  ASSERT_THAT(registered, IsOk());
  auto stream = OpenStream(server.client(), registered->model_id(), "silent");
  ASSERT_THAT(stream, IsOk());
  ASSERT_THAT((*stream)->Send(SmallChunk(0, 0, 16)), IsOk());
  WaitForChunks(**stream, 1);
  EXPECT_EQ(server.WaitForFreeBytes(free), free);
  EXPECT_THAT((*stream)->Finish(), StatusIs(Code::kAborted, HasSubstr("no message for 1s")));
}

TEST(Lifecycle, ABudgetThatHoldsNotOnePageIsRefusedAtRegistration) {
  LiveServer server({"--memory=1MiB"});
  const auto registered = server.client().RegisterModel(SmallModel("auto", 64));
  EXPECT_THAT(registered, StatusIs(Code::kResourceExhausted,
                                   AllOf(HasSubstr("memory is 1048576"), HasSubstr("takes"))));
  EXPECT_EQ(client::ErrorReason(registered.status()), "BUDGET");
}

TEST(Lifecycle, APortInUseIsNamed) {
  LiveServer server({"--memory=16MiB"});
  const Finished second =
      RunCommand({KVTIER_KVTIERD, "--listen=" + server.listen(), "--health-listen=127.0.0.1:0",
                  "--metrics-listen=127.0.0.1:0", "--memory=16MiB"});
  EXPECT_EQ(second.code, 1);
  EXPECT_THAT(second.output, AllOf(HasSubstr("listen is " + server.listen()), HasSubstr("taken")));
  const Finished third =
      RunCommand({KVTIER_KVTIERD, "--listen=127.0.0.1:0", "--health-listen=127.0.0.1:0",
                  "--metrics-listen=" + server.metrics(), "--memory=16MiB"});
  EXPECT_EQ(third.code, 1);
  EXPECT_THAT(third.output, HasSubstr("metrics_listen"));
}

TEST(Lifecycle, CheckConfigPrintsEveryProblemAndExits2) {
  const Finished finished = RunCommand(
      {KVTIER_KVTIERD, "--check-config", "--page-tokens=17", "--memory=lots", "--device=tpu"});
  EXPECT_EQ(finished.code, 2);
  EXPECT_THAT(finished.output, AllOf(HasSubstr("17"), HasSubstr("lots"), HasSubstr("tpu")));
}

TEST(Lifecycle, AReadyFileThatCannotBeIsSaidBeforeAnythingIsServed) {
  const TempFolder folder;
  const auto start = [](const std::string& ready_file) {
    return RunCommand({KVTIER_KVTIERD, "--listen=127.0.0.1:0", "--health-listen=127.0.0.1:0",
                       "--metrics-listen=", "--memory=16MiB", "--ready-file=" + ready_file});
  };
  const Finished nowhere = start(folder / "no/such/folder");
  EXPECT_EQ(nowhere.code, 1);
  EXPECT_THAT(nowhere.output, AllOf(HasSubstr("No such file or directory"),
                                    ::testing::Not(HasSubstr("kvtierd is ready"))));
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const Finished other = start(pipe);
  EXPECT_EQ(other.code, 1);
  EXPECT_THAT(other.output, HasSubstr("something other than a regular file is there"));
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
}

TEST(Lifecycle, SigtermLetsARunningStreamEndAndExits0) {
  LiveServer server({"--memory=64MiB"});
  const auto registered = server.client().RegisterModel(SmallModel("auto"));
  ASSERT_THAT(registered, IsOk());
  auto stream = OpenStream(server.client(), registered->model_id(), "running");
  ASSERT_THAT(stream, IsOk());
  server.process().Signal(SIGTERM);
  ASSERT_THAT((*stream)->Send(SmallChunk(0, 0, 16)), IsOk());
  EXPECT_THAT((*stream)->Finish(), IsOk());
  EXPECT_EQ(server.process().Wait(30), 0);
  EXPECT_THAT(server.process().Output(), AllOf(HasSubstr("draining"), HasSubstr("stopped")));
}

TEST(Lifecycle, DrainRefusesNewWorkAndLetsReadsGoOn) {
  LiveServer server({"--memory=64MiB"});
  const auto registered = server.client().RegisterModel(SmallModel("auto"));
  ASSERT_THAT(registered, IsOk());
  ASSERT_THAT(AppendAll(server.client(), registered->model_id(), "held", 16), IsOk());
  ASSERT_THAT(server.client().Drain(), IsOk());
  EXPECT_THAT(OpenStream(server.client(), registered->model_id(), "new"),
              StatusIs(Code::kUnavailable, HasSubstr("draining")));
  EXPECT_THAT(server.client().RegisterModel(SmallModel("kivi2")),
              StatusIs(Code::kUnavailable, HasSubstr("draining")));
  v1::ReadRequest read;
  read.add_sequences()->set_sequence("held");
  EXPECT_THAT(server.client().Read(read, {}), IsOk());
}

TEST(Lifecycle, ARestartIsNoticedByTheBootId) {
  LiveServer first({"--memory=16MiB"});
  LiveServer second({"--memory=16MiB"});
  EXPECT_NE(first.Capacity().boot_id(), "");
  EXPECT_NE(first.Capacity().boot_id(), second.Capacity().boot_id());
}

TEST(Lifecycle, AReaderThatStopsReadingCostsOthersNothing) {
  LiveServer server({"--memory=256MiB"});
  const auto registered = server.client().RegisterModel(SmallModel("auto"));
  ASSERT_THAT(registered, IsOk());
  ASSERT_THAT(AppendAll(server.client(), registered->model_id(), "big", 8192), IsOk());
  v1::ReadRequest read;
  read.add_sequences()->set_sequence("big");
  // While one reader sits on its first chunk, others read the whole, and the sequence can be
  // removed.
  client::ReadHandlers handlers;
  int chunks = 0;
  handlers.on_chunk = [&](const v1::ReadChunk&) -> absl::Status {
    if (++chunks > 1) return absl::OkStatus();
    const auto other = server.Connect();
    EXPECT_THAT(other->Read(read, {}), IsOk());
    v1::RemoveRequest remove;
    remove.set_sequence("big");
    EXPECT_THAT(other->Remove(remove), IsOk());
    return absl::OkStatus();
  };
  // What it was promised it still gets.
  EXPECT_THAT(server.client().Read(read, handlers), IsOk());
  EXPECT_GT(chunks, 1);
}

}  // namespace
}  // namespace kvtier::testing
