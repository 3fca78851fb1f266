#pragma once

#include <grpcpp/support/server_callback.h>

#include "kvtier/v1/kv_tier.pb.h"
#include "service/rpc/rpc_context.h"

namespace kvtier::service {

// Serves one AppendBatch call; `request` and `response` are the call's.
grpc::ServerUnaryReactor* ServeAppendBatch(RpcContext& context, grpc::CallbackServerContext& call,
                                           const v1::AppendBatchRequest& request,
                                           v1::AppendBatchResponse& response);

}  // namespace kvtier::service
