#include "cachestore/device/host_device.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "cachestore/base/checksum.h"
#include "cachestore/base/errors.h"
#include "kernels/host_codec.h"

namespace kvtier::cachestore {

HostDevice::~HostDevice() {
  for (const std::span<std::byte> memory : reserved_) munmap(memory.data(), memory.size());
}

absl::StatusOr<std::byte*> HostDevice::Reserve(std::int64_t bytes) {
  // MAP_POPULATE touches every page now: the first writes into fresh memory are several times
  // slower than later ones.
  void* memory = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) {
    return Error(Reason::kBudget,
                 fmt::format("memory is {} bytes; the host can't reserve so much: {}", bytes,
                             std::generic_category().message(errno)));
  }
  reserved_.emplace_back(static_cast<std::byte*>(memory), static_cast<std::size_t>(bytes));
  return reserved_.back().data();
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
  for (const ChecksumJob& job : jobs) *job.checksum = ChecksumOf(job.memory, job.bytes);
}

void HostDevice::Largest(absl::Span<const LargestJob> jobs) {
  for (const LargestJob& job : jobs)
    *job.largest = kernels::LargestMagnitude(job.rows, job.dim, job.tokens);
}

}  // namespace kvtier::cachestore
