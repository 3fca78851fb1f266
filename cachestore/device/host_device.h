#pragma once

#include "cachestore/device/device.h"

namespace kvtier::cachestore {

// Pages in host memory, codecs on the calling thread. Thread-safe.
class HostDevice final : public Device {
 public:
  HostDevice() = default;
  HostDevice(const HostDevice&) = delete;
  HostDevice& operator=(const HostDevice&) = delete;
  ~HostDevice() override;

  const char* name() const override { return "host"; }
  absl::StatusOr<std::byte*> Reserve(std::int64_t bytes) override;
  absl::Status Encode(absl::Span<const EncodeJob> jobs) override;
  absl::Status Decode(absl::Span<const DecodeJob> jobs) override;
  void Zero(std::byte* memory, std::int64_t bytes) override;
  void Copy(std::byte* to, const std::byte* from, std::int64_t bytes) override;
  void Write(std::byte* to, const void* host, std::int64_t bytes) override;
  void Fetch(void* host, const std::byte* from, std::int64_t bytes) override;
  std::uint64_t Checksum(const std::byte* memory, std::int64_t bytes) override;

 private:
  std::byte* slab_ = nullptr;
  std::int64_t size_ = 0;
};

}  // namespace kvtier::cachestore
