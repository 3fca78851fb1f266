#include "service/rpc/server.h"

#include <fmt/format.h>
#include <grpcpp/ext/channelz_service_plugin.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <chrono>
#include <mutex>
#include <utility>

#include "absl/time/clock.h"
#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "service/log.h"
#include "service/rpc/kv_tier_service.h"

namespace kvtier::service {
namespace {

constexpr int kMaxStreamsPerConnection = 1024;
constexpr int kMinPingIntervalMs = 10'000;
// A chunk's own limit answers with the numbers; gRPC's, above it, only stops what no client of ours
// sends.
constexpr std::int64_t kMessageMargin = 1 << 20;

// A builder takes the plugins that are there when it is made: one made before serves no channelz.
void EnablePlugins() {
  static std::once_flag once;
  std::call_once(once, [] {
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::channelz::experimental::InitChannelzService();
  });
}

// host:port with the port that was really bound.
std::string WithPort(const std::string& address, int port) {
  return fmt::format("{}:{}", address.substr(0, address.rfind(':')), port);
}

absl::StatusOr<std::unique_ptr<grpc::Server>> Listen(grpc::ServerBuilder& builder,
                                                     const char* field, std::string& address) {
  int port = 0;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  // Two servers must not share a port by accident.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || port == 0) {
    return cachestore::Error(
        cachestore::Reason::kInvalidField,
        fmt::format(
            "{} is {}; can't listen there: the port is taken, or the address is unknown or not "
            "this host's",
            field, address));
  }
  address = WithPort(address, port);
  return server;
}

class GrpcServer final : public Server {
 public:
  GrpcServer(const ServerOptions& options, RpcContext& context)
      : options_(options), context_(context), service_(context, [this] { Drain(); }) {}

  absl::Status Start() {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder health;
    EnablePlugins();
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    builder.SetMaxReceiveMessageSize(static_cast<int>(context_.max_message_bytes + kMessageMargin));
    // A compressed message would be bounded only once it's unpacked.
    builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
    builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsPerConnection);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                               kMinPingIntervalMs);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
    KVT_ASSIGN_OR_RETURN(server_, Listen(builder, "listen", options_.listen));
    if (!options_.health_listen.empty()) {
      KVT_ASSIGN_OR_RETURN(health_server_, Listen(health, "health_listen", options_.health_listen));
    }
    SetHealth({"", "liveness", "readiness", v1::KvTierService::service_full_name()}, true);
    return absl::OkStatus();
  }

  const std::string& listen() const override { return options_.listen; }
  const std::string& health_listen() const override { return options_.health_listen; }

  void Drain() override {
    if (context_.draining.exchange(true)) return;
    SetHealth({"readiness", v1::KvTierService::service_full_name()}, false);
    Log(LogLevel::kInfo, "draining: no new streams or models");
  }

  void Shutdown(absl::Duration deadline) override {
    Drain();
    context_.watch.Sweep(absl::InfinitePast());  // subscriptions would go on for ever
    server_->Shutdown(absl::ToChronoTime(absl::Now() + deadline));
    if (health_server_ != nullptr) health_server_->Shutdown(absl::ToChronoTime(absl::Now()));
  }

 private:
  void SetHealth(const std::vector<std::string>& names, bool serving) {
    for (grpc::Server* server : {server_.get(), health_server_.get()}) {
      if (server == nullptr) continue;
      for (const std::string& name : names)
        server->GetHealthCheckService()->SetServingStatus(name, serving);
    }
  }

  ServerOptions options_;
  RpcContext& context_;
  KvTierServiceImpl service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<grpc::Server> health_server_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options,
                                                      RpcContext& context) {
  auto server = std::make_unique<GrpcServer>(options, context);
  KVT_RETURN_IF_ERROR(server->Start());
  return std::unique_ptr<Server>(std::move(server));
}

}  // namespace kvtier::service
