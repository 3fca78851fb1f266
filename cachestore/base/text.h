#pragma once

#include <cstddef>
#include <string>

#include "absl/status/status.h"

namespace kvtier::cachestore {

// INVALID_ARGUMENT, naming the field, unless `text` has `least` to `most` bytes and no control
// character: it will be printed in logs and messages.
absl::Status CheckText(const std::string& field, const std::string& text, std::size_t least,
                       std::size_t most);

}  // namespace kvtier::cachestore
