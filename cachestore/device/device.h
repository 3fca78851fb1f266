#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/codec_run.h"

namespace kvtier::cachestore {

// Memory of the device. Of a job that checksums it, where the checksum goes: XXH3, 64 bits, seed 0.
struct Piece {
  std::byte* memory = nullptr;
  std::int64_t bytes = 0;
};
struct ChecksumJob {
  const std::byte* memory = nullptr;
  std::int64_t bytes = 0;
  std::uint64_t* checksum = nullptr;
};
// Bytes that go from one place to another; one of the two may be host memory.
struct Transfer {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::int64_t bytes = 0;
};

// Rows of `dim` channels in memory of the device: where the largest |x| goes; a NaN counts as
// larger than infinity.
struct LargestJob {
  kernels::ConstRows rows;
  int dim = 0;
  std::int64_t tokens = 0;
  float* largest = nullptr;
};

// One head's run of units to encode or decode, and where to add up what saturated (may be null).
struct EncodeJob {
  kernels::EncodeRun run;
  std::uint64_t* saturated = nullptr;
  // What is full once this and the jobs before it are done, if anything is: it is checksummed then.
  ChecksumJob fills = {};
};
struct DecodeJob {
  kernels::DecodeRun run;
  std::uint64_t* saturated = nullptr;
};

// Where pages live and where codecs run. Pointers into reserved memory belong to the device: nobody
// else follows them. Thread-safe for jobs with disjoint outputs. Jobs of one call may run in any
// order and at once, so none may read what another of the same call writes; calls of one thread
// take effect in order. What a call is given may go once it has returned.
class Device {
 public:
  virtual ~Device() = default;

  virtual const char* name() const = 0;

  // Reserves and touches memory, before the first job: the slab that the arena carves up, and what
  // transports have. RESOURCE_EXHAUSTED when there is not so much.
  virtual absl::StatusOr<std::byte*> Reserve(std::int64_t bytes) = 0;

  virtual absl::Status Encode(absl::Span<const EncodeJob> jobs) = 0;
  virtual absl::Status Decode(absl::Span<const DecodeJob> jobs) = 0;

  // None of these says whether it succeeded: Health does.
  virtual void Zero(absl::Span<const Piece> pieces) = 0;
  virtual void Copy(absl::Span<const Transfer> transfers) = 0;
  // From host memory to the device's, and back.
  virtual void Write(absl::Span<const Transfer> transfers) = 0;
  virtual void Fetch(absl::Span<const Transfer> transfers) = 0;
  virtual void Checksum(absl::Span<const ChecksumJob> jobs) = 0;
  virtual void Largest(absl::Span<const LargestJob> jobs) = 0;

  // Lets the device reach host memory by itself, until Unpin: jobs whose source or output lies
  // there need no copy of it. Where it can't, they work as they do without. Only memory that stays
  // mapped until then, of whole pages.
  virtual void Pin(std::byte* /*memory*/, std::int64_t /*bytes*/) {}
  virtual void Unpin(std::byte* /*memory*/) {}

  // UNAVAILABLE once the device is lost, for ever: what it was asked for since may not have
  // happened, and what it gave may be anything.
  virtual absl::Status Health() const { return absl::OkStatus(); }
};

}  // namespace kvtier::cachestore
