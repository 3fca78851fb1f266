#pragma once

#include <atomic>
#include <cstdint>

#include "cachestore/device/device.h"

namespace kvtier::testing {

// Another device that can be told to fail. Thread-safe.
class FaultyDevice final : public cachestore::Device {
 public:
  // `device` must outlive it.
  explicit FaultyDevice(cachestore::Device& device) : device_(device) {}

  // The `calls`-th Encode from now fails, and all after it, having done nothing. 0: none does.
  void FailEncode(std::int64_t calls) { encodes_left_ = calls > 0 ? calls : kNever; }
  void FailDecode(std::int64_t calls) { decodes_left_ = calls > 0 ? calls : kNever; }

  const char* name() const override { return "faulty"; }
  absl::StatusOr<std::byte*> Reserve(std::int64_t bytes) override { return device_.Reserve(bytes); }
  absl::Status Encode(absl::Span<const cachestore::EncodeJob> jobs) override {
    if (encodes_left_.fetch_sub(1) <= 1) return absl::UnavailableError("the device is lost");
    return device_.Encode(jobs);
  }
  absl::Status Decode(absl::Span<const cachestore::DecodeJob> jobs) override {
    if (decodes_left_.fetch_sub(1) <= 1) return absl::UnavailableError("the device is lost");
    return device_.Decode(jobs);
  }
  void Zero(std::byte* memory, std::int64_t bytes) override { device_.Zero(memory, bytes); }
  void Copy(std::byte* to, const std::byte* from, std::int64_t bytes) override {
    device_.Copy(to, from, bytes);
  }
  void Write(std::byte* to, const void* host, std::int64_t bytes) override {
    device_.Write(to, host, bytes);
  }
  void Fetch(void* host, const std::byte* from, std::int64_t bytes) override {
    device_.Fetch(host, from, bytes);
  }
  std::uint64_t Checksum(const std::byte* memory, std::int64_t bytes) override {
    return device_.Checksum(memory, bytes);
  }

 private:
  static constexpr std::int64_t kNever = std::int64_t{1} << 60;

  cachestore::Device& device_;
  std::atomic<std::int64_t> encodes_left_{kNever};
  std::atomic<std::int64_t> decodes_left_{kNever};
};

}  // namespace kvtier::testing
