#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/codec_run.h"

namespace kvtier::cachestore {

// One head's run of units to encode or decode, and where to add up what saturated (may be null).
struct EncodeJob {
  kernels::EncodeRun run;
  std::uint64_t* saturated = nullptr;
};
struct DecodeJob {
  kernels::DecodeRun run;
  std::uint64_t* saturated = nullptr;
};

// Where pages live and where codecs run. Pointers into reserved memory belong to the device: nobody
// else follows them. Thread-safe for jobs with disjoint outputs. Jobs of one call may run in any
// order and at once, so none may read what another of the same call writes; calls of one thread
// take effect in order.
class Device {
 public:
  virtual ~Device() = default;

  virtual const char* name() const = 0;

  // Reserves and touches the one slab that the arena carves up; called once. RESOURCE_EXHAUSTED
  // when there is not so much.
  virtual absl::StatusOr<std::byte*> Reserve(std::int64_t bytes) = 0;

  virtual absl::Status Encode(absl::Span<const EncodeJob> jobs) = 0;
  virtual absl::Status Decode(absl::Span<const DecodeJob> jobs) = 0;

  virtual void Zero(std::byte* memory, std::int64_t bytes) = 0;
  virtual void Copy(std::byte* to, const std::byte* from, std::int64_t bytes) = 0;
  // Between host memory and the device's.
  virtual void Write(std::byte* to, const void* host, std::int64_t bytes) = 0;
  virtual void Fetch(void* host, const std::byte* from, std::int64_t bytes) = 0;

  // XXH3, 64 bits, seed 0.
  virtual std::uint64_t Checksum(const std::byte* memory, std::int64_t bytes) = 0;
};

}  // namespace kvtier::cachestore
