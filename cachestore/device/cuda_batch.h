#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cachestore/device/cuda_handles.h"
#include "cachestore/device/device.h"
#include "kernels/cuda_jobs.h"
#include "kernels/cuda_tiles.h"

namespace kvtier::cachestore {

// Memory that host and device both have, byte for byte, and the stream that brings one to the
// other.
struct StagingSlot {
  PinnedMemory host;
  DeviceMemory device;
  std::int64_t bytes = 0;
  CudaStream stream;
  CudaEvent done;
};

// Bytes that are moved on the device, to or from host memory by way of the slot; `from` null:
// zeros.
struct StagedMove {
  Transfer transfer;
  bool host_from = false;
  bool host_to = false;
};
// Where a job's values lie: what is pinned the device reaches as it does its own, but slowly.
enum class Place { kDevice, kPinned, kHost };
struct StagedEncode {
  EncodeJob job;
  Place source = Place::kDevice;
};
struct StagedDecode {
  DecodeJob job;
  Place out = Place::kDevice;
};

// Jobs that go to the device together: what they need of the host goes up in one copy, each kind of
// kernel is launched once, and what they give comes back. Moves run first, then what brings pinned
// values in and what rotates them, encoders and decoders, then checksums. Not thread-safe.
class CudaBatch {
 public:
  explicit CudaBatch(StagingSlot& slot) : slot_(&slot), end_(slot.bytes) {}

  // Whether there is room for another. An empty batch has room for each job that `Most` allows.
  bool Fits(const StagedMove& move) const { return Room() >= BytesOf(move); }
  bool Fits(const StagedEncode& encode) const { return Room() >= BytesOf(encode); }
  bool Fits(const StagedDecode& decode) const { return Room() >= BytesOf(decode); }
  bool Fits(const ChecksumJob&) const { return Room() >= kTableBytes; }
  bool Fits(const LargestJob& job) const { return Room() >= BytesOf(job); }
  // Copies what is the host's to the slot.
  void Add(const StagedMove& move);
  void Add(const StagedEncode& encode);
  void Add(const StagedDecode& decode);
  void Add(const ChecksumJob& job);  // longer than kernels::kShortHash
  void Add(const LargestJob& job);

  // Of one job: how many bytes, units and tokens at the most, at least one.
  static std::int64_t MostBytes(std::int64_t slot_bytes) { return slot_bytes / 4; }
  static std::int64_t MostUnits(const kernels::EncodeRun& run, std::int64_t slot_bytes);
  static std::int64_t MostTokens(const kernels::DecodeRun& run, std::int64_t slot_bytes);
  static std::int64_t MostTokens(std::int64_t slot_bytes);  // of a LargestJob

  // Sends it off. Its kernels run after what was before `after`, which may be null.
  absl::Status Launch(const CudaEvent* after);
  // Waits for it, and hands out what came back.
  absl::Status Finish(absl::Duration deadline);

  StagingSlot& slot() const { return *slot_; }

 private:
  // What tables take for a job beside its tiles: itself twice, where it's rotated first, its count,
  // its checksum.
  static constexpr std::int64_t kTableBytes = 512;
  static constexpr std::int64_t kAlign = 256;

  template <class Kind, class Job>
  struct Planned {
    Kind kind;
    Job job;
    kernels::Items items;
  };
  using PlannedEncode = Planned<kernels::EncodeLaunch, kernels::DeviceEncode>;
  using PlannedDecode = Planned<kernels::DecodeLaunch, kernels::DeviceDecode>;
  using PlannedMove = Planned<int, kernels::DeviceMove>;
  // Rows that come back, `stride` bytes apart where they belong.
  struct Return {
    std::byte* to;
    const std::byte* from;
    std::int64_t rows;
    std::int64_t row_bytes;
    std::int64_t stride;
  };
  // A result of a job: added to `count`, or written to one of the others.
  struct Result {
    std::uint64_t* count = nullptr;
    std::uint64_t* checksum = nullptr;
    float* largest = nullptr;
  };

  static std::int64_t BytesOf(const StagedMove& move);
  static std::int64_t BytesOf(const StagedEncode& encode);
  static std::int64_t BytesOf(const StagedDecode& decode);
  static std::int64_t BytesOf(const LargestJob& job);
  std::int64_t Room() const { return end_ - front_ - tables_; }
  // Offsets in the slot. What goes up lies in front, what comes back, or stays, at the end.
  std::int64_t PlaceInFront(std::int64_t bytes);
  std::int64_t PlaceAtEnd(std::int64_t bytes);
  std::byte* OnDevice(std::int64_t offset) const { return slot_->device.get() + offset; }
  std::byte* OnHost(std::int64_t offset) const { return slot_->host.get() + offset; }
  template <class T>
  const T* PutTable(const std::vector<T>& table);
  template <class Kind, class Job, class F>
  void PutTables(const std::vector<Planned<Kind, Job>>& planned, F launch);

  StagingSlot* slot_;
  std::int64_t front_ = 0;
  std::int64_t end_;
  std::int64_t tables_ = 0;  // what they will take at the most
  std::vector<PlannedMove> moves_;
  std::vector<PlannedEncode> gathers_, rotations_, encodes_;
  std::vector<PlannedDecode> decodes_;
  std::vector<ChecksumJob> hashes_;
  std::vector<LargestJob> largest_;
  std::vector<Result> results_;  // of encodes, decodes, hashes, largest
  std::int64_t results_at_ = 0;
  std::vector<Return> returns_;
  std::vector<std::function<int()>> launches_;
};

}  // namespace kvtier::cachestore
