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
  void Zero(std::byte* memory, std::int64_t bytes) override { faulty_.Zero(memory, bytes); }
  void Copy(std::byte* to, const std::byte* from, std::int64_t bytes) override {
    if (forgets_one_of_ > 0 && ++copies_ % forgets_one_of_ == 0) return;
    faulty_.Copy(to, from, bytes);
  }
  void Write(std::byte* to, const void* host, std::int64_t bytes) override {
    faulty_.Write(to, host, bytes);
  }
  void Fetch(void* host, const std::byte* from, std::int64_t bytes) override {
    faulty_.Fetch(host, from, bytes);
  }
  std::uint64_t Checksum(const std::byte* memory, std::int64_t bytes) override {
    return faulty_.Checksum(memory, bytes);
  }

 private:
  testing::FaultyDevice faulty_;
  const int forgets_one_of_;
  std::int64_t copies_ = 0;
};

}  // namespace kvtier::sim
