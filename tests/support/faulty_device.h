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
  void Zero(absl::Span<const cachestore::Piece> pieces) override { device_.Zero(pieces); }
  void Copy(absl::Span<const cachestore::Transfer> transfers) override { device_.Copy(transfers); }
  void Write(absl::Span<const cachestore::Transfer> transfers) override {
    device_.Write(transfers);
  }
  void Fetch(absl::Span<const cachestore::Transfer> transfers) override {
    device_.Fetch(transfers);
  }
  void Checksum(absl::Span<const cachestore::ChecksumJob> jobs) override { device_.Checksum(jobs); }
  void Largest(absl::Span<const cachestore::LargestJob> jobs) override { device_.Largest(jobs); }
  void Pin(std::byte* memory, std::int64_t bytes) override { device_.Pin(memory, bytes); }
  void Unpin(std::byte* memory) override { device_.Unpin(memory); }
  absl::Status Health() const override { return device_.Health(); }

 private:
  static constexpr std::int64_t kNever = std::int64_t{1} << 60;

  cachestore::Device& device_;
  std::atomic<std::int64_t> encodes_left_{kNever};
  std::atomic<std::int64_t> decodes_left_{kNever};
};

}  // namespace kvtier::testing
