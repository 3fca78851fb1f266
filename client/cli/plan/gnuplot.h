#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace kvtier::client {

// What gnuplot draws for a script that sets no output. FAILED_PRECONDITION where it is not
// installed; what it says on stderr goes there.
absl::StatusOr<std::string> RunGnuplot(const std::string& script);

// A text as gnuplot's language writes it. Control characters become spaces.
std::string GnuplotString(const std::string& text);

}  // namespace kvtier::client
