#include "cachestore/device/host_device.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <xxhash.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "cachestore/base/check.h"
#include "cachestore/base/errors.h"
#include "kernels/host_codec.h"

namespace kvtier::cachestore {

HostDevice::~HostDevice() {
  if (slab_ != nullptr) munmap(slab_, static_cast<std::size_t>(size_));
}

absl::StatusOr<std::byte*> HostDevice::Reserve(std::int64_t bytes) {
  KVT_CHECK(slab_ == nullptr);
  // MAP_POPULATE touches every page now: the first writes into fresh memory are several times
  // slower than later ones.
  void* slab = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (slab == MAP_FAILED) {
    return Error(Reason::kBudget,
                 fmt::format("memory is {} bytes; the host can't reserve so much: {}", bytes,
                             std::generic_category().message(errno)));
  }
  slab_ = static_cast<std::byte*>(slab);
  size_ = bytes;
  return slab_;
}

absl::Status HostDevice::Encode(absl::Span<const EncodeJob> jobs) {
  for (const EncodeJob& job : jobs) {
    const std::uint64_t saturated = kernels::EncodeOnHost(job.run);
    if (job.saturated != nullptr) *job.saturated += saturated;
    if (job.fills.bytes > 0) Checksum({&job.fills, 1});  // it is in the cache
  }
  return absl::OkStatus();
}

absl::Status HostDevice::Decode(absl::Span<const DecodeJob> jobs) {
  for (const DecodeJob& job : jobs) {
    const std::uint64_t saturated = kernels::DecodeOnHost(job.run);
    if (job.saturated != nullptr) *job.saturated += saturated;
  }
  return absl::OkStatus();
}

void HostDevice::Zero(absl::Span<const Piece> pieces) {
  for (const Piece& piece : pieces)
    std::memset(piece.memory, 0, static_cast<std::size_t>(piece.bytes));
}

void HostDevice::Copy(absl::Span<const Transfer> transfers) {
  for (const Transfer& transfer : transfers)
    std::memcpy(transfer.to, transfer.from, static_cast<std::size_t>(transfer.bytes));
}

void HostDevice::Checksum(absl::Span<const ChecksumJob> jobs) {
  for (const ChecksumJob& job : jobs)
    *job.checksum = XXH3_64bits(job.memory, static_cast<std::size_t>(job.bytes));
}

}  // namespace kvtier::cachestore
