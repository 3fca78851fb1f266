#pragma once

#include <nccl.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvtier::transport {

// NCCL, loaded at run time: programs start without it, and can take the copy that an engine has.
// Never unloaded: threads of its own may run. Thread-safe.
class NcclLibrary {
 public:
  // `path`: a file, or a name that the loader finds, "libnccl.so.2". FAILED_PRECONDITION where
  // there is none, or one older than 2.27, whose communicators can't be made without blocking.
  static absl::StatusOr<std::shared_ptr<const NcclLibrary>> Load(const std::string& path);

  // As NCCL counts: 22809 is 2.28.9. Two ends must have the same.
  int version() const { return version_; }

  // Of a call of NCCL's, which `what` names: UNAVAILABLE where the peer or the network is gone,
  // FAILED_PRECONDITION where both ends can't work together, else INTERNAL. `comm` may be null.
  absl::Status StatusOf(ncclResult_t result, const char* what, ncclComm_t comm) const;

  decltype(&::ncclGetUniqueId) GetUniqueId = nullptr;
  decltype(&::ncclCommInitRankConfig) CommInitRankConfig = nullptr;
  decltype(&::ncclCommGetAsyncError) CommGetAsyncError = nullptr;
  decltype(&::ncclCommAbort) CommAbort = nullptr;
  decltype(&::ncclSend) Send = nullptr;
  decltype(&::ncclRecv) Recv = nullptr;
  decltype(&::ncclGroupStart) GroupStart = nullptr;
  decltype(&::ncclGroupEnd) GroupEnd = nullptr;

 private:
  NcclLibrary() = default;

  int version_ = 0;
  decltype(&::ncclGetErrorString) get_error_string_ = nullptr;
  decltype(&::ncclGetLastError) get_last_error_ = nullptr;
};

}  // namespace kvtier::transport
