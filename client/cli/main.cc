#include <unistd.h>

#include <iostream>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "client/cli/cli.h"

int main(int argc, char** argv) {
  kvtier::client::Terminal terminal{.out = std::cout,
                                    .err = std::cerr,
                                    .err_is_tty = ::isatty(STDERR_FILENO) == 1,
                                    .now = absl::Now};
  const int code =
      kvtier::client::RunCli(std::vector<std::string>(argv + 1, argv + argc), terminal);
  // A full disk or a closed pipe behind stdout must not look like success.
  std::cout.flush();
  return code == 0 && !std::cout ? 1 : code;
}
