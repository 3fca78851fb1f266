#include "service/rpc/append_batch_handler.h"

#include <fmt/format.h>
#include <grpcpp/server_context.h>

#include <atomic>
#include <memory>
#include <string>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "service/rpc/append_session.h"
#include "service/rpc/rpc_status.h"
#include "service/rpc/wire.h"

namespace kvtier::service {
namespace {

using cachestore::Error;
using cachestore::Reason;

constexpr int kMaxEntries = 1024;

// What is left of a call; whoever does the last of it finishes the call.
struct Batch {
  RpcContext& context;
  grpc::ServerUnaryReactor& reactor;
  std::atomic<int> left;

  void Done() {
    if (--left == 0) reactor.Finish(grpc::Status::OK);
  }
};

absl::Status Check(const v1::AppendBatchRequest& request) {
  if (request.entries_size() >= 1 && request.entries_size() <= kMaxEntries)
    return NamespaceFrom(request.namespace_()).status();
  return Error(Reason::kInvalidField, fmt::format("entries has {} entries; want 1 to {}",
                                                  request.entries_size(), kMaxEntries));
}

absl::Status Append(RpcContext& context, const std::string& name_space,
                    const v1::AppendEntry& entry, v1::AppendResponse& ack) {
  AppendSession session(context, [](const absl::Status&) {});
  v1::AppendOpen open = entry.open();
  open.set_namespace_(name_space);
  KVT_ASSIGN_OR_RETURN(ack, session.Open(open));
  for (const v1::AppendChunk& chunk : entry.chunks()) {
    KVT_ASSIGN_OR_RETURN(ack, session.Take(chunk));
  }
  return absl::OkStatus();
}

void SetStatus(const absl::Status& status, v1::AppendOutcome& outcome) {
  const grpc::Status wire = ToGrpc(status);
  outcome.set_code(wire.error_code());
  outcome.set_message(wire.error_message());
  outcome.set_reason(cachestore::ReasonOf(status));
}

}  // namespace

grpc::ServerUnaryReactor* ServeAppendBatch(RpcContext& context, grpc::CallbackServerContext& call,
                                           const v1::AppendBatchRequest& request,
                                           v1::AppendBatchResponse& response) {
  grpc::ServerUnaryReactor* const reactor = call.DefaultReactor();
  response.set_boot_id(context.boot_id);
  if (const absl::Status status = Check(request); !status.ok()) {
    context.observer.Rejected("AppendBatch", cachestore::ReasonOf(status));
    reactor->Finish(ToGrpc(status));
    return reactor;
  }
  const int entries = request.entries_size();
  response.mutable_outcomes()->Reserve(entries);
  for (int i = 0; i < entries; ++i) response.add_outcomes();
  const auto batch = std::make_shared<Batch>(context, *reactor, entries);
  const auto refuse = [batch](const absl::Status& status, v1::AppendOutcome& outcome) {
    batch->context.observer.Rejected("AppendBatch", cachestore::ReasonOf(status));
    SetStatus(status, outcome);
  };
  for (int i = 0; i < entries; ++i) {
    v1::AppendOutcome& outcome = *response.mutable_outcomes(i);
    const auto work = [batch, refuse, &request, &entry = request.entries(i), &outcome] {
      v1::AppendResponse ack;
      const absl::Status status = Append(batch->context, request.namespace_(), entry, ack);
      if (!ack.boot_id().empty()) *outcome.mutable_ack() = std::move(ack);
      if (!status.ok()) refuse(status, outcome);
      batch->Done();
    };
    if (context.work.Post(WorkQueue::Priority::kAppend, work)) continue;
    refuse(Overloaded(), outcome);
    batch->Done();
  }
  return reactor;
}

}  // namespace kvtier::service
