#include "client/client_impl.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <utility>

#include "client/error_reason.h"

namespace kvtier::client {
namespace {

constexpr int kMaxReceiveBytes = 16 << 20;
constexpr int kKeepaliveTimeMs = 30'000;
constexpr int kKeepaliveTimeoutMs = 10'000;

grpc::ChannelArguments ChannelArguments() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxReceiveBytes);
  arguments.SetMaxSendMessageSize(-1);  // the server says what is too large, with its limit
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // One TCP connection a client: two heavy streams on one connection share its speed.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return arguments;
}

// That are remembered.
constexpr std::size_t kMostModels = 256;

}  // namespace

Client::Impl::Impl(const std::string& address, const ClientOptions& options)
    : options_(options),
      transport_({.transport = options.transport,
                  .shm_bytes = options.shm_bytes,
                  .limit = options.call_limit,
                  .tell = options.tell}),
      stub_(grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(),
                                      ChannelArguments())) {}

void Client::Impl::SawBoot(const std::string& boot_id) {
  {
    absl::MutexLock lock(&mutex_);
    if (boot_id.empty() || boot_id == boot_id_) return;
    if (std::exchange(boot_id_, boot_id).empty()) return;
  }
  if (options_.on_restart) options_.on_restart();
}

void Client::Impl::Remember(const std::string& model_id, const v1::RegisterModelRequest& request) {
  absl::MutexLock lock(&mutex_);
  if (models_.size() >= kMostModels) models_.erase(models_.begin());
  models_[model_id] = request;
}

bool Client::Impl::Recovers(const absl::Status& status, const std::string& model_id) {
  if (ErrorReason(status) != "UNKNOWN_MODEL") return false;
  v1::RegisterModelRequest request;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = models_.find(model_id);
    if (found == models_.end()) return false;
    request = found->second;
  }
  const auto registered = Call(&v1::KvTierService::Stub::RegisterModel, request);
  return registered.ok() && registered->model_id() == model_id;
}

}  // namespace kvtier::client
