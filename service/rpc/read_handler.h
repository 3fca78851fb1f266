#pragma once

#include <grpcpp/support/server_callback.h>

#include "kvtier/v1/kv_tier.pb.h"
#include "service/rpc/rpc_context.h"

namespace kvtier::service {

// Serves one Read call; owns itself until the call is done.
grpc::ServerWriteReactor<v1::ReadResponse>* ServeRead(RpcContext& context,
                                                      grpc::CallbackServerContext& call,
                                                      const v1::ReadRequest& request);

}  // namespace kvtier::service
