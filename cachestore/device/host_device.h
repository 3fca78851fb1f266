#pragma once

#include <cstddef>
#include <span>
#include <vector>

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
  void Zero(absl::Span<const Piece> pieces) override;
  void Copy(absl::Span<const Transfer> transfers) override;
  void Write(absl::Span<const Transfer> transfers) override { Copy(transfers); }
  void Fetch(absl::Span<const Transfer> transfers) override { Copy(transfers); }
  void Checksum(absl::Span<const ChecksumJob> jobs) override;
  void Largest(absl::Span<const LargestJob> jobs) override;

 private:
  std::vector<std::span<std::byte>> reserved_;
};

}  // namespace kvtier::cachestore
