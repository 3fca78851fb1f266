#include "transport/nccl_link.h"

#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "cachestore/base/status_macros.h"

namespace kvtier::transport {
namespace {

using Clock = std::chrono::steady_clock;

// How long the reaper's end waits for aborts.
constexpr absl::Duration kLastAborts = absl::Seconds(2);

absl::Status CudaStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(fmt::format("{}: CUDA says {}", what, cudaGetErrorString(error)));
}

}  // namespace

// Of the thread too: it may outlive the reaper.
struct NcclReaper::State {
  explicit State(std::shared_ptr<const NcclLibrary> with) : library(std::move(with)) {}

  void Run();

  const std::shared_ptr<const NcclLibrary> library;
  absl::Mutex mutex;
  std::deque<Remains> waiting ABSL_GUARDED_BY(mutex);
  std::optional<Clock::time_point> began ABSL_GUARDED_BY(mutex);
  bool stops ABSL_GUARDED_BY(mutex) = false;
  bool ended ABSL_GUARDED_BY(mutex) = false;
};

void NcclReaper::State::Run() {
  while (true) {
    Remains next;
    {
      absl::MutexLock lock(&mutex);
      const auto due = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
        return stops || !waiting.empty();
      };
      mutex.Await(absl::Condition(&due));
      if (waiting.empty()) {
        ended = true;
        return;
      }
      next = std::move(waiting.front());
      waiting.pop_front();
      began = Clock::now();
    }
    library->CommAbort(next.comm);
    cudaStreamDestroy(next.stream);
    next.memory.reset();
    absl::MutexLock lock(&mutex);
    began.reset();
  }
}

NcclReaper::NcclReaper(std::shared_ptr<const NcclLibrary> library)
    : state_(std::make_shared<State>(std::move(library))) {
  std::thread([state = state_] { state->Run(); }).detach();
}

NcclReaper::~NcclReaper() {
  absl::MutexLock lock(&state_->mutex);
  state_->stops = true;
  state_->mutex.AwaitWithTimeout(absl::Condition(&state_->ended), kLastAborts);
}

const NcclLibrary& NcclReaper::library() const { return *state_->library; }

void NcclReaper::Abort(Remains remains) {
  absl::MutexLock lock(&state_->mutex);
  state_->waiting.push_back(std::move(remains));
}

absl::Duration NcclReaper::stuck() const {
  absl::MutexLock lock(&state_->mutex);
  return state_->began.has_value() ? absl::FromChrono(Clock::now() - *state_->began)
                                   : absl::ZeroDuration();
}

int NcclReaper::pending() const {
  absl::MutexLock lock(&state_->mutex);
  return static_cast<int>(state_->waiting.size()) + (state_->began.has_value() ? 1 : 0);
}

absl::StatusOr<std::string> NcclLink::NewId(const NcclLibrary& library) {
  ncclUniqueId id;
  KVT_RETURN_IF_ERROR(library.StatusOf(library.GetUniqueId(&id), "ncclGetUniqueId", nullptr));
  return std::string(id.internal, sizeof id.internal);
}

absl::StatusOr<std::unique_ptr<NcclLink>> NcclLink::Connect(NcclReaper& reaper, Options options) {
  const std::string& id = options.id;
  ncclUniqueId unique;
  if (id.size() != sizeof unique.internal) {
    return absl::InvalidArgumentError(
        fmt::format("the id has {} bytes; want {}", id.size(), sizeof unique.internal));
  }
  std::memcpy(unique.internal, id.data(), id.size());
  std::unique_ptr<NcclLink> link(new NcclLink(reaper, std::move(options)));
  KVT_RETURN_IF_ERROR(
      CudaStatus(cudaStreamCreateWithFlags(&link->stream_, cudaStreamNonBlocking), "a stream"));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  // Fewer than by default: a pair takes tens of MiB of the GPU by the number of its channels.
  config.maxCTAs = 4;
  const NcclLibrary& library = reaper.library();
  const ncclResult_t begun =
      library.CommInitRankConfig(&link->comm_, 2, unique, 1 - link->peer(), &config);
  if (begun != ncclSuccess && begun != ncclInProgress)
    return link->Break(library.StatusOf(begun, "connecting", link->comm_));
  KVT_RETURN_IF_ERROR(link->Settle("connecting", link->options_.deadline));
  return link;
}

// Polls: NCCL and CUDA tell nobody. `look` gives a status once there is one. DEADLINE_EXCEEDED
// where there is none in time.
template <class F>
absl::Status NcclLink::Poll(const char* what, absl::Duration deadline, F look) const {
  constexpr int kBusyPolls = 50;
  const auto until = Clock::now() + absl::ToChronoNanoseconds(deadline);
  for (int polls = 0;; ++polls) {
    if (std::optional<absl::Status> status = look()) return *std::move(status);
    if (options_.cancelled != nullptr && *options_.cancelled)
      return absl::CancelledError("the link is closed");
    if (Clock::now() >= until) {
      return absl::DeadlineExceededError(
          fmt::format("{}: the other end has not done its part within {} s", what,
                      absl::ToDoubleSeconds(deadline)));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(polls < kBusyPolls ? 20 : 500));
  }
}

NcclLink::~NcclLink() { Break(absl::CancelledError("the link is closed")).IgnoreError(); }

absl::Status NcclLink::Break(absl::Status why) {
  if (!health_.ok()) return health_;
  health_ = std::move(why);
  if (comm_ != nullptr) {
    reaper_.Abort({comm_, stream_, std::move(options_.memory)});
  } else if (stream_ != nullptr) {
    cudaStreamDestroy(stream_);
  }
  comm_ = nullptr;
  stream_ = nullptr;
  return health_;
}

absl::Status NcclLink::Settle(const char* what, absl::Duration deadline) {
  const NcclLibrary& library = reaper_.library();
  absl::Status settled = Poll(what, deadline, [&]() -> std::optional<absl::Status> {
    ncclResult_t state = ncclInProgress;
    const ncclResult_t asked = library.CommGetAsyncError(comm_, &state);
    if (asked != ncclSuccess) return library.StatusOf(asked, what, comm_);
    if (state == ncclInProgress) return std::nullopt;
    return library.StatusOf(state, what, comm_);
  });
  return settled.ok() ? settled : Break(std::move(settled));
}

template <class F>
absl::Status NcclLink::Group(absl::Span<const DevicePiece> pieces, absl::Duration deadline,
                             const char* what, F transfer) {
  if (!health_.ok()) return health_;
  const NcclLibrary& library = reaper_.library();
  const auto good = [](ncclResult_t result) {
    return result == ncclSuccess || result == ncclInProgress;
  };
  ncclResult_t result = library.GroupStart();
  for (const DevicePiece& piece : pieces) {
    if (good(result)) result = transfer(piece);
  }
  const ncclResult_t ended = library.GroupEnd();
  if (good(result)) result = ended;
  if (!good(result)) return Break(library.StatusOf(result, what, comm_));
  return result == ncclInProgress ? Settle(what, deadline) : absl::OkStatus();
}

absl::Status NcclLink::Send(absl::Span<const DevicePiece> pieces, absl::Duration deadline) {
  return Group(pieces, deadline, "sending", [&](const DevicePiece& piece) {
    return reaper_.library().Send(piece.data, static_cast<std::size_t>(piece.bytes), ncclUint8,
                                  peer(), comm_, stream_);
  });
}

absl::Status NcclLink::Receive(absl::Span<const DevicePiece> pieces, absl::Duration deadline) {
  return Group(pieces, deadline, "receiving", [&](const DevicePiece& piece) {
    return reaper_.library().Recv(piece.data, static_cast<std::size_t>(piece.bytes), ncclUint8,
                                  peer(), comm_, stream_);
  });
}

absl::StatusOr<bool> NcclLink::Done() {
  if (!health_.ok()) return health_;
  const cudaError_t error = cudaStreamQuery(stream_);
  if (error == cudaSuccess) return true;
  if (error != cudaErrorNotReady) return Break(CudaStatus(error, "a transfer"));
  ncclResult_t state = ncclSuccess;
  reaper_.library().CommGetAsyncError(comm_, &state);
  if (state != ncclSuccess && state != ncclInProgress)
    return Break(reaper_.library().StatusOf(state, "a transfer", comm_));
  return false;
}

absl::Status NcclLink::Wait(absl::Duration deadline) {
  absl::Status waited = Poll("a transfer", deadline, [&]() -> std::optional<absl::Status> {
    const absl::StatusOr<bool> done = Done();
    if (!done.ok()) return done.status();
    return *done ? std::optional<absl::Status>(absl::OkStatus()) : std::nullopt;
  });
  return waited.ok() || !health_.ok() ? waited : Break(std::move(waited));
}

}  // namespace kvtier::transport
