#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace kvtier::bench {

// A server of its own process that writes {"listen": ADDRESS} to the file it is given; killed when
// this goes.
class ServerProcess {
 public:
  // The last argument gets the ready file's path appended. Throws std::runtime_error when it does
  // not get ready.
  explicit ServerProcess(std::vector<std::string> command);
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;
  ~ServerProcess();

  const std::string& listen() const { return listen_; }
  // CPU seconds it has used so far, user and system.
  double CpuSeconds() const;

 private:
  void Stop();

  pid_t pid_ = 0;
  std::string folder_;
  std::string listen_;
};

}  // namespace kvtier::bench
