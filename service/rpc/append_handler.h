#pragma once

#include <grpcpp/support/server_callback.h>

#include "kvtier/v1/kv_tier.pb.h"
#include "service/rpc/rpc_context.h"

namespace kvtier::service {

// Serves one Append stream; owns itself until the stream is done.
grpc::ServerBidiReactor<v1::AppendRequest, v1::AppendResponse>* ServeAppend(
    RpcContext& context, grpc::CallbackServerContext& call);

}  // namespace kvtier::service
