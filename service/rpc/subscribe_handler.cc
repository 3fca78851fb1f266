#include "service/rpc/subscribe_handler.h"

#include <grpcpp/server_context.h>

#include <memory>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "service/rpc/event_reply.h"
#include "service/rpc/rpc_status.h"
#include "service/rpc/wire.h"

namespace kvtier::service {
namespace {

// Sends what there is, then waits for the store to say that there is more. One message at a time:
// while a slow client takes it, nothing is kept for it but its place in the log.
class SubscribeReactor final : public grpc::ServerWriteReactor<v1::SubscribeResponse>,
                               public WatchedStream,
                               public std::enable_shared_from_this<SubscribeReactor> {
 public:
  SubscribeReactor(RpcContext& context, grpc::CallbackServerContext& call)
      : context_(context), call_(call) {}

  void Start(const v1::SubscribeRequest& request) {
    self_ = shared_from_this();
    absl::MutexLock lock(&mutex_);
    waiting_since_ = context_.clock.Now();
    if (const absl::Status status = Open(request); !status.ok()) {
      End(status);
      return;
    }
    context_.watch.Add(self_);
    PostWork(weak_from_this(), context_);
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    over_ |= !ok;
    if (over_) return Advance();
    PostWork(weak_from_this(), context_);
  }

  void OnCancel() override {
    absl::MutexLock lock(&mutex_);
    over_ = true;
    Advance();
  }

  void OnDone() override { const auto keep = std::exchange(self_, nullptr); }

  void EndIfStalled(absl::Time limit) override {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    // Under the lock: until it is finished, gRPC keeps the call.
    if (writing_ && waiting_since_ < limit) call_.TryCancel();
    // It may have been told of events when the work queue was full.
    if (!writing_) PostWork(weak_from_this(), context_);
  }

 private:
  absl::Status Open(const v1::SubscribeRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    KVT_RETURN_IF_ERROR(context_.CheckNotDraining());
    KVT_ASSIGN_OR_RETURN(const std::string name_space, NamespaceFrom(request.namespace_()));
    KVT_ASSIGN_OR_RETURN(
        subscription_,
        context_.store.Subscribe(
            name_space, {request.log_id(), request.number()},
            // Called under the store's locks, so that nothing may go here, not even this.
            [weak = weak_from_this(), &context = context_] { PostWork(weak, context); }));
    return absl::OkStatus();
  }

  static void PostWork(const std::weak_ptr<SubscribeReactor>& weak, RpcContext& context) {
    (void)context.work.Post(WorkQueue::Priority::kControl, [weak] {
      const auto reactor = weak.lock();
      if (reactor == nullptr) return;
      absl::MutexLock lock(&reactor->mutex_);
      reactor->Advance();
    });
  }

  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_ || writing_) return;
    if (over_) return End(absl::OkStatus());
    if (const absl::Status serving = context_.CheckNotDraining(); !serving.ok())
      return End(serving);
    const cachestore::EventBatch batch = subscription_->Next();
    if (batch.events.empty()) return;
    message_ = ToProto(batch, context_.medium);
    message_.set_boot_id(context_.boot_id);
    writing_ = true;
    waiting_since_ = context_.clock.Now();
    StartWrite(&message_);
  }

  void End(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    finished_ = true;
    subscription_.reset();
    if (!why.ok()) context_.observer.Rejected("Subscribe", cachestore::ReasonOf(why));
    Finish(why.ok() ? grpc::Status::CANCELLED : ToGrpc(why));
  }

  RpcContext& context_;
  grpc::CallbackServerContext& call_;
  std::shared_ptr<SubscribeReactor> self_;  // until OnDone
  v1::SubscribeResponse message_;           // gRPC's while writing_

  absl::Mutex mutex_;
  std::unique_ptr<cachestore::Subscription> subscription_ ABSL_GUARDED_BY(mutex_);
  absl::Time waiting_since_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

grpc::ServerWriteReactor<v1::SubscribeResponse>* ServeSubscribe(
    RpcContext& context, grpc::CallbackServerContext& call, const v1::SubscribeRequest& request) {
  const auto reactor = std::make_shared<SubscribeReactor>(context, call);
  reactor->Start(request);
  return reactor.get();
}

}  // namespace kvtier::service
