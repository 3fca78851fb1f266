#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace kvtier::testing {

// A child process whose output goes to a file. Killed, if it still runs, when this goes.
class Process {
 public:
  explicit Process(const std::vector<std::string>& command);
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process();

  // Waits for it to end and gives its exit code; 128 + n for a signal n, -1 after `seconds`.
  int Wait(double seconds);
  bool running();
  pid_t pid() const { return pid_; }
  void Signal(int signal) const;
  // Standard output and standard error so far.
  std::string Output() const;

 private:
  bool Reap(bool block);

  pid_t pid_ = 0;
  bool ended_ = false;
  int code_ = -1;
  std::string output_path_;
};

// A temporary folder of one test; removed with all it holds.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Runs a command to its end: exit code and output. Fails the test if that takes over a minute.
struct Finished {
  int code = -1;
  std::string output;
};
Finished RunCommand(const std::vector<std::string>& command);

// Runs the `kvtier` of this build.
Finished RunKvtier(const std::vector<std::string>& arguments);

}  // namespace kvtier::testing
