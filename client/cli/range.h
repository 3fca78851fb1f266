#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace kvtier::client {

// A half-open range as users write it: "2:5" is 2, 3 and 4; "2:" goes to the end, ":5" starts at 0.
struct Range {
  std::uint64_t first = 0;
  std::uint64_t count = 0;  // 0: to the end
};

// INVALID_ARGUMENT for anything else, for an empty range and for one past `limit`.
absl::StatusOr<Range> ParseRange(const std::string& text, std::uint64_t limit);

}  // namespace kvtier::client
