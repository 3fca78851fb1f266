#include "service/rpc/rpc_status.h"

#include <string>

#include "cachestore/base/errors.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "service/rpc/rpc_context.h"

namespace kvtier::service {

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const std::string message(status.message());
  const std::string reason = cachestore::ReasonOf(status);
  if (reason.empty()) return {static_cast<grpc::StatusCode>(status.code()), message};
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("kvtier");
  google::rpc::Status details;
  details.set_code(static_cast<int>(status.code()));
  details.set_message(message);
  details.add_details()->PackFrom(info);
  return {static_cast<grpc::StatusCode>(status.code()), message, details.SerializeAsString()};
}

absl::Status RpcContext::CheckNotDraining() const {
  if (!draining.load()) return absl::OkStatus();
  return cachestore::Error(cachestore::Reason::kDraining,
                           "the server is draining; use another one");
}

absl::Status Overloaded() {
  return cachestore::Error(cachestore::Reason::kOverloaded,
                           "too much work waits already; come back later");
}

}  // namespace kvtier::service
