#pragma once

#include <cstdint>

#include "tests/support/faulty_device.h"

namespace kvtier::sim {

// A device that fails when it's told to, and can have a bug.
class SimDevice final : public cachestore::Device {
 public:
  SimDevice(cachestore::Device& device, int forgets_one_copy_of)
      : faulty_(device), forgets_one_of_(forgets_one_copy_of) {}

  testing::FaultyDevice& faults() { return faulty_; }

  const char* name() const override { return "simulated"; }
  absl::StatusOr<std::byte*> Reserve(std::int64_t bytes) override { return faulty_.Reserve(bytes); }
  absl::Status Encode(absl::Span<const cachestore::EncodeJob> jobs) override {
    return faulty_.Encode(jobs);
  }
  absl::Status Decode(absl::Span<const cachestore::DecodeJob> jobs) override {
    return faulty_.Decode(jobs);
  }
  void Zero(absl::Span<const cachestore::Piece> pieces) override { faulty_.Zero(pieces); }
  void Copy(absl::Span<const cachestore::Transfer> transfers) override {
    for (const cachestore::Transfer& transfer : transfers) {
      if (forgets_one_of_ > 0 && ++copies_ % forgets_one_of_ == 0) continue;
      faulty_.Copy({&transfer, 1});
    }
  }
  void Write(absl::Span<const cachestore::Transfer> transfers) override {
    faulty_.Write(transfers);
  }
  void Fetch(absl::Span<const cachestore::Transfer> transfers) override {
    faulty_.Fetch(transfers);
  }
  void Checksum(absl::Span<const cachestore::ChecksumJob> jobs) override { faulty_.Checksum(jobs); }
  void Largest(absl::Span<const cachestore::LargestJob> jobs) override { faulty_.Largest(jobs); }
  absl::Status Health() const override { return faulty_.Health(); }

 private:
  testing::FaultyDevice faulty_;
  const int forgets_one_of_;
  std::int64_t copies_ = 0;
};

}  // namespace kvtier::sim
