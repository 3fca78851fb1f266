#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "service/rpc/rpc_context.h"

namespace kvtier::service {

struct ServerOptions {
  std::string listen;         // gRPC: the service, health, reflection, channelz
  std::string health_listen;  // gRPC: health alone; empty: none
};

// The gRPC side of the process. A Server exists only while it listens. Health names: "" and
// "liveness" serve from the start to the end; "readiness" and the service's name turn NOT_SERVING
// when a drain begins.
class Server {
 public:
  // An address in use, or not one, is INVALID_ARGUMENT and names the field. `context` must outlive
  // it.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options,
                                                       RpcContext& context);
  virtual ~Server() = default;

  // The real addresses, port 0 replaced.
  virtual const std::string& listen() const = 0;
  virtual const std::string& health_listen() const = 0;

  // Refuses new streams and registrations from now on; readiness goes.
  virtual void Drain() = 0;
  // Drains, lets running calls end until the deadline, then ends them.
  virtual void Shutdown(absl::Duration deadline) = 0;
};

}  // namespace kvtier::service
