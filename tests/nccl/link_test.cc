// A server's and a worker's end of a link, in two processes: what works, and each way in which the
// other end can fail. After each the next transfer works, in time, and nothing is left.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <iterator>
#include <thread>

#include "tests/emulation/fake_cudart.h"
#include "tests/nccl/end.h"
#include "tests/support/status_matchers.h"
#include "tests/support/variable.h"

namespace kvtier::transport {
namespace {

using kvtier::testing::IsOk;
using kvtier::testing::Variable;
using ::testing::HasSubstr;
using testing::kGroups;
using testing::kWorkerArgument;
using testing::Pieces;

// Long enough for a machine that is busy; tests of it wait as long.
constexpr absl::Duration kDeadline = absl::Milliseconds(1500);

// A worker process, killed when this goes.
class Worker {
 public:
  explicit Worker(const std::string& behaviour) {
    int up[2], down[2];
    EXPECT_EQ(pipe(up), 0);
    EXPECT_EQ(pipe(down), 0);
    const std::string to_test = std::to_string(up[1]), from_test = std::to_string(down[0]);
    pid_ = fork();
    if (pid_ == 0) {
      close(up[0]);
      close(down[1]);
      execl("/proc/self/exe", "worker", kWorkerArgument, behaviour.c_str(), to_test.c_str(),
            from_test.c_str(), nullptr);
      _exit(99);
    }
    close(up[1]);
    close(down[0]);
    from_ = up[0];
    to_ = down[1];
  }
  ~Worker() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(from_);
    close(to_);
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  std::string Id() const {
    std::string id(sizeof(ncclUniqueId), '\0');
    EXPECT_EQ(read(from_, id.data(), id.size()), static_cast<ssize_t>(id.size()));
    return id;
  }
  // Lets it end; its exit code, or 128 and the signal.
  int Finish() {
    EXPECT_EQ(write(to_, "x", 1), 1);
    int status = 0;
    waitpid(std::exchange(pid_, 0), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  void Kill() { kill(pid_, SIGKILL); }

 private:
  pid_t pid_ = 0;
  int from_ = -1;
  int to_ = -1;
};

std::ptrdiff_t OpenFiles() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

class NcclLinkTest : public ::testing::Test {
 protected:
  // All groups to a worker; where that fails, why.
  absl::Status SendTo(const Worker& worker) {
    auto link = NcclLink::Connect(*reaper_, {.id = worker.Id(), .deadline = kDeadline});
    if (!link.ok()) return link.status();
    for (int group = 0; group < kGroups; ++group) {
      const absl::Status sent = (*link)->Send(pieces_.Group(group), kDeadline);
      if (!sent.ok()) return sent;
    }
    const absl::Status waited = (*link)->Wait(kDeadline);
    if (!waited.ok()) {
      EXPECT_EQ((*link)->Send(pieces_.Group(0), kDeadline), waited);
    }
    return waited;
  }

  void ExpectAnotherWorks() {
    Worker worker("receives");
    EXPECT_THAT(SendTo(worker), IsOk());
    EXPECT_EQ(worker.Finish(), 0);
  }

  void ExpectNothingLeft() {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (reaper_->pending() > 0 && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_EQ(reaper_->pending(), 0);
    EXPECT_EQ(reaper_->stuck(), absl::ZeroDuration());
    EXPECT_EQ(OpenFiles(), files_);
    EXPECT_EQ(cuda_double::Count().allocations, 2u);  // pieces_
  }

  const Variable host_{"NCCL_HOSTID", "server"};
  const std::shared_ptr<const NcclLibrary> library_ = NcclLibrary::Load(KVTIER_FAKE_NCCL).value();
  std::unique_ptr<NcclReaper> reaper_ = std::make_unique<NcclReaper>(library_);
  Pieces pieces_{true};
  const std::ptrdiff_t files_ = OpenFiles();
};

TEST_F(NcclLinkTest, CarriesWhatIsSentAgainAndAgain) {
  for (int i = 0; i < 3; ++i) ExpectAnotherWorks();
  ExpectNothingLeft();
}

struct Failure {
  const char* behaviour;
  absl::StatusCode code;
  const char* says;
};
class NcclLinkFailure : public NcclLinkTest, public ::testing::WithParamInterface<Failure> {};

TEST_P(NcclLinkFailure, IsToldInTimeAndTheNextWorks) {
  const auto begin = std::chrono::steady_clock::now();
  {
    Worker worker(GetParam().behaviour);
    const absl::Status status = SendTo(worker);
    EXPECT_EQ(status.code(), GetParam().code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().says));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(8));
  ExpectAnotherWorks();
  ExpectNothingLeft();
}

INSTANTIATE_TEST_SUITE_P(
    Of, NcclLinkFailure,
    ::testing::Values(
        Failure{"dies_before", absl::StatusCode::kUnavailable, "the one who made the id is gone"},
        Failure{"never_joins", absl::StatusCode::kDeadlineExceeded, "connecting"},
        Failure{"other_version", absl::StatusCode::kFailedPrecondition, "Mismatched NCCL version"},
        Failure{"dies_amid", absl::StatusCode::kUnavailable, "the peer is gone"},
        Failure{"stops_amid", absl::StatusCode::kDeadlineExceeded, "a transfer"},
        Failure{"never_begins", absl::StatusCode::kDeadlineExceeded, "a transfer"},
        Failure{"other_size", absl::StatusCode::kUnavailable, "the peer is gone"}),
    [](const auto& failure) { return std::string(failure.param.behaviour); });

TEST_F(NcclLinkTest, JoiningThatFailsHereIsTold) {
  for (const auto& [fault, code] : {std::pair{"init_fail", absl::StatusCode::kUnavailable},
                                    std::pair{"init_hang", absl::StatusCode::kDeadlineExceeded}}) {
    Worker worker("receives");
    const Variable set("FAKE_NCCL_FAULT", fault);
    EXPECT_EQ(SendTo(worker).code(), code) << fault;
  }
  ExpectAnotherWorks();
  ExpectNothingLeft();
}

// An abort that blocks keeps nobody: it is the reaper's.
TEST_F(NcclLinkTest, AnAbortThatBlocksKeepsNobody) {
  {
    Worker worker("never_joins");
    const Variable fault("FAKE_NCCL_FAULT", "abort_hang");
    const std::string id = worker.Id();
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_EQ(NcclLink::Connect(*reaper_, {.id = id, .deadline = absl::Milliseconds(100)})
                  .status()
                  .code(),
              absl::StatusCode::kDeadlineExceeded);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(900));
    EXPECT_EQ(reaper_->pending(), 1);
  }
  ExpectNothingLeft();
}

TEST_F(NcclLinkTest, WhatIsNoIdIsRefused) {
  EXPECT_EQ(NcclLink::Connect(*reaper_, {.id = "short", .deadline = kDeadline}).status().code(),
            absl::StatusCode::kInvalidArgument);
  const std::string nonsense(sizeof(ncclUniqueId), 'x');
  EXPECT_EQ(NcclLink::Connect(*reaper_, {.id = nonsense, .deadline = kDeadline}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  ExpectNothingLeft();
}

TEST(NcclLibraryTest, WhatIsNotThereOrIsNoneSaysSo) {
  EXPECT_THAT(std::string(NcclLibrary::Load("/nowhere/libnccl.so").status().message()),
              HasSubstr("no NCCL: /nowhere/libnccl.so"));
  EXPECT_THAT(std::string(NcclLibrary::Load("libc.so.6").status().message()),
              HasSubstr("libc.so.6 is no NCCL: it has no nccl"));
  const Variable version("FAKE_NCCL_VERSION", "22603");
  EXPECT_THAT(std::string(NcclLibrary::Load(KVTIER_FAKE_NCCL).status().message()),
              HasSubstr("is NCCL 22603; want 22700 or newer"));
}

// The real library, where it is installed, on a machine without a GPU.
TEST(NcclLibraryTest, TheRealOneWithoutAGpuIsRefusedCleanly) {
  const auto library = NcclLibrary::Load("libnccl.so.2");
  if (!library.ok()) GTEST_SKIP() << library.status().message();
  if (access("/dev/nvidia0", F_OK) == 0) GTEST_SKIP() << "there is a GPU here";
  NcclReaper reaper(*library);
  const auto id = NcclLink::NewId(**library);
  ASSERT_THAT(id, IsOk());
  const auto link = NcclLink::Connect(reaper, {.id = *id, .deadline = absl::Seconds(10)});
  EXPECT_EQ(link.status().code(), absl::StatusCode::kFailedPrecondition) << link.status();
  EXPECT_THAT(std::string(link.status().message()), HasSubstr("cuda error"));
}

}  // namespace
}  // namespace kvtier::transport
