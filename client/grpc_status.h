#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace kvtier::client {

// Code and message as they are; the ErrorInfo, if there is one, becomes a payload that
// ErrorReason() reads.
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace kvtier::client
