#include "cachestore/device/cuda_batch.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <utility>

#include "cachestore/base/check.h"
#include "cachestore/base/status_macros.h"
#include "kernels/codec_table.h"

namespace kvtier::cachestore {
namespace {

using kernels::DecodeRun;
using kernels::EncodeRun;
using kernels::Rotation;

std::int64_t RowsOf(const EncodeRun& run) {
  return std::int64_t{run.units} * kernels::UnitTokens(run.codec);
}
std::int64_t SourceBytes(const EncodeRun& run) {
  return RowsOf(run) * kernels::RowBytes(run.source.type, run.dim);
}
// The rows as fp32, where they are rotated before they are encoded.
std::int64_t RotatedBytes(const EncodeRun& run) {
  return run.codec.rotation == Rotation::kNone
             ? 0
             : RowsOf(run) * kernels::RowBytes(kernels::ElementType::kFp32, run.dim);
}
std::int64_t OutputBytes(const DecodeRun& run) {
  return run.tokens * kernels::RowBytes(run.out.type, run.dim);
}
// Of the tables, a tile for each row at the most.
constexpr std::int64_t kTileBytes = 2 * sizeof(kernels::Tile);

kernels::DeviceLargest OnDeviceOf(const LargestJob& job, kernels::DeviceCount* largest) {
  return {job.rows, job.dim, job.tokens, largest};
}

// Rows of so many bytes, `stride` bytes apart.
struct StridedRows {
  std::int64_t rows;
  std::int64_t bytes;
  std::int64_t stride;

  bool whole() const { return stride == bytes; }
};
// Both without gaps at the other end.
void Gather(std::byte* to, const std::byte* from, const StridedRows& of) {
  const std::int64_t copies = of.whole() ? 1 : of.rows;
  const std::int64_t bytes = of.whole() ? of.rows * of.bytes : of.bytes;
  for (std::int64_t i = 0; i < copies; ++i)
    std::memcpy(to + i * bytes, from + i * of.stride, static_cast<std::size_t>(bytes));
}
void Scatter(std::byte* to, const std::byte* from, const StridedRows& of) {
  const std::int64_t copies = of.whole() ? 1 : of.rows;
  const std::int64_t bytes = of.whole() ? of.rows * of.bytes : of.bytes;
  for (std::int64_t i = 0; i < copies; ++i)
    std::memcpy(to + i * of.stride, from + i * bytes, static_cast<std::size_t>(bytes));
}

}  // namespace

std::int64_t CudaBatch::BytesOf(const StagedMove& move) {
  const std::int64_t bytes = move.transfer.bytes;
  return kTableBytes + kAlign + (move.host_from || move.host_to ? bytes : 0) +
         kernels::ItemsOf(kernels::DeviceMove{.bytes = bytes}).tiles() * kTileBytes;
}

std::int64_t CudaBatch::BytesOf(const StagedEncode& encode) {
  const EncodeRun& run = encode.job.run;
  return kTableBytes + 2 * kAlign + (encode.source != Place::kDevice ? SourceBytes(run) : 0) +
         RotatedBytes(run) + RowsOf(run) * kTileBytes;
}

std::int64_t CudaBatch::BytesOf(const StagedDecode& decode) {
  const DecodeRun& run = decode.job.run;
  return kTableBytes + kAlign + (decode.out == Place::kHost ? OutputBytes(run) : 0) +
         run.tokens * kTileBytes;
}

std::int64_t CudaBatch::BytesOf(const LargestJob& job) {
  return kTableBytes + kernels::ItemsOf(OnDeviceOf(job, nullptr)).tiles() * kTileBytes;
}

std::int64_t CudaBatch::MostUnits(const EncodeRun& run, std::int64_t slot_bytes) {
  EncodeRun one = run;
  one.units = 1;
  const std::int64_t bytes = SourceBytes(one) + RotatedBytes(one) + RowsOf(one) * kTileBytes;
  return std::max<std::int64_t>(1, MostBytes(slot_bytes) / bytes);
}

std::int64_t CudaBatch::MostTokens(const DecodeRun& run, std::int64_t slot_bytes) {
  DecodeRun one = run;
  one.tokens = 1;
  return std::max<std::int64_t>(1, MostBytes(slot_bytes) / (OutputBytes(one) + kTileBytes));
}

std::int64_t CudaBatch::MostTokens(std::int64_t slot_bytes) {
  return MostBytes(slot_bytes) / kTileBytes * kernels::kTileRows;
}

std::int64_t CudaBatch::PlaceInFront(std::int64_t bytes) {
  const std::int64_t offset = (front_ + kAlign - 1) / kAlign * kAlign;
  front_ = offset + bytes;
  KVT_CHECK(front_ <= end_);
  return offset;
}

std::int64_t CudaBatch::PlaceAtEnd(std::int64_t bytes) {
  end_ = (end_ - bytes) / kAlign * kAlign;
  KVT_CHECK(front_ <= end_);
  return end_;
}

void CudaBatch::Add(const StagedMove& move) {
  const auto [to, from, bytes] = move.transfer;
  kernels::DeviceMove job{to, from, bytes};
  if (move.host_from) {
    const std::int64_t offset = PlaceInFront(bytes);
    std::memcpy(OnHost(offset), from, static_cast<std::size_t>(bytes));
    job.from = OnDevice(offset);
  }
  if (move.host_to) {
    const std::int64_t offset = PlaceAtEnd(bytes);
    returns_.push_back({to, OnHost(offset), 1, bytes, bytes});
    job.to = OnDevice(offset);
  }
  const kernels::Items items = kernels::ItemsOf(job);
  moves_.push_back({0, job, items});
  tables_ += kTableBytes + items.tiles() * kTileBytes;
}

void CudaBatch::Add(const StagedEncode& encode) {
  EncodeRun run = encode.job.run;
  const std::int64_t rows = RowsOf(run);
  const kernels::ElementType type = run.source.type;
  const std::int64_t row = kernels::RowBytes(type, run.dim);
  if (encode.source == Place::kHost) {
    const std::int64_t stride = run.source.token_stride * kernels::ElementBytes(type);
    const std::int64_t offset = PlaceInFront(SourceBytes(run));
    Gather(OnHost(offset), run.source.data, {rows, row, stride});
    run.source.data = OnDevice(offset);
    run.source.token_stride = kernels::RowElements(type, run.dim);
  } else if (encode.source == Place::kPinned) {
    // Once: encoders read values twice.
    const kernels::EncodeRun gather{.codec = {.id = kernels::CodecId::kRaw, .element = type},
                                    .dim = static_cast<int>(kernels::RowElements(type, run.dim)),
                                    .source = run.source,
                                    .units = static_cast<int>(rows),
                                    .out = OnDevice(PlaceAtEnd(SourceBytes(run)))};
    const kernels::EncodeLaunch kind{kernels::EncodeKernel::kCopy};
    gathers_.push_back({kind, {gather, nullptr}, kernels::ItemsOf(gather, kind.kernel)});
    run.source = {gather.out, type, kernels::RowElements(type, run.dim)};
  }
  if (run.codec.rotation != Rotation::kNone) {
    EncodeRun rotation = run;
    rotation.units = static_cast<int>(rows);
    rotation.out = OnDevice(PlaceAtEnd(RotatedBytes(run)));
    const kernels::EncodeLaunch kind{kernels::EncodeKernel::kRotate, run.dim > kernels::kNarrowDim};
    rotations_.push_back({kind, {rotation, nullptr}, kernels::ItemsOf(rotation, kind.kernel)});
    run.codec.rotation = Rotation::kNone;
    run.source = {rotation.out, kernels::ElementType::kFp32, run.dim};
  }
  const kernels::EncodeLaunch kind = kernels::LaunchOf(run);
  encodes_.push_back({kind, {run, nullptr}, kernels::ItemsOf(run, kind.kernel)});
  results_.push_back({.count = encode.job.saturated});
  tables_ += kTableBytes + rows * kTileBytes;
}

void CudaBatch::Add(const StagedDecode& decode) {
  DecodeRun run = decode.job.run;
  if (decode.out == Place::kHost) {
    const std::int64_t row = kernels::RowBytes(run.out.type, run.dim);
    const std::int64_t offset = PlaceAtEnd(OutputBytes(run));
    returns_.push_back({run.out.data, OnHost(offset), run.tokens, row,
                        run.out.token_stride * kernels::ElementBytes(run.out.type)});
    run.out.data = OnDevice(offset);
    run.out.token_stride = kernels::RowElements(run.out.type, run.dim);
  }
  decodes_.push_back({kernels::LaunchOf(run), {run, nullptr}, kernels::ItemsOf(run)});
  results_.push_back({.count = decode.job.saturated});
  tables_ += kTableBytes + run.tokens * kTileBytes;
}

void CudaBatch::Add(const ChecksumJob& job) {
  hashes_.push_back(job);
  tables_ += kTableBytes;
}

void CudaBatch::Add(const LargestJob& job) {
  largest_.push_back(job);
  tables_ += BytesOf(job);
}

template <class T>
const T* CudaBatch::PutTable(const std::vector<T>& table) {
  const std::size_t bytes = table.size() * sizeof(T);
  const std::int64_t offset = PlaceInFront(static_cast<std::int64_t>(bytes));
  std::memcpy(OnHost(offset), table.data(), bytes);
  return reinterpret_cast<const T*>(OnDevice(offset));
}

template <class Kind, class Job, class F>
void CudaBatch::PutTables(const std::vector<Planned<Kind, Job>>& planned, F launch) {
  struct Together {
    std::vector<Job> jobs;
    std::vector<kernels::Tile> tiles;
  };
  std::map<Kind, Together> by_kind;
  for (const Planned<Kind, Job>& plan : planned) {
    Together& of_kind = by_kind[plan.kind];
    const auto job = static_cast<std::uint32_t>(of_kind.jobs.size());
    for (std::int64_t tile = 0; tile < plan.items.tiles(); ++tile)
      of_kind.tiles.push_back({job, static_cast<std::uint32_t>(tile)});
    of_kind.jobs.push_back(plan.job);
  }
  for (const auto& [kind, of_kind] : by_kind) {
    const Job* jobs = PutTable(of_kind.jobs);
    const kernels::Tile* tiles = PutTable(of_kind.tiles);
    const auto count = static_cast<std::int64_t>(of_kind.tiles.size());
    launches_.push_back([=, kind = kind, stream = slot_->stream.get()] {
      return launch(kind, jobs, tiles, count, stream);
    });
  }
}

absl::Status CudaBatch::Launch(const CudaEvent* after) {
  for (const ChecksumJob& job : hashes_) results_.push_back({.checksum = job.checksum});
  for (const LargestJob& job : largest_) results_.push_back({.largest = job.largest});
  const auto result_bytes = static_cast<std::int64_t>(results_.size() * sizeof(std::uint64_t));
  results_at_ = PlaceInFront(result_bytes);
  std::memset(OnHost(results_at_), 0, static_cast<std::size_t>(result_bytes));
  auto* result = reinterpret_cast<std::uint64_t*>(OnDevice(results_at_));
  const auto next_count = [&result] { return reinterpret_cast<kernels::DeviceCount*>(result++); };
  for (PlannedEncode& encode : encodes_) encode.job.saturated = next_count();
  for (PlannedDecode& decode : decodes_) decode.job.saturated = next_count();
  std::vector<kernels::DeviceHash> hashes;
  for (const ChecksumJob& job : hashes_) hashes.push_back({job.memory, job.bytes, result++});
  std::vector<Planned<int, kernels::DeviceLargest>> largest;
  for (const LargestJob& job : largest_) {
    const kernels::DeviceLargest on_device = OnDeviceOf(job, next_count());
    largest.push_back({0, on_device, kernels::ItemsOf(on_device)});
  }

  PutTables(moves_, [](int, auto... rest) { return kernels::LaunchMove(rest...); });
  PutTables(gathers_, kernels::LaunchEncode);
  PutTables(rotations_, kernels::LaunchEncode);
  PutTables(encodes_, kernels::LaunchEncode);
  PutTables(decodes_, kernels::LaunchDecode);
  PutTables(largest, [](int, auto... rest) { return kernels::LaunchLargest(rest...); });
  cudaStream_t stream = slot_->stream.get();
  if (!hashes.empty()) {
    launches_.push_back([jobs = PutTable(hashes), count = hashes.size(), stream] {
      return kernels::LaunchHash(jobs, static_cast<std::int64_t>(count), stream);
    });
  }

  const auto copy = [&](void* to, const void* from, std::int64_t bytes, cudaMemcpyKind kind) {
    return CudaStatus("cudaMemcpyAsync",
                      cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), kind, stream));
  };
  KVT_RETURN_IF_ERROR(copy(OnDevice(0), OnHost(0), front_, cudaMemcpyHostToDevice));
  if (after != nullptr) {
    KVT_RETURN_IF_ERROR(
        CudaStatus("cudaStreamWaitEvent", cudaStreamWaitEvent(stream, after->get(), 0)));
  }
  for (const auto& launch : launches_) KVT_RETURN_IF_ERROR(CudaStatus("a kernel launch", launch()));
  if (result_bytes > 0) {
    KVT_RETURN_IF_ERROR(
        copy(OnHost(results_at_), OnDevice(results_at_), result_bytes, cudaMemcpyDeviceToHost));
  }
  if (!returns_.empty()) {
    KVT_RETURN_IF_ERROR(
        copy(OnHost(end_), OnDevice(end_), slot_->bytes - end_, cudaMemcpyDeviceToHost));
  }
  return CudaStatus("cudaEventRecord", cudaEventRecord(slot_->done.get(), stream));
}

absl::Status CudaBatch::Finish(absl::Duration deadline) {
  KVT_RETURN_IF_ERROR(Await(slot_->done, deadline));
  const std::byte* at = OnHost(results_at_);
  for (const Result& result : results_) {
    std::uint64_t value = 0;
    std::memcpy(&value, at, sizeof value);
    at += sizeof value;
    if (result.count != nullptr) *result.count += value;
    if (result.checksum != nullptr) *result.checksum = value;
    if (result.largest != nullptr)
      *result.largest = std::bit_cast<float>(static_cast<std::uint32_t>(value));
  }
  for (const Return& rows : returns_)
    Scatter(rows.to, rows.from, {rows.rows, rows.row_bytes, rows.stride});
  return absl::OkStatus();
}

}  // namespace kvtier::cachestore
