#include "client/cli/plan/gnuplot.h"

#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <memory>

namespace kvtier::client {
namespace {

struct CloseFile {
  void operator()(std::FILE* file) const { static_cast<void>(std::fclose(file)); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

std::string ReadAll(std::FILE* file) {
  std::string text;
  std::array<char, 65536> buffer{};
  std::rewind(file);
  while (const std::size_t got = std::fread(buffer.data(), 1, buffer.size(), file))
    text.append(buffer.data(), got);
  return text;
}

// Runs it with its input and output in files, so that no pipe can fill or break; its exit status,
// or an errno as a negative number.
int Run(std::FILE* in, std::FILE* out) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ::fileno(in), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ::fileno(out), STDOUT_FILENO);
  std::string name = "gnuplot";
  std::string no_settings = "--default-settings";  // of the user's own
  char* const arguments[] = {name.data(), no_settings.data(), nullptr};
  pid_t pid = 0;
  const int error = ::posix_spawnp(&pid, name.c_str(), &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return -error;
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) return -errno;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

absl::StatusOr<std::string> RunGnuplot(const std::string& script) {
  const File in(std::tmpfile());
  const File out(std::tmpfile());
  if (in == nullptr || out == nullptr) {
    return absl::ErrnoToStatus(errno, "no temporary file for gnuplot can be made");
  }
  if (std::fwrite(script.data(), 1, script.size(), in.get()) != script.size() ||
      std::fflush(in.get()) != 0) {
    return absl::ErrnoToStatus(errno, "a temporary file for gnuplot cannot be written");
  }
  std::rewind(in.get());
  const int result = Run(in.get(), out.get());
  if (result == -ENOENT) {
    return absl::FailedPreconditionError(
        "gnuplot, which draws the plot, is not installed: apt-get install gnuplot-nox");
  }
  if (result < 0) return absl::ErrnoToStatus(-result, "gnuplot cannot be run");
  if (result != 0) return absl::InternalError(fmt::format("gnuplot ended with {}", result));
  return ReadAll(out.get());
}

std::string GnuplotString(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) {
    if (c == '\'') quoted += '\'';
    quoted += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return quoted + "'";
}

}  // namespace kvtier::client
