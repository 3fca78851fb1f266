#include "tests/e2e/process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "gtest/gtest.h"

extern char** environ;

namespace kvtier::testing {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(5);

std::string TempName(const char* pattern) {
  return (std::filesystem::temp_directory_path() / pattern).string();
}

}  // namespace

Process::Process(const std::vector<std::string>& command) {
  output_path_ = TempName("kvtier-output-XXXXXX");
  const int fd = mkstemp(output_path_.data());
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, fd, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, fd, STDERR_FILENO);
  std::vector<char*> argv;
  for (const std::string& argument : command) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  EXPECT_EQ(posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ), 0) << argv[0];
  posix_spawn_file_actions_destroy(&actions);
  close(fd);
}

Process::~Process() {
  if (running()) {
    Signal(SIGKILL);
    Reap(true);
  }
  std::filesystem::remove(output_path_);
}

bool Process::Reap(bool block) {
  if (ended_) return true;
  int status = 0;
  if (waitpid(pid_, &status, block ? 0 : WNOHANG) != pid_) return false;
  ended_ = true;
  code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return true;
}

bool Process::running() { return !Reap(false); }

void Process::Signal(int signal) const { kill(pid_, signal); }

int Process::Wait(double seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!Reap(false)) {
    if (std::chrono::steady_clock::now() > deadline) return -1;
    std::this_thread::sleep_for(kPoll);
  }
  return code_;
}

std::string Process::Output() const {
  std::ostringstream text;
  text << std::ifstream(output_path_).rdbuf();
  return text.str();
}

TempFolder::TempFolder() : path_(TempName("kvtier-test-XXXXXX")) {
  EXPECT_NE(mkdtemp(path_.data()), nullptr);
}

TempFolder::~TempFolder() { std::filesystem::remove_all(path_); }

Finished RunCommand(const std::vector<std::string>& command) {
  Process process(command);
  Finished finished{.code = process.Wait(60), .output = {}};
  finished.output = process.Output();
  EXPECT_NE(finished.code, -1) << command[0] << " did not end\n" << finished.output;
  return finished;
}

Finished RunKvtier(const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {KVTIER_CLI};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return RunCommand(command);
}

}  // namespace kvtier::testing
