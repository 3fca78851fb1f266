#pragma once

#include <string>

#include "absl/status/status.h"

namespace kvtier::client {

// The machine-readable reason of an error that a kvtier server sent (google.rpc.ErrorInfo); empty
// if the error has none: it came from this process or from the network.
std::string ErrorReason(const absl::Status& status);

}  // namespace kvtier::client
