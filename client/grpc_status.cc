#include "client/grpc_status.h"

#include "absl/strings/cord.h"
#include "client/error_reason.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace kvtier::client {
namespace {

constexpr char kErrorInfoUrl[] = "type.googleapis.com/google.rpc.ErrorInfo";

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return result;
  for (const auto& detail : details.details()) {
    if (detail.Is<google::rpc::ErrorInfo>()) {
      result.SetPayload(kErrorInfoUrl, absl::Cord(detail.value()));
    }
  }
  return result;
}

std::string ErrorReason(const absl::Status& status) {
  const auto payload = status.GetPayload(kErrorInfoUrl);
  google::rpc::ErrorInfo info;
  if (!payload || !info.ParseFromString(std::string(*payload))) return "";
  return info.reason();
}

}  // namespace kvtier::client
