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

void HostDevice::Zero(std::byte* memory, std::int64_t bytes) {
  std::memset(memory, 0, static_cast<std::size_t>(bytes));
}

void HostDevice::Copy(std::byte* to, const std::byte* from, std::int64_t bytes) {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

void HostDevice::Write(std::byte* to, const void* host, std::int64_t bytes) {
  std::memcpy(to, host, static_cast<std::size_t>(bytes));
}

void HostDevice::Fetch(void* host, const std::byte* from, std::int64_t bytes) {
  std::memcpy(host, from, static_cast<std::size_t>(bytes));
}

std::uint64_t HostDevice::Checksum(const std::byte* memory, std::int64_t bytes) {
  return XXH3_64bits(memory, static_cast<std::size_t>(bytes));
}

}  // namespace kvtier::cachestore
