#include "service/rpc/append_batch_handler.h"

#include <fmt/format.h>
#include <grpcpp/server_context.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
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
constexpr int kMaxTasks = 8;  // that one call has in the queue

absl::Status Check(const v1::AppendBatchRequest& request) {
  if (request.entries_size() < 1 || request.entries_size() > kMaxEntries) {
    return Error(Reason::kInvalidField, fmt::format("entries has {} entries; want 1 to {}",
                                                    request.entries_size(), kMaxEntries));
  }
  absl::flat_hash_set<std::string> sequences;
  for (int i = 0; i < request.entries_size(); ++i) {
    const std::string& sequence = request.entries(i).open().sequence();
    if (!request.entries(i).open().transport_id().empty()) {
      return Error(
          Reason::kInvalidField,
          fmt::format("entries[{}].open.transport_id is set; a batch has its values inside", i));
    }
    if (sequences.insert(sequence).second) continue;
    return Error(
        Reason::kInvalidField,
        fmt::format("entries[{}].open.sequence is \"{}\", as in an entry before; want each "
                    "sequence once",
                    i, sequence));
  }
  return NamespaceFrom(request.namespace_()).status();
}

absl::Status Append(RpcContext& context, const std::string& name_space,
                    const v1::AppendEntry& entry, v1::AppendResponse& ack) {
  AppendSession session(context, [](const absl::Status&) {});
  v1::AppendOpen open = entry.open();
  open.set_namespace_(name_space);
  KVT_ASSIGN_OR_RETURN(ack, session.Open(open));
  for (const v1::AppendChunk& chunk : entry.chunks()) {
    KVT_ASSIGN_OR_RETURN(const auto taken, session.Take(chunk, {}));
    ack = *taken;
  }
  return absl::OkStatus();
}

void SetStatus(const absl::Status& status, v1::AppendOutcome& outcome) {
  const grpc::Status wire = ToGrpc(status);
  outcome.set_code(wire.error_code());
  outcome.set_message(wire.error_message());
  outcome.set_reason(cachestore::ReasonOf(status));
}

// A call under way: tasks that each take the next entry until none is left; the last finishes the
// call.
class Batch : public std::enable_shared_from_this<Batch> {
 public:
  Batch(RpcContext& context, grpc::CallbackServerContext& call, grpc::ServerUnaryReactor& reactor,
        const v1::AppendBatchRequest& request, v1::AppendBatchResponse& response)
      : context_(context), call_(call), reactor_(reactor), request_(request), response_(response) {}

  void Start() {
    const int entries = request_.entries_size();
    response_.mutable_outcomes()->Reserve(entries);
    for (int i = 0; i < entries; ++i) response_.add_outcomes();
    const int tasks = std::min(entries, kMaxTasks);
    tasks_ = tasks;
    for (int i = 0; i < tasks; ++i) {
      if (!context_.work.Post(WorkQueue::Priority::kAppend,
                              [self = shared_from_this()] { self->Work(); }))
        Leave();
    }
  }

 private:
  void Work() {
    for (int i = next_++; i < request_.entries_size() && !call_.IsCancelled(); i = next_++)
      Take(request_.entries(i), *response_.mutable_outcomes(i));
    Leave();
  }

  void Take(const v1::AppendEntry& entry, v1::AppendOutcome& outcome) {
    v1::AppendResponse ack;
    const absl::Status status = Append(context_, request_.namespace_(), entry, ack);
    if (!ack.boot_id().empty()) *outcome.mutable_ack() = std::move(ack);
    SetStatus(status, outcome);
    if (!status.ok()) context_.observer.Rejected("AppendBatch", cachestore::ReasonOf(status));
  }

  void Leave() {
    if (--tasks_ > 0) return;
    // The queue was too full for any task, or the client is gone.
    for (int i = next_; i < request_.entries_size(); ++i)
      SetStatus(Overloaded(), *response_.mutable_outcomes(i));
    reactor_.Finish(call_.IsCancelled() ? grpc::Status::CANCELLED : grpc::Status::OK);
  }

  RpcContext& context_;
  grpc::CallbackServerContext& call_;
  grpc::ServerUnaryReactor& reactor_;
  const v1::AppendBatchRequest& request_;
  v1::AppendBatchResponse& response_;
  std::atomic<int> next_ = 0;
  std::atomic<int> tasks_ = 0;
};

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
  std::make_shared<Batch>(context, call, *reactor, request, response)->Start();
  return reactor;
}

}  // namespace kvtier::service
