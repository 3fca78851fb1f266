#pragma once

#include <grpcpp/support/server_callback.h>

#include "kvtier/v1/kv_events.pb.h"
#include "service/rpc/rpc_context.h"

namespace kvtier::service {

// Serves one Subscribe call; owns itself until the call is done.
grpc::ServerWriteReactor<v1::SubscribeResponse>* ServeSubscribe(
    RpcContext& context, grpc::CallbackServerContext& call, const v1::SubscribeRequest& request);

}  // namespace kvtier::service
