#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "service/config/fields.h"

namespace kvtier::service {

// What the command line says, not yet parsed into values.
struct Flags {
  std::vector<std::pair<const Field*, std::string>> values;
  std::optional<std::string> config_file;
  bool help = false;
  bool version = false;
  bool check_config = false;
  std::vector<std::string> problems;
  std::string help_text;
};

Flags ReadFlags(int argc, const char* const* argv);

}  // namespace kvtier::service
