#pragma once

#include <string>
#include <vector>

#include "service/config/fields.h"

namespace kvtier::service {

// What a configuration file says, not yet parsed into values, in the order of its lines.
struct FileSettings {
  struct Value {
    const Field* field = nullptr;
    std::string text;
    std::string origin;  // "file PATH line N"
  };
  std::vector<Value> values;
  std::vector<std::string> problems;
};

FileSettings ReadSettingsFile(const std::string& path);

}  // namespace kvtier::service
