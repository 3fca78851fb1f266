#include "bench/server_process.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <thread>

extern char** environ;

namespace kvtier::bench {

ServerProcess::ServerProcess(std::vector<std::string> command) {
  folder_ = (std::filesystem::temp_directory_path() / "kvtier-bench-XXXXXX").string();
  if (mkdtemp(folder_.data()) == nullptr) throw std::runtime_error(folder_ + " can't be made");
  const std::string ready = folder_ + "/ready.json";
  command.back() += ready;
  std::vector<char*> argv;
  argv.reserve(command.size() + 1);
  for (std::string& argument : command) argv.push_back(argument.data());
  argv.push_back(nullptr);
  if (posix_spawn(&pid_, argv[0], nullptr, nullptr, argv.data(), environ) == 0) {
    for (int i = 0; i < 1000 && !std::filesystem::exists(ready); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  const auto addresses = nlohmann::json::parse(std::ifstream(ready), nullptr, false);
  if (addresses.is_discarded()) {
    Stop();
    throw std::runtime_error(command[0] + " did not get ready within 10 s");
  }
  listen_ = addresses.at("listen");
}

ServerProcess::~ServerProcess() { Stop(); }

void ServerProcess::Stop() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  std::filesystem::remove_all(folder_);
}

double ServerProcess::CpuSeconds() const {
  std::ostringstream text;
  text << std::ifstream("/proc/" + std::to_string(pid_) + "/stat").rdbuf();
  // Fields 14 and 15, counted from after the name in brackets, which may hold anything.
  std::istringstream fields(text.str().substr(text.str().rfind(')') + 2));
  std::string skipped;
  for (int i = 3; i < 14; ++i) fields >> skipped;
  long user = 0, system = 0;
  fields >> user >> system;
  return static_cast<double>(user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

}  // namespace kvtier::bench
