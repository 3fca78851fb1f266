#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace kvtier::client {

// All of a small file. INVALID_ARGUMENT if it can't be read, or is larger than a model's
// configuration ever is: a wrong path should not be read whole.
absl::StatusOr<std::string> ReadTextFile(const std::string& path);

// Writes a file anew. INVALID_ARGUMENT if it can't.
absl::Status WriteTextFile(const std::string& path, const std::string& text);

}  // namespace kvtier::client
