#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace kvtier::service {

// The one place where an absl::Status becomes a grpc::Status: code, message, and the reason as
// google.rpc.ErrorInfo.
grpc::Status ToGrpc(const absl::Status& status);

}  // namespace kvtier::service
