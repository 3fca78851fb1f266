// What is NCCL's of the transports: how one is opened, and what it may cost others.

#include <fmt/format.h>

#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "service/rpc/transports.h"

namespace kvtier::service {
namespace {

using cachestore::Error;
using cachestore::Reason;

constexpr std::size_t kUniqueIdBytes = 128;
// Who hasn't used a transport for so long can wait for another.
constexpr absl::Duration kLeastIdle = absl::Seconds(1);
// How long it may take until the GPU can't touch its memory any more.
constexpr absl::Duration kMostEnding = absl::Milliseconds(500);

absl::Status Refuse(const std::string& why) {
  return Error(Reason::kTransportUnavailable,
               why + "; shared memory (shm) works on one host, and messages everywhere");
}

absl::Status Check(const v1::NcclTransport& wanted, const transport::NcclRuntime& runtime) {
  if (wanted.direction() != v1::DIRECTION_READ && wanted.direction() != v1::DIRECTION_APPEND) {
    return Error(Reason::kInvalidField, fmt::format("nccl.direction is {}; want READ or APPEND",
                                                    static_cast<int>(wanted.direction())));
  }
  if (wanted.unique_id().size() != kUniqueIdBytes) {
    return Error(Reason::kInvalidField, fmt::format("nccl.unique_id has {} bytes; want {}",
                                                    wanted.unique_id().size(), kUniqueIdBytes));
  }
  if (wanted.nccl_version() != runtime.version()) {
    return Refuse(
        fmt::format("nccl.nccl_version is {}; the server's is {}, and NCCL wants the same",
                    wanted.nccl_version(), runtime.version()));
  }
  if (wanted.gpu() == runtime.gpu())
    return Refuse(fmt::format("nccl.gpu is {}, the server's own; NCCL wants two", wanted.gpu()));
  return absl::OkStatus();
}

}  // namespace

void Transports::SetNccl(std::shared_ptr<transport::NcclRuntime> runtime,
                         std::shared_ptr<NcclMemory> memory, const std::string& why) {
  absl::MutexLock lock(&mutex_);
  nccl_ = std::move(runtime);
  nccl_memory_ = std::move(memory);
  why_no_nccl_ = why;
}

std::shared_ptr<const transport::Region> Transports::TakeNcclMemory(NcclMemory& memory) {
  if (auto region = memory.Take(absl::ZeroDuration())) return region;
  Transport closed;
  {
    absl::MutexLock lock(&mutex_);
    auto longest = transports_.end();
    absl::Duration most = kLeastIdle;
    for (auto it = transports_.begin(); it != transports_.end(); ++it) {
      if (it->second.nccl == nullptr) continue;
      const absl::Duration idle = it->second.nccl->channel().idle();
      if (idle < most) continue;
      most = idle;
      longest = it;
    }
    if (longest != transports_.end()) {
      closed = std::move(longest->second);
      transports_.erase(longest);
    }
  }
  closed = {};  // without the lock
  return memory.Take(kMostEnding);
}

absl::Status Transports::OpenNccl(const v1::NcclTransport& wanted,
                                  v1::OpenTransportResponse& response) {
  KVT_ASSIGN_OR_RETURN(const std::string id, NewId());
  std::shared_ptr<transport::NcclRuntime> runtime;
  std::shared_ptr<NcclMemory> memory;
  {
    absl::MutexLock lock(&mutex_);
    if (nccl_ == nullptr) return Refuse("no NCCL here: " + why_no_nccl_);
    runtime = nccl_;
    memory = nccl_memory_;
  }
  KVT_RETURN_IF_ERROR(Check(wanted, *runtime));
  std::shared_ptr<const transport::Region> region = TakeNcclMemory(*memory);
  if (region == nullptr) {
    return Error(Reason::kTooManyTransports,
                 "as many NCCL transports are in use as there is memory for "
                 "(--max-nccl-transports)");
  }
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(CheckRoom());
  auto nccl = std::make_shared<NcclTransport>(
      *runtime, *memory, region,
      transport::NcclRuntime::Options{.id = wanted.unique_id(),
                                      .server = true,
                                      .sends = wanted.direction() == v1::DIRECTION_READ,
                                      .deadline = limits_.nccl_deadline,
                                      .memory = region});
  response.set_transport_id(id);
  response.set_memory_bytes(static_cast<std::uint64_t>(region->size()));
  response.set_max_transfer_bytes(static_cast<std::uint64_t>(nccl->slot_bytes()));
  Transport& opened = transports_[id];
  opened.memory = std::move(region);
  opened.nccl = std::move(nccl);
  return absl::OkStatus();
}

}  // namespace kvtier::service
