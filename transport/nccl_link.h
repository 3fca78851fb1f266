#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "transport/device_piece.h"
#include "transport/nccl_library.h"

namespace kvtier::transport {

// Ends communicators on a thread of its own: NCCL's abort may block, and nobody else shall wait for
// it. Thread-safe. When it goes, what has not ended a moment later is left to itself.
class NcclReaper {
 public:
  explicit NcclReaper(std::shared_ptr<const NcclLibrary> library);
  ~NcclReaper();
  NcclReaper(const NcclReaper&) = delete;
  NcclReaper& operator=(const NcclReaper&) = delete;

  const NcclLibrary& library() const;

  // Takes all of it: the stream goes after the communicator, then what the transfers used.
  struct Remains {
    ncclComm_t comm = nullptr;
    cudaStream_t stream = nullptr;
    std::shared_ptr<const void> memory;
  };
  void Abort(Remains remains);
  // How long the abort that is under way has taken; zero where none is. One that takes very long
  // means that the GPU can't be used any more.
  absl::Duration stuck() const;
  // Aborts that were asked for and have not ended.
  int pending() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

// A communicator of two ranks, a server's GPU and a worker's, and a stream that carries its
// transfers. Nothing it does waits longer than it was told to. After an error it is broken: its
// communicator is aborted, and every call gives that error again. Both ends must then make a new
// one. Not thread-safe; its device must be the thread's.
class NcclLink {
 public:
  enum class Rank : int { kServer = 0, kWorker = 1 };

  // What both ends connect by. Whoever makes it keeps a thread and a socket until both have joined;
  // that's for the worker, so that they end with it.
  static absl::StatusOr<std::string> NewId(const NcclLibrary& library);

  struct Options {
    std::string id;
    Rank rank = Rank::kServer;
    absl::Duration deadline;  // of connecting
    // Kept until the GPU can't touch it any more, which is some time after the link is broken.
    std::shared_ptr<const void> memory = nullptr;
    // Once true, whoever waits is CANCELLED. May be null; must outlive the link.
    const std::atomic<bool>* cancelled = nullptr;
  };
  // Waits for the other end. DEADLINE_EXCEEDED where it doesn't come, FAILED_PRECONDITION where the
  // two can't work together, or there is no GPU. `reaper` must outlive it.
  static absl::StatusOr<std::unique_ptr<NcclLink>> Connect(NcclReaper& reaper, Options options);
  ~NcclLink();
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  // Puts all pieces on the stream, in one group, behind what is there. The other end must do its
  // part with as many pieces of the same sizes. The memory must stay until Wait returned.
  absl::Status Send(absl::Span<const DevicePiece> pieces, absl::Duration deadline);
  absl::Status Receive(absl::Span<const DevicePiece> pieces, absl::Duration deadline);
  // Until the stream has done all of it. UNAVAILABLE where the other end is gone.
  absl::Status Wait(absl::Duration deadline);
  // The same by a look, without waiting: whether it is done.
  absl::StatusOr<bool> Done();

  cudaStream_t stream() const { return stream_; }
  const absl::Status& health() const { return health_; }

 private:
  NcclLink(NcclReaper& reaper, Options options) : reaper_(reaper), options_(std::move(options)) {}

  absl::Status Break(absl::Status why);
  // Until NCCL has taken what it was given: before that nothing of it is on the stream.
  absl::Status Settle(const char* what, absl::Duration deadline);
  int peer() const { return options_.rank == Rank::kServer ? 1 : 0; }
  template <class F>
  absl::Status Poll(const char* what, absl::Duration deadline, F look) const;
  template <class F>
  absl::Status Group(absl::Span<const DevicePiece> pieces, absl::Duration deadline,
                     const char* what, F transfer);

  NcclReaper& reaper_;
  Options options_;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  absl::Status health_;
};

}  // namespace kvtier::transport
