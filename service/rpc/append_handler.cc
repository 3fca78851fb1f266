#include "service/rpc/append_handler.h"

#include <grpcpp/server_context.h>

#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "cachestore/base/errors.h"
#include "service/rpc/append_session.h"
#include "service/rpc/rpc_status.h"

namespace kvtier::service {
namespace {

// Moves messages between gRPC and the session: reads the next while one is worked on, and stops
// reading while acks pile up.
class AppendReactor final : public grpc::ServerBidiReactor<v1::AppendRequest, v1::AppendResponse>,
                            public WatchedStream,
                            public std::enable_shared_from_this<AppendReactor> {
 public:
  AppendReactor(RpcContext& context, grpc::CallbackServerContext& call)
      : context_(context), call_(call) {}

  void Start() {
    self_ = shared_from_this();
    session_.emplace(context_, [weak = weak_from_this()](const absl::Status& why) {
      if (const auto reactor = weak.lock()) reactor->End(why);
    });
    absl::MutexLock lock(&mutex_);
    waiting_since_ = context_.clock.Now();
    context_.watch.Add(self_);
    StartRead(&incoming_);
  }

  void OnReadDone(bool ok) override {
    const auto keep = shared_from_this();
    absl::MutexLock lock(&mutex_);
    have_next_ = ok;
    half_closed_ = !ok;
    Advance();
  }

  void OnWriteDone(bool ok) override {
    const auto keep = shared_from_this();
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    waiting_since_ = context_.clock.Now();
    if (ok) {
      acks_.pop_front();
    } else {  // nobody listens any more
      acks_.clear();
      half_closed_ = true;
      have_next_ = false;
    }
    Advance();
  }

  void OnDone() override { const auto keep = std::exchange(self_, nullptr); }

  void OnCancel() override {
    const auto keep = shared_from_this();
    absl::MutexLock lock(&mutex_);
    if (receiving_) session_->GiveUp();
  }

  void EndIfStalled(absl::Time limit) override {
    absl::MutexLock lock(&mutex_);
    // Between chunks a writer may rest: the sequence's own deadline bounds that. Before the open,
    // and with acks that nobody takes, it may not.
    const bool stalled = (!opened_ || writing_) && !working_ && waiting_since_ < limit;
    // Under the lock: until it is finished, gRPC keeps the call.
    if (!finished_ && stalled) call_.TryCancel();
  }

 private:
  static constexpr std::size_t kMaxAcks = 16;

  void End(const absl::Status& why) {
    const auto keep = shared_from_this();
    absl::MutexLock lock(&mutex_);
    if (end_.ok()) end_ = why;
    ended_ = true;
    Advance();
  }

  // Starts whatever can go on now.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_) return;
    if (!writing_ && !acks_.empty()) {
      writing_ = true;
      waiting_since_ = context_.clock.Now();
      StartWrite(&acks_.front());
    }
    if (end_.ok() && have_next_ && !working_ && acks_.size() < kMaxAcks) Work();
    const bool over = !end_.ok() || ((half_closed_ || ended_) && !have_next_);
    if (!over || working_ || writing_ || !acks_.empty()) return;
    finished_ = true;
    session_.reset();  // leaves the sequence before the writer hears that it may come again
    if (!end_.ok()) context_.observer.Rejected("Append", cachestore::ReasonOf(end_));
    Finish(ToGrpc(end_));
  }

  void Work() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    have_next_ = false;
    working_ = true;
    std::swap(current_, incoming_);
    const bool posted = context_.work.Post(WorkQueue::Priority::kAppend,
                                           [self = shared_from_this()] { self->DoWork(); });
    if (!posted) {
      working_ = false;
      end_ = Overloaded();
      return;
    }
    StartRead(&incoming_);
  }

  absl::StatusOr<std::optional<v1::AppendResponse>> Handle(const v1::AppendRequest& request) {
    if (request.has_open()) return session_->Open(request.open());
    if (request.has_chunk()) {
      return session_->Take(request.chunk(), [self = shared_from_this()](const absl::Status& how) {
        self->OnReceived(how);
      });
    }
    return cachestore::Error(cachestore::Reason::kInvalidField,
                             "the message is empty; want open or chunk");
  }

  void DoWork() ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      absl::MutexLock lock(&mutex_);
      receiving_ = current_.has_chunk();
    }
    absl::StatusOr<std::optional<v1::AppendResponse>> ack = Handle(current_);
    if (!ack.ok()) return Done(ack.status());
    if (ack->has_value()) Done(**std::move(ack));  // else OnReceived goes on
  }

  void OnReceived(const absl::Status& how) ABSL_LOCKS_EXCLUDED(mutex_) {
    if (!how.ok()) return Done(how);
    const bool posted = context_.work.Post(
        WorkQueue::Priority::kAppend,
        [self = shared_from_this()] { self->Done(self->session_->TakeReceived()); });
    if (!posted) Done(Overloaded());
  }

  void Done(absl::StatusOr<v1::AppendResponse> ack) ABSL_LOCKS_EXCLUDED(mutex_) {
    const auto keep = shared_from_this();
    current_.Clear();
    absl::MutexLock lock(&mutex_);
    working_ = false;
    receiving_ = false;
    opened_ = true;
    if (ack.ok()) {
      acks_.push_back(*std::move(ack));
    } else if (end_.ok()) {
      end_ = ack.status();
    }
    Advance();
  }

  RpcContext& context_;
  grpc::CallbackServerContext& call_;
  std::shared_ptr<AppendReactor> self_;   // until OnDone
  std::optional<AppendSession> session_;  // used by one task at a time
  v1::AppendRequest current_;             // belongs to the task

  absl::Mutex mutex_;
  v1::AppendRequest incoming_ ABSL_GUARDED_BY(mutex_);
  std::deque<v1::AppendResponse> acks_ ABSL_GUARDED_BY(mutex_);
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
  absl::Time waiting_since_ ABSL_GUARDED_BY(mutex_);
  bool have_next_ ABSL_GUARDED_BY(mutex_) = false;
  bool working_ ABSL_GUARDED_BY(mutex_) = false;
  bool receiving_ ABSL_GUARDED_BY(mutex_) = false;  // or about to
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;  // by the store
  bool opened_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

grpc::ServerBidiReactor<v1::AppendRequest, v1::AppendResponse>* ServeAppend(
    RpcContext& context, grpc::CallbackServerContext& call) {
  const auto reactor = std::make_shared<AppendReactor>(context, call);
  reactor->Start();
  return reactor.get();
}

}  // namespace kvtier::service
