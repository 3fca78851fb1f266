#pragma once

#include <functional>
#include <ostream>

#include "absl/time/time.h"

namespace kvtier::client {

// Where a command writes and what time it is. Owned by main, or by a test.
struct Terminal {
  std::ostream& out;
  std::ostream& err;
  bool err_is_tty = false;
  std::function<absl::Time()> now;
};

}  // namespace kvtier::client
