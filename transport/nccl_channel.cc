#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <map>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "transport/nccl.h"
#include "transport/nccl_link.h"

namespace kvtier::transport {
namespace {

using cachestore::Error;
using cachestore::Reason;
using Clock = std::chrono::steady_clock;

// On the stream at a time: the next is there when one ends.
constexpr std::size_t kMostUnderWay = 4;
// A number further ahead is no peer's that works.
constexpr std::uint64_t kMostAhead = 4096;
constexpr int kBusyPolls = 100;

struct FreeEvent {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, FreeEvent>;

absl::Status CudaStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(fmt::format("{}: CUDA says {}", what, cudaGetErrorString(error)));
}

absl::Status Lost(const absl::Status& why) {
  return Error(Reason::kTransportLost, "the NCCL transport is lost: " + std::string(why.message()));
}

// What the thread and those who post share.
class State {
 public:
  State(std::shared_ptr<NcclReaper> reaper, int device, NcclRuntime::Options options)
      : reaper_(std::move(reaper)), device_(device), options_(std::move(options)) {}

  absl::Status Post(std::uint64_t number, NcclTransfer transfer) {
    absl::MutexLock lock(&mutex_);
    if (!status_.ok()) return status_;
    if (number < next_ || number >= next_ + kMostAhead || pending_.contains(number)) {
      return absl::InvalidArgumentError(fmt::format(
          "the transfer's number is {}; want {} or one soon after it, once each", number, next_));
    }
    if (!Busy()) moved_ = Clock::now();
    pending_.emplace(number, std::move(transfer));
    return absl::OkStatus();
  }

  void Allow(std::uint64_t transfers) {
    absl::MutexLock lock(&mutex_);
    allowed_ = std::max(allowed_, transfers);
  }

  void Close(const std::string& why) {
    absl::MutexLock lock(&mutex_);
    if (status_.ok()) status_ = Lost(absl::CancelledError(why));
    closed_ = true;
  }

  absl::Status status() const {
    absl::MutexLock lock(&mutex_);
    return status_;
  }

  absl::Duration idle() const {
    absl::MutexLock lock(&mutex_);
    return Busy() ? absl::ZeroDuration() : absl::FromChrono(Clock::now() - moved_);
  }

  void Run() {
    const absl::Status end = Serve();
    link_.reset();
    std::vector<NcclTransfer> left;
    absl::Status status;
    {
      absl::MutexLock lock(&mutex_);
      if (status_.ok()) status_ = Lost(end);
      status = status_;
      for (UnderWay& transfer : under_way_) left.push_back(std::move(transfer.transfer));
      for (auto& [number, transfer] : pending_) left.push_back(std::move(transfer));
      under_way_.clear();
      pending_.clear();
    }
    for (const NcclTransfer& transfer : left) transfer.done(status);
    options_.memory.reset();
  }

 private:
  struct UnderWay {
    NcclTransfer transfer;
    cudaEvent_t end = nullptr;
  };

  bool Busy() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !pending_.empty() || !under_way_.empty();
  }
  bool MayBegin() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return pending_.contains(next_) && (!options_.sends || next_ < allowed_) &&
           under_way_.size() < kMostUnderWay;
  }

  // Until it fails or is closed.
  absl::Status Serve() {
    KVT_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(device_), "cudaSetDevice"));
    for (Event& event : events_) {
      cudaEvent_t made = nullptr;
      KVT_RETURN_IF_ERROR(
          CudaStatus(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "an event"));
      event.reset(made);
    }
    KVT_ASSIGN_OR_RETURN(
        link_, NcclLink::Connect(*reaper_, {.id = options_.id,
                                            .rank = options_.server ? NcclLink::Rank::kServer
                                                                    : NcclLink::Rank::kWorker,
                                            .deadline = options_.deadline,
                                            .memory = options_.memory,
                                            .cancelled = &closed_}));
    {
      absl::MutexLock lock(&mutex_);
      moved_ = Clock::now();
    }
    for (int polls = 0; !closed_;) {
      KVT_ASSIGN_OR_RETURN(const bool begun, BeginNext());
      KVT_ASSIGN_OR_RETURN(const bool ended, EndOldest());
      if (begun || ended) {
        polls = 0;
      } else {
        KVT_RETURN_IF_ERROR(Rest(++polls));
      }
    }
    return absl::CancelledError("it is closed");
  }

  absl::StatusOr<bool> BeginNext() ABSL_LOCKS_EXCLUDED(mutex_) {
    std::vector<DevicePiece> pieces;
    std::shared_ptr<CUevent_st> after;
    cudaEvent_t end = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      if (!MayBegin()) return false;
      end = events_[next_ % kMostUnderWay].get();
      const auto found = pending_.find(next_++);
      pieces = found->second.pieces;
      after = found->second.after;
      under_way_.push_back({std::move(found->second), end});
      pending_.erase(found);
      moved_ = Clock::now();
    }
    if (after != nullptr) {
      KVT_RETURN_IF_ERROR(
          CudaStatus(cudaStreamWaitEvent(link_->stream(), after.get(), 0), "cudaStreamWaitEvent"));
    }
    std::erase_if(pieces, [](const DevicePiece& piece) { return piece.bytes == 0; });
    if (!pieces.empty()) {
      KVT_RETURN_IF_ERROR(options_.sends ? link_->Send(pieces, options_.deadline)
                                         : link_->Receive(pieces, options_.deadline));
    }
    KVT_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(end, link_->stream()), "a transfer"));
    return true;
  }

  absl::StatusOr<bool> EndOldest() ABSL_LOCKS_EXCLUDED(mutex_) {
    if (under_way_.empty()) return false;
    const cudaError_t state = cudaEventQuery(under_way_.front().end);
    if (state == cudaErrorNotReady) {
      KVT_RETURN_IF_ERROR(link_->Done().status());  // NCCL's errors come beside the stream
      return false;
    }
    KVT_RETURN_IF_ERROR(CudaStatus(state, "a transfer"));
    NcclTransfer ended;
    {
      absl::MutexLock lock(&mutex_);
      ended = std::move(under_way_.front().transfer);
      under_way_.pop_front();
      moved_ = Clock::now();
    }
    ended.done(absl::OkStatus());
    return true;
  }

  // Until there may be something to do; the error is that nothing has moved for too long.
  absl::Status Rest(int polls) ABSL_LOCKS_EXCLUDED(mutex_) {
    bool polled = false;
    {
      absl::MutexLock lock(&mutex_);
      const auto still = absl::FromChrono(Clock::now() - moved_);
      if (Busy() && still > options_.deadline) return StoodStill();
      polled = !under_way_.empty();
      if (!polled) {
        const auto due = [this]()
                             ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return closed_ || MayBegin(); };
        // Looks at the time again now and then: something may be posted that can't begin.
        mutex_.AwaitWithTimeout(absl::Condition(&due), absl::Milliseconds(100));
      }
    }
    if (polled)
      std::this_thread::sleep_for(std::chrono::microseconds(polls < kBusyPolls ? 20 : 500));
    return absl::OkStatus();
  }

  absl::Status StoodStill() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    const std::uint64_t oldest = next_ - under_way_.size();
    const char* what = "has not ended";
    if (under_way_.empty())
      what = pending_.contains(next_) ? "is not awaited at the other end" : "was not announced";
    return absl::DeadlineExceededError(fmt::format("transfer {} {} within {} s", oldest, what,
                                                   absl::ToDoubleSeconds(options_.deadline)));
  }

  const std::shared_ptr<NcclReaper> reaper_;
  const int device_;
  NcclRuntime::Options options_;
  // Of the thread.
  std::array<Event, kMostUnderWay> events_;
  std::unique_ptr<NcclLink> link_;

  mutable absl::Mutex mutex_;
  std::atomic<bool> closed_ = false;
  std::deque<UnderWay> under_way_;  // changed by the thread under the lock, which reads it without
  std::map<std::uint64_t, NcclTransfer> pending_ ABSL_GUARDED_BY(mutex_);  // by number
  std::uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t allowed_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  Clock::time_point moved_ ABSL_GUARDED_BY(mutex_) = Clock::now();
};

class Channel final : public NcclChannel {
 public:
  explicit Channel(std::shared_ptr<State> state)
      : state_(std::move(state)), thread_([of = state_] { of->Run(); }) {}
  ~Channel() override {
    state_->Close("it is closed");
    // What a transfer's end lets go of may be this.
    thread_.get_id() == std::this_thread::get_id() ? thread_.detach() : thread_.join();
  }

  absl::Status Post(std::uint64_t number, NcclTransfer transfer) override {
    return state_->Post(number, std::move(transfer));
  }
  void Allow(std::uint64_t transfers) override { state_->Allow(transfers); }
  void Close(const std::string& why) override { state_->Close(why); }
  absl::Status status() const override { return state_->status(); }
  absl::Duration idle() const override { return state_->idle(); }

 private:
  const std::shared_ptr<State> state_;
  std::thread thread_;
};

class Runtime final : public NcclRuntime {
 public:
  Runtime(std::shared_ptr<const NcclLibrary> library, int device, std::string gpu)
      : reaper_(std::make_shared<NcclReaper>(std::move(library))),
        device_(device),
        gpu_(std::move(gpu)) {}

  int version() const override { return reaper_->library().version(); }
  const std::string& gpu() const override { return gpu_; }
  absl::StatusOr<std::string> NewId() override { return NcclLink::NewId(reaper_->library()); }
  absl::Duration stuck() const override { return reaper_->stuck(); }
  int ending() const override { return reaper_->pending(); }
  std::unique_ptr<NcclChannel> Open(Options options) override {
    return std::make_unique<Channel>(std::make_shared<State>(reaper_, device_, std::move(options)));
  }

 private:
  const std::shared_ptr<NcclReaper> reaper_;
  const int device_;
  const std::string gpu_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<NcclRuntime>> NcclRuntime::Load(const std::string& library,
                                                               int device) {
  std::array<char, 32> bus{};
  const cudaError_t error = cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), device);
  if (error != cudaSuccess) {
    return absl::FailedPreconditionError(
        fmt::format("no GPU {}: CUDA says {}", device, cudaGetErrorString(error)));
  }
  std::string host;
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nothing here sets the environment
  if (const char* named = std::getenv("NCCL_HOSTID")) {  // as NCCL itself tells hosts apart
    host = named;
  } else {
    std::ifstream("/proc/sys/kernel/random/boot_id") >> host;
  }
  KVT_ASSIGN_OR_RETURN(std::shared_ptr<const NcclLibrary> loaded, NcclLibrary::Load(library));
  return std::make_shared<Runtime>(std::move(loaded), device, host + "/" + bus.data());
}

}  // namespace kvtier::transport
