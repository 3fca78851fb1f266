#pragma once

#include <string>
#include <vector>

#include "client/cli/terminal.h"

namespace kvtier::client {

// The command line: parses the arguments (without the program's name), runs one command, returns
// the exit code: 0, 1 (the server said no), 2 (bad usage).
int RunCli(std::vector<std::string> arguments, Terminal& terminal);

}  // namespace kvtier::client
