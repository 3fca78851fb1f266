#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "transport/device_piece.h"

struct CUevent_st;

// Transfers between the GPUs of two processes, without NCCL's or CUDA's headers.
namespace kvtier::transport {

// What goes to the other end, or comes from there, in one go: pieces of the same sizes at both
// ends.
struct NcclTransfer {
  std::vector<DevicePiece> pieces;  // those of no bytes are left out
  // Begins once it has happened: what fills the pieces, or used them before. May be null.
  std::shared_ptr<CUevent_st> after = nullptr;
  // Is told once how it ended, from the channel's thread, which waits for it: TRANSPORT_LOST where
  // it failed.
  std::function<void(const absl::Status&)> done;
};

// One end of a communicator of two ranks, whose transfers all go in one direction. They have
// numbers, from 0 on, in whose order both ends take them, whatever the order they are posted in.
// A thread of its own connects and moves them; where nothing moves for the deadline, or the other
// end fails, all of it has failed and is over. Thread-safe.
class NcclChannel {
 public:
  virtual ~NcclChannel() = default;  // closes it

  // INVALID_ARGUMENT where the number was there, or is far ahead of the next; TRANSPORT_LOST where
  // the channel has failed. The pieces must stay until it's done, those of one that failed longer:
  // Options.memory says until when.
  virtual absl::Status Post(std::uint64_t number, NcclTransfer transfer) = 0;
  // Of the sending end: the other awaits so many transfers, from the first on. Others wait.
  virtual void Allow(std::uint64_t transfers) = 0;
  // Whoever waits is told `why`, as TRANSPORT_LOST. Only the first time.
  virtual void Close(const std::string& why) = 0;
  // OK while it can be used; connecting counts as that.
  virtual absl::Status status() const = 0;
  // For how long nothing was to do.
  virtual absl::Duration idle() const = 0;
};

// NCCL of this process, and one GPU. Thread-safe.
class NcclRuntime {
 public:
  // `library`: a path, or a name that the loader finds. FAILED_PRECONDITION where there is no NCCL,
  // or none that can be used, or no such GPU, or the program was built without.
  static absl::StatusOr<std::shared_ptr<NcclRuntime>> Load(const std::string& library, int device);
  virtual ~NcclRuntime() = default;

  virtual int version() const = 0;  // as NCCL counts
  // The GPU, as no other is called: NCCL_HOSTID or the host's boot id, and the PCI bus id.
  virtual const std::string& gpu() const = 0;
  // What both ends connect by. Whoever makes it keeps a thread and a socket until both have joined;
  // that's for the worker, so that they end with it.
  virtual absl::StatusOr<std::string> NewId() = 0;
  // How long ending a communicator has taken until now. One that takes very long means that the GPU
  // can't be used any more.
  virtual absl::Duration stuck() const = 0;
  // Communicators that are being ended.
  virtual int ending() const = 0;

  struct Options {
    std::string id;
    bool server = false;      // else the worker
    bool sends = false;       // else it receives
    absl::Duration deadline;  // of connecting, and for which nothing may move
    // What transfers use: kept until the GPU can't touch it any more.
    std::shared_ptr<const void> memory;
  };
  // Begins to connect.
  virtual std::unique_ptr<NcclChannel> Open(Options options) = 0;
};

}  // namespace kvtier::transport
