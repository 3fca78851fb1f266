#include "cachestore/device/cuda_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "cachestore/base/check.h"
#include "cachestore/base/checksum.h"
#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/device/cuda_batch.h"
#include "kernels/codec_table.h"

namespace kvtier::cachestore {
namespace {

bool IsShort(const ChecksumJob& job) { return job.bytes <= kernels::kShortHash; }

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(const CudaOptions& options)
      : options_(options), name_(fmt::format("cuda:{}", options.index)) {}

  absl::Status Open();

  const char* name() const override { return name_.c_str(); }
  absl::StatusOr<std::byte*> Reserve(std::int64_t bytes) override;
  absl::Status Encode(absl::Span<const EncodeJob> jobs) override;
  absl::Status Decode(absl::Span<const DecodeJob> jobs) override;
  void Zero(absl::Span<const Piece> pieces) override;
  void Copy(absl::Span<const Transfer> transfers) override;
  void Write(absl::Span<const Transfer> transfers) override;
  void Fetch(absl::Span<const Transfer> transfers) override;
  void Checksum(absl::Span<const ChecksumJob> jobs) override;
  void Largest(absl::Span<const LargestJob> jobs) override;
  void Pin(std::byte* memory, std::int64_t bytes) override ABSL_LOCKS_EXCLUDED(mutex_);
  void Unpin(std::byte* memory) override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Health() const override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return health_;
  }

 private:
  class Call;

  Place PlaceOf(const std::byte* memory) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for a slot; null once the device is lost, or where one shall not wait.
  StagingSlot* TakeSlot(bool wait) ABSL_LOCKS_EXCLUDED(mutex_);
  void GiveBack(StagingSlot* slot) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    free_.push_back(slot);
  }
  // Says once and for all that it is.
  void Lose(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  void Move(absl::Span<const Transfer> transfers, bool host_from, bool host_to);
  // Of what is short, which takes another function than the kernel's.
  void ChecksumHere(absl::Span<const ChecksumJob> jobs);

  const CudaOptions options_;
  const std::string name_;
  struct Reserved {
    DeviceMemory memory;
    std::int64_t bytes = 0;

    bool Has(const std::byte* at) const { return at >= memory.get() && at < memory.get() + bytes; }
  };
  std::vector<Reserved> reserved_;  // of before the first job
  std::vector<StagingSlot> slots_;
  mutable absl::Mutex mutex_;
  std::vector<StagingSlot*> free_ ABSL_GUARDED_BY(mutex_);
  std::map<const std::byte*, std::int64_t> pinned_ ABSL_GUARDED_BY(mutex_);  // bytes from there on
  absl::Status health_ ABSL_GUARDED_BY(mutex_);
};

// The jobs of one call, in as many batches as they need, two of which are under way at a time: one
// is filled while another runs.
class CudaDevice::Call {
 public:
  explicit Call(CudaDevice& device) : device_(device) {
    status_ = device.Health();
    // Of this thread; costs nothing where it is so already.
    if (status_.ok()) Check(CudaStatus("cudaSetDevice", cudaSetDevice(device.options_.index)));
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() { KVT_CHECK(finished_); }

  template <class Job>
  void Add(const Job& job) {
    if (status_.ok() && (!filling_.has_value() || !filling_->Fits(job))) Next();
    if (!status_.ok()) return;
    if (filling_->Fits(job)) return filling_->Add(job);
    refused_ = Error(Reason::kBudget,
                     fmt::format("{}: a unit of the format takes more than its staging slots of {} "
                                 "bytes; register the model with fewer page_tokens",
                                 device_.name_, device_.options_.staging_bytes));
  }

  absl::Status Finish() {
    finished_ = true;
    if (filling_.has_value()) Launch();
    while (!running_.empty()) FinishOldest();
    return status_.ok() ? refused_ : status_;
  }

 private:
  void Check(const absl::Status& status) {
    if (status.ok() || !status_.ok()) return;
    device_.Lose(status);
    status_ = device_.Health();
  }

  void Launch() {
    const CudaEvent* after = running_.empty() ? nullptr : &running_.back().slot().done;
    if (status_.ok()) Check(filling_->Launch(after));
    running_.push_back(*std::exchange(filling_, std::nullopt));
  }

  // Slots of a lost device are never used again: it may still write to them.
  void FinishOldest() {
    CudaBatch batch = std::move(running_.front());
    running_.pop_front();
    if (status_.ok()) Check(batch.Finish(device_.options_.deadline));
    if (status_.ok()) device_.GiveBack(&batch.slot());
  }

  void Next() {
    if (filling_.has_value()) Launch();
    if (running_.size() > 1) FinishOldest();
    if (!status_.ok()) return;
    // Who has a slot does not wait for another: all might.
    StagingSlot* slot = device_.TakeSlot(running_.empty());
    while (slot == nullptr && !running_.empty() && status_.ok()) {
      FinishOldest();
      slot = device_.TakeSlot(running_.empty());
    }
    if (slot == nullptr) return Check(device_.Health());
    filling_.emplace(*slot);
  }

  CudaDevice& device_;
  absl::Status status_;   // of the device
  absl::Status refused_;  // of a job that no slot has room for
  std::optional<CudaBatch> filling_;
  std::deque<CudaBatch> running_;
  bool finished_ = false;
};

absl::Status CudaDevice::Open() {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    return absl::FailedPreconditionError(
        fmt::format("{}: {} ({})", name_, cudaGetErrorString(error), cudaGetErrorName(error)));
  }
  if (options_.index < 0 || options_.index >= devices) {
    return absl::FailedPreconditionError(
        fmt::format("{}: there are {} devices, counted from 0", name_, devices));
  }
  KVT_RETURN_IF_ERROR(CudaStatus("cudaSetDevice", cudaSetDevice(options_.index)));
  for (int i = 0; i < options_.staging_slots; ++i) {
    StagingSlot slot;
    slot.bytes = options_.staging_bytes;
    auto host = AllocatePinned(slot.bytes);
    auto on_device = AllocateOnDevice(slot.bytes);
    for (const absl::Status& status : {host.status(), on_device.status()}) {
      if (status.ok()) continue;
      return Error(Reason::kBudget, fmt::format("{}: no memory for staging slots of {} bytes: {}",
                                                name_, slot.bytes, std::string(status.message())));
    }
    slot.host = *std::move(host);
    slot.device = *std::move(on_device);
    KVT_ASSIGN_OR_RETURN(slot.stream, MakeCudaStream());
    KVT_ASSIGN_OR_RETURN(slot.done, MakeCudaEvent());
    slots_.push_back(std::move(slot));
  }
  absl::MutexLock lock(&mutex_);
  for (StagingSlot& slot : slots_) free_.push_back(&slot);
  return absl::OkStatus();
}

StagingSlot* CudaDevice::TakeSlot(bool wait) {
  absl::MutexLock lock(&mutex_);
  const auto settled = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !free_.empty() || !health_.ok();
  };
  if (wait) mutex_.Await(absl::Condition(&settled));
  if (free_.empty() || !health_.ok()) return nullptr;
  StagingSlot* slot = free_.back();
  free_.pop_back();
  return slot;
}

void CudaDevice::Lose(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  if (health_.ok())
    health_ = Error(Reason::kDeviceLost,
                    fmt::format("{} is lost: {}", name_, std::string(why.message())));
}

absl::StatusOr<std::byte*> CudaDevice::Reserve(std::int64_t bytes) {
  absl::StatusOr<DeviceMemory> slab = AllocateOnDevice(bytes);
  if (!slab.ok()) {
    return Error(Reason::kBudget, fmt::format("memory is {} bytes; {} can't reserve so much: {}",
                                              bytes, name_, std::string(slab.status().message())));
  }
  reserved_.push_back({*std::move(slab), bytes});
  std::byte* const memory = reserved_.back().memory.get();
  StagingSlot& slot = slots_.front();  // nobody else uses the device yet
  KVT_RETURN_IF_ERROR(
      CudaStatus("cudaMemsetAsync",
                 cudaMemsetAsync(memory, 0, static_cast<std::size_t>(bytes), slot.stream.get())));
  KVT_RETURN_IF_ERROR(
      CudaStatus("cudaEventRecord", cudaEventRecord(slot.done.get(), slot.stream.get())));
  KVT_RETURN_IF_ERROR(Await(slot.done, options_.deadline));
  // Kernels that this GPU can't run say so here, and not at the first append.
  const Piece first{memory, std::min<std::int64_t>(bytes, kernels::kShortHash + 1)};
  std::uint64_t checksum = 0;
  const ChecksumJob hash{first.memory, first.bytes, &checksum};
  Zero({&first, 1});
  Checksum({&hash, 1});
  KVT_RETURN_IF_ERROR(Health());
  return memory;
}

Place CudaDevice::PlaceOf(const std::byte* memory) const {
  if (std::any_of(reserved_.begin(), reserved_.end(),
                  [memory](const Reserved& reserved) { return reserved.Has(memory); }))
    return Place::kDevice;
  absl::MutexLock lock(&mutex_);
  const auto behind = pinned_.upper_bound(memory);
  if (behind == pinned_.begin()) return Place::kHost;
  const auto& [begin, bytes] = *std::prev(behind);
  return memory < begin + bytes ? Place::kPinned : Place::kHost;
}

void CudaDevice::Pin(std::byte* memory, std::int64_t bytes) {
  if (!Health().ok() || cudaSetDevice(options_.index) != cudaSuccess) return;
  if (cudaHostRegister(memory, static_cast<std::size_t>(bytes),
                       cudaHostRegisterPortable | cudaHostRegisterMapped) != cudaSuccess)
    return;
  void* seen = nullptr;
  // Kernels follow the host's pointers: on all machines but some, they are the device's too.
  if (cudaHostGetDevicePointer(&seen, memory, 0) != cudaSuccess || seen != memory) {
    cudaHostUnregister(memory);
    return;
  }
  absl::MutexLock lock(&mutex_);
  pinned_.emplace(memory, bytes);
}

void CudaDevice::Unpin(std::byte* memory) {
  {
    absl::MutexLock lock(&mutex_);
    if (pinned_.erase(memory) == 0) return;
  }
  cudaSetDevice(options_.index);
  cudaHostUnregister(memory);
}

absl::Status CudaDevice::Encode(absl::Span<const EncodeJob> jobs) {
  std::vector<ChecksumJob> full, short_ones;
  Call call(*this);
  for (const EncodeJob& job : jobs) {
    if (job.fills.bytes > 0) (IsShort(job.fills) ? short_ones : full).push_back(job.fills);
    const kernels::EncodeRun& run = job.run;
    if (run.dim == 0 || run.units == 0) continue;
    const std::int64_t most = CudaBatch::MostUnits(run, options_.staging_bytes);
    const std::int64_t unit_bytes = kernels::UnitSizeOf(run.codec, run.dim).total();
    const std::int64_t unit_source = kernels::UnitTokens(run.codec) * run.source.token_stride *
                                     kernels::ElementBytes(run.source.type);
    for (std::int64_t first = 0; first < run.units; first += most) {
      StagedEncode piece{job, PlaceOf(run.source.data)};
      piece.job.run.units = static_cast<int>(std::min<std::int64_t>(most, run.units - first));
      piece.job.run.source.data += first * unit_source;
      piece.job.run.out += first * unit_bytes;
      call.Add(piece);
    }
  }
  for (const ChecksumJob& job : full) call.Add(job);
  KVT_RETURN_IF_ERROR(call.Finish());
  ChecksumHere(short_ones);
  return Health();
}

absl::Status CudaDevice::Decode(absl::Span<const DecodeJob> jobs) {
  Call call(*this);
  for (const DecodeJob& job : jobs) {
    const kernels::DecodeRun& run = job.run;
    if (run.dim == 0 || run.tokens == 0) continue;
    const std::int64_t most = CudaBatch::MostTokens(run, options_.staging_bytes);
    const std::int64_t stride = run.out.token_stride * kernels::ElementBytes(run.out.type);
    for (std::int64_t first = 0; first < run.tokens; first += most) {
      StagedDecode piece{job, PlaceOf(run.out.data)};
      piece.job.run.tokens = std::min(most, run.tokens - first);
      piece.job.run.first_token += first;
      piece.job.run.out.data += first * stride;
      call.Add(piece);
    }
  }
  return call.Finish();
}

void CudaDevice::Move(absl::Span<const Transfer> transfers, bool host_from, bool host_to) {
  // What stays on the device needs no room in a slot, but a table does.
  const std::int64_t most = CudaBatch::MostBytes(options_.staging_bytes);
  Call call(*this);
  for (const Transfer& transfer : transfers) {
    for (std::int64_t first = 0; first < transfer.bytes; first += most) {
      call.Add(StagedMove{
          {transfer.to + first, transfer.from == nullptr ? nullptr : transfer.from + first,
           std::min(most, transfer.bytes - first)},
          host_from,
          host_to});
    }
  }
  call.Finish().IgnoreError();  // Health has it
}

void CudaDevice::Zero(absl::Span<const Piece> pieces) {
  std::vector<Transfer> zeros;
  zeros.reserve(pieces.size());
  for (const Piece& piece : pieces) zeros.push_back({piece.memory, nullptr, piece.bytes});
  Move(zeros, false, false);
}

void CudaDevice::Copy(absl::Span<const Transfer> transfers) { Move(transfers, false, false); }
void CudaDevice::Write(absl::Span<const Transfer> transfers) { Move(transfers, true, false); }
void CudaDevice::Fetch(absl::Span<const Transfer> transfers) {
  Move(transfers, false, true);
  if (Health().ok()) return;
  for (const Transfer& transfer : transfers)
    std::memset(transfer.to, 0, static_cast<std::size_t>(transfer.bytes));
}

void CudaDevice::Checksum(absl::Span<const ChecksumJob> jobs) {
  std::vector<ChecksumJob> short_ones;
  Call call(*this);
  for (const ChecksumJob& job : jobs) {
    if (IsShort(job)) {
      short_ones.push_back(job);
    } else {
      call.Add(job);
    }
  }
  call.Finish().IgnoreError();  // Health has it
  ChecksumHere(short_ones);
}

void CudaDevice::Largest(absl::Span<const LargestJob> jobs) {
  const std::int64_t most = CudaBatch::MostTokens(options_.staging_bytes);
  std::vector<float> found;  // of pieces, in order
  std::vector<LargestJob> pieces;
  for (const LargestJob& job : jobs) {
    const std::int64_t stride = job.rows.token_stride * kernels::ElementBytes(job.rows.type);
    for (std::int64_t first = 0; first < job.tokens; first += most) {
      LargestJob piece = job;
      piece.rows.data += first * stride;
      piece.tokens = std::min(most, job.tokens - first);
      pieces.push_back(piece);
    }
    *job.largest = 0;
  }
  found.resize(pieces.size());
  Call call(*this);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    LargestJob piece = pieces[i];
    piece.largest = &found[i];
    call.Add(piece);
  }
  call.Finish().IgnoreError();  // Health has it
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (!(found[i] <= *pieces[i].largest)) *pieces[i].largest = found[i];
  }
}

void CudaDevice::ChecksumHere(absl::Span<const ChecksumJob> jobs) {
  std::vector<std::byte> fetched(jobs.size() * kernels::kShortHash);
  std::vector<Transfer> fetches;
  for (const ChecksumJob& job : jobs) {
    std::byte* const to = fetched.data() + fetches.size() * kernels::kShortHash;
    fetches.push_back({to, job.memory, job.bytes});
  }
  Fetch(fetches);
  for (std::size_t i = 0; i < jobs.size(); ++i)
    *jobs[i].checksum = ChecksumOf(fetches[i].to, jobs[i].bytes);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(const CudaOptions& options) {
  auto device = std::make_unique<CudaDevice>(options);
  KVT_RETURN_IF_ERROR(device->Open());
  return device;
}

}  // namespace kvtier::cachestore
