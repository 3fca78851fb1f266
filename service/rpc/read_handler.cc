#include "service/rpc/read_handler.h"

#include <grpcpp/server_context.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "cachestore/base/errors.h"
#include "service/rpc/read_session.h"
#include "service/rpc/rpc_status.h"

namespace kvtier::service {
namespace {

// Fills one message while the other is on its way out.
class ReadReactor final : public grpc::ServerWriteReactor<v1::ReadResponse>,
                          public WatchedStream,
                          public std::enable_shared_from_this<ReadReactor> {
 public:
  ReadReactor(RpcContext& context, grpc::CallbackServerContext& call, bool follows)
      : context_(context), call_(call), started_(context.clock.Now()), follows_(follows) {}

  void Start(const v1::ReadRequest& request) {
    self_ = shared_from_this();
    const auto on_news = [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->OnNews();
    };
    session_ = follows_ ? MakeFollowSession(context_, request, on_news)
                        : MakeReadSession(context_, request, on_news);
    absl::MutexLock lock(&mutex_);
    waiting_since_ = started_;
    context_.watch.Add(self_);
    Advance();
  }

  void OnWriteDone(bool ok) override {
    const auto keep = shared_from_this();
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    over_ |= !ok;
    Advance();
  }

  void OnCancel() override {
    const auto keep = shared_from_this();
    absl::MutexLock lock(&mutex_);
    over_ = true;
    Advance();
  }

  void OnDone() override { const auto keep = std::exchange(self_, nullptr); }

  void EndIfStalled(absl::Time limit) override {
    absl::MutexLock lock(&mutex_);
    // Under the lock: until it is finished, gRPC keeps the call.
    if (!finished_ && ((writing_ && waiting_since_ < limit) || no_room_since_ < limit))
      call_.TryCancel();
    // One that waits for a writer keeps nobody waiting, but its lease may have ended.
    if (!finished_ && awaits_news_ && session_->deadline() <= context_.clock.Now()) Look();
  }

 private:
  void OnNews() {
    absl::MutexLock lock(&mutex_);
    Look();
  }

  // There may be something to send again.
  void Look() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    news_ = true;
    awaits_news_ = false;
    Advance();
  }

  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_) return;
    if (!over_ && have_ready_ && !writing_) {
      have_ready_ = false;
      writing_ = true;
      waiting_since_ = context_.clock.Now();
      std::swap(filling_, sending_);
      StartWrite(&messages_[sending_]);
    }
    if (!over_ && !have_ready_ && !working_ && !awaits_news_) {
      working_ = true;
      news_ = false;
      if (!context_.work.Post(WorkQueue::Priority::kRead,
                              [self = shared_from_this()] { self->DoWork(); })) {
        working_ = false;
        over_ = true;
        end_ = Overloaded();
      }
    }
    if (!over_ || working_ || writing_) return;
    finished_ = true;
    session_.reset();  // lets the bytes go before the reader hears of the end
    // How long one follows is its writer's doing.
    if (complete_ && !follows_) context_.observer.ReadServed(context_.clock.Now() - started_);
    if (!end_.ok()) context_.observer.Rejected("Read", cachestore::ReasonOf(end_));
    Finish(complete_ || !end_.ok() ? ToGrpc(end_) : grpc::Status::CANCELLED);
  }

  void DoWork() ABSL_LOCKS_EXCLUDED(mutex_) {
    int filling;
    {
      absl::MutexLock lock(&mutex_);
      filling = filling_;
    }
    const absl::StatusOr<ReadSession::Step> step = session_->Next(messages_[filling]);
    absl::MutexLock lock(&mutex_);
    working_ = false;
    have_ready_ = step.ok() && *step == ReadSession::Step::kMessage;
    const bool no_room = step.ok() && *step == ReadSession::Step::kNoRoom;
    awaits_news_ = (no_room || (step.ok() && *step == ReadSession::Step::kWaiting)) && !news_;
    // News of writers give no room.
    no_room_since_ =
        no_room ? std::min(no_room_since_, context_.clock.Now()) : absl::InfiniteFuture();
    complete_ = step.ok() && *step == ReadSession::Step::kEnd;
    if (!step.ok()) end_ = step.status();
    over_ |= !step.ok() || complete_;
    Advance();
  }

  RpcContext& context_;
  grpc::CallbackServerContext& call_;
  const absl::Time started_;
  const bool follows_;
  std::shared_ptr<ReadReactor> self_;         // until OnDone
  std::unique_ptr<ReadSession> session_;      // used by one task at a time
  std::array<v1::ReadResponse, 2> messages_;  // one being filled, one being sent

  absl::Mutex mutex_;
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
  absl::Time waiting_since_ ABSL_GUARDED_BY(mutex_);
  int filling_ ABSL_GUARDED_BY(mutex_) = 0;
  int sending_ ABSL_GUARDED_BY(mutex_) = 1;
  bool have_ready_ ABSL_GUARDED_BY(mutex_) = false;
  bool working_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool news_ ABSL_GUARDED_BY(mutex_) = false;         // since the work was posted
  bool awaits_news_ ABSL_GUARDED_BY(mutex_) = false;  // and nothing else
  // From when on the reader has given none back that was needed.
  absl::Time no_room_since_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  bool complete_ ABSL_GUARDED_BY(mutex_) = false;  // every message was written
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

grpc::ServerWriteReactor<v1::ReadResponse>* ServeRead(RpcContext& context,
                                                      grpc::CallbackServerContext& call,
                                                      const v1::ReadRequest& request) {
  const auto reactor = std::make_shared<ReadReactor>(context, call, request.follow());
  reactor->Start(request);
  return reactor.get();
}

}  // namespace kvtier::service
