#pragma once

#include <grpcpp/client_context.h>

#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cachestore/base/status_macros.h"
#include "client/client.h"
#include "client/grpc_status.h"
#include "client/transport_choice.h"
#include "kvtier/v1/kv_tier.grpc.pb.h"

namespace kvtier::client {

// A client's connection, and what it remembers for a server that restarts. Thread-safe.
class Client::Impl {
 public:
  Impl(const std::string& address, const ClientOptions& options);

  v1::KvTierService::Stub& stub() { return stub_; }
  const ClientOptions& options() const { return options_; }
  TransportChoice& transport() { return transport_; }
  absl::Time StreamDeadline() const { return absl::Now() + options_.stream_limit; }

  // Of a reply: another than before is a server that restarted.
  void SawBoot(const std::string& boot_id) ABSL_LOCKS_EXCLUDED(mutex_);
  void Remember(const std::string& model_id, const v1::RegisterModelRequest& request)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether a call that failed so may be tried again: a model that this client had registered is
  // registered anew.
  bool Recovers(const absl::Status& status, const std::string& model_id)
      ABSL_LOCKS_EXCLUDED(mutex_);

  template <class Request, class Response>
  absl::StatusOr<Response> Call(grpc::Status (v1::KvTierService::Stub::*method)(
                                    grpc::ClientContext*, const Request&, Response*),
                                const Request& request) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + options_.call_limit));
    Response response;
    KVT_RETURN_IF_ERROR(FromGrpc((stub_.*method)(&context, request, &response)));
    SawBoot(response.boot_id());
    return response;
  }
  // One whose request names a model.
  template <class Request, class Response>
  absl::StatusOr<Response> CallOfModel(grpc::Status (v1::KvTierService::Stub::*method)(
                                           grpc::ClientContext*, const Request&, Response*),
                                       const Request& request) {
    absl::StatusOr<Response> response = Call(method, request);
    return Recovers(response.status(), request.model_id()) ? Call(method, request) : response;
  }

 private:
  const ClientOptions options_;
  TransportChoice transport_;
  v1::KvTierService::Stub stub_;
  absl::Mutex mutex_;
  std::string boot_id_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, v1::RegisterModelRequest> models_ ABSL_GUARDED_BY(mutex_);  // by id
};

}  // namespace kvtier::client
