#include "client/gpu_client.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/time/clock.h"
#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "client/error_reason.h"

namespace kvtier::client {
namespace {

// Where NCCL was refused for now, how long until it's tried again.
constexpr absl::Duration kRetry = absl::Seconds(5);

// The server has restarted, or the transport was closed there, or failed, at either end.
bool IsGone(const absl::Status& status) {
  const std::string reason = ErrorReason(status);
  return reason == "UNKNOWN_TRANSPORT" || reason == "TRANSPORT_LOST" ||
         cachestore::ReasonOf(status) == "TRANSPORT_LOST";
}

// Host memory that the GPU copies to or from, as large as it has to be.
struct Pinned {
  PinnedMemory memory;
  std::int64_t bytes = 0;

  absl::Status Hold(std::int64_t wanted) {
    if (wanted <= bytes) return absl::OkStatus();
    KVT_ASSIGN_OR_RETURN(memory, AllocatePinned(wanted));
    bytes = wanted;
    return absl::OkStatus();
  }
};

// The targets of one read, and what takes a chunk to its own.
class Targets {
 public:
  Targets(const v1::ReadRequest& request, const PlaceOnGpu& place)
      : request_(request), place_(place) {}

  absl::Status Begin(const v1::ReadManifest& manifest) {
    manifest_ = manifest;
    for (const v1::SequenceManifest& sequence : manifest_.sequences()) {
      KVT_ASSIGN_OR_RETURN(std::vector<GpuLayerTarget> layers, place_(sequence));
      if (static_cast<int>(layers.size()) != sequence.layers_size()) {
        return absl::InvalidArgumentError(fmt::format("sequence {} has {} layers, but {} targets",
                                                      sequence.sequence(), sequence.layers_size(),
                                                      layers.size()));
      }
      for (const GpuLayerTarget& layer : layers) {
        KVT_RETURN_IF_ERROR(CheckBlocks(sequence, layer.k));
        KVT_RETURN_IF_ERROR(CheckBlocks(sequence, layer.v));
      }
      layers_.push_back(std::move(layers));
    }
    return absl::OkStatus();
  }

  struct Found {
    const GpuLayerTarget* target = nullptr;
    ReadGeometry k, v;
    std::uint64_t first = 0;  // token of the layer's, or where there are blocks of the read's
    std::uint64_t count = 0;
    std::uint64_t k_bytes() const { return count * k.heads * k.vector_bytes; }
    std::uint64_t v_bytes() const { return count * v.heads * v.vector_bytes; }
  };
  // Of a chunk that the client has checked.
  Found Of(const v1::ReadChunk& chunk) const {
    const auto& sequence = manifest_.sequences(static_cast<int>(chunk.sequence_index()));
    const std::uint32_t index = chunk.layer() - sequence.layers(0).layer();
    const v1::LayerManifest& layer = sequence.layers(static_cast<int>(index));
    Found found{.target = &layers_[chunk.sequence_index()][index],
                .k = {.layout = request_.layout(),
                      .block_tokens = request_.block_tokens(),
                      .tokens = LayerTokens(sequence, layer),
                      .heads = layer.num_heads(),
                      .vector_bytes = *RowBytes(layer.dtype(), layer.k_head_dim())},
                .v = {},
                .first = 0,
                .count = chunk.num_tokens()};
    const bool blocks = !found.target->k.block_ids.empty();
    found.first =
        chunk.first_token() - (blocks ? sequence.first_token() : FirstToken(sequence, layer));
    found.v = found.k;
    found.v.vector_bytes = *RowBytes(layer.dtype(), layer.v_head_dim());
    return found;
  }

  static absl::Status Copy(const Found& found, const std::byte* k, const std::byte* v,
                           const GpuStream& stream) {
    KVT_RETURN_IF_ERROR(Scatter({k, found.first, found.count}, found.k, found.target->k, stream));
    return Scatter({v, found.first, found.count}, found.v, found.target->v, stream);
  }

 private:
  absl::Status CheckBlocks(const v1::SequenceManifest& sequence, const GpuTensor& target) const {
    if (target.block_ids.empty()) return absl::OkStatus();
    const std::uint64_t block = request_.block_tokens();
    const std::uint64_t blocks = block == 0 ? 0 : (sequence.num_tokens() + block - 1) / block;
    if (target.block_ids.size() == blocks) return absl::OkStatus();
    return absl::InvalidArgumentError(
        fmt::format("block_ids has {} entries; {} tokens take {} blocks of block_tokens {}",
                    target.block_ids.size(), sequence.num_tokens(), blocks, block));
  }

  const v1::ReadRequest& request_;
  const PlaceOnGpu& place_;
  v1::ReadManifest manifest_;
  std::vector<std::vector<GpuLayerTarget>> layers_;
};

absl::Status CheckRequest(const v1::ReadRequest& request) {
  if (request.as() == v1::READ_AS_STORED)
    return absl::InvalidArgumentError("as is STORED; want values, which is what targets are of");
  if (request.has_target())
    return absl::InvalidArgumentError("target is set; where values go is for `place` to say");
  const auto all = [](const v1::SequenceRange& range) { return range.num_tokens() == 0; };
  if (request.follow() &&
      std::any_of(request.sequences().begin(), request.sequences().end(), all)) {
    return absl::InvalidArgumentError(
        "follow is set and num_tokens is 0; want how many, so that there is room for them");
  }
  return absl::OkStatus();
}

}  // namespace

struct GpuAppend::Host {
  GpuStream stream;
  GpuEvent copied;
  Pinned pinned;
};

absl::StatusOr<std::unique_ptr<GpuClient>> GpuClient::Make(Client& client,
                                                           const GpuOptions& options) {
  const OnGpu on_gpu(options.device);
  KVT_RETURN_IF_ERROR(on_gpu.status());
  std::unique_ptr<GpuClient> gpu(new GpuClient(client, options));
  if (options.path == GpuOptions::Path::kNccl) {
    absl::MutexLock lock(&gpu->mutex_);
    KVT_RETURN_IF_ERROR(gpu->Nccl().status());
  }
  return gpu;
}

std::string GpuClient::transport() const {
  absl::MutexLock lock(&mutex_);
  return name_;
}

void GpuClient::Tell(const std::string& name, const std::string& why) {
  if (name_ == name) return;
  name_ = name;
  if (options_.tell) options_.tell(why.empty() ? name : name + ": " + why);
}

absl::StatusOr<std::shared_ptr<transport::NcclRuntime>> GpuClient::Nccl() {
  if (nccl_ == nullptr) {
    KVT_ASSIGN_OR_RETURN(nccl_,
                         transport::NcclRuntime::Load(options_.nccl_library, options_.device));
  }
  return nccl_;
}

template <class T>
absl::StatusOr<std::shared_ptr<T>> GpuClient::Transport(std::shared_ptr<T> GpuClient::*open) {
  if (options_.path == GpuOptions::Path::kHost) return nullptr;
  absl::MutexLock lock(&mutex_);
  if (this->*open != nullptr) return this->*open;
  // Who takes nothing else asks again.
  const bool only = options_.path == GpuOptions::Path::kNccl;
  if (no_nccl_.ok() || only || absl::Now() >= again_) {
    const auto opened =
        [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) -> absl::StatusOr<std::shared_ptr<T>> {
      KVT_ASSIGN_OR_RETURN(std::shared_ptr<transport::NcclRuntime> nccl, Nccl());
      return T::Open({.stub = &client_.stub(),
                      .nccl = std::move(nccl),
                      .device = options_.device,
                      .deadline = options_.deadline});
    }();
    no_nccl_ = opened.status();
    if (opened.ok()) {
      this->*open = *opened;
      Tell("nccl", "");
      return *opened;
    }
    again_ = absl::IsFailedPrecondition(no_nccl_) ? absl::InfiniteFuture() : absl::Now() + kRetry;
  }
  if (only) return no_nccl_;
  Tell("host", std::string(no_nccl_.message()));
  return nullptr;
}

template <class T>
void GpuClient::Forget(std::shared_ptr<T> GpuClient::*open, const std::shared_ptr<T>& which) {
  std::shared_ptr<T> forgotten;  // goes without the lock
  absl::MutexLock lock(&mutex_);
  if (this->*open == which) forgotten = std::move(this->*open);
}

absl::StatusOr<ReadResult> GpuClient::Read(const v1::ReadRequest& request,
                                           const PlaceOnGpu& place) {
  KVT_RETURN_IF_ERROR(CheckRequest(request));
  const OnGpu on_gpu(options_.device);
  KVT_RETURN_IF_ERROR(on_gpu.status());
  for (bool again = false;; again = true) {
    KVT_ASSIGN_OR_RETURN(const std::shared_ptr<GpuReadTransport> transport,
                         Transport(&GpuClient::reads_));
    absl::StatusOr<ReadResult> result = ReadBy(transport, request, place);
    if (result.ok() || transport == nullptr) return result;
    Forget(&GpuClient::reads_, transport);  // whatever was under way over it, is
    if (again || !IsGone(result.status())) return result;
  }
}

absl::StatusOr<ReadResult> GpuClient::ReadBy(const std::shared_ptr<GpuReadTransport>& transport,
                                             const v1::ReadRequest& request,
                                             const PlaceOnGpu& place) {
  Targets targets(request, place);
  v1::ReadRequest asked = request;
  ReadHandlers handlers{
      .on_manifest = [&](const v1::ReadManifest& manifest) { return targets.Begin(manifest); },
      .on_chunk = {}};
  if (transport != nullptr) {
    GpuReadTransport::Read read(transport);
    asked.mutable_target()->set_transport_id(transport->id());
    handlers.on_chunk = [&](const v1::ReadChunk& chunk) -> absl::Status {
      const Targets::Found found = targets.Of(chunk);
      const std::uint64_t k = chunk.k_offset(), v = chunk.v_offset(), all = chunk.transfer_bytes();
      const auto inside = [all](std::uint64_t offset, std::uint64_t bytes) {
        return offset <= all && bytes <= all - offset;
      };
      if (!inside(k, found.k_bytes()) || !inside(v, found.v_bytes())) {
        return absl::DataLossError(fmt::format(
            "a chunk's K of {} bytes is said to be at {} and its V of {} at {} of a transfer of {}",
            found.k_bytes(), k, found.v_bytes(), v, all));
      }
      return read.Take(chunk, [found, k, v](const std::byte* slot, const GpuStream& stream) {
        return Targets::Copy(found, slot + k, slot + v, stream);
      });
    };
    absl::StatusOr<ReadResult> result = client_.Read(asked, handlers);
    if (!result.ok()) return result;
    KVT_RETURN_IF_ERROR(read.Finish());
    return result;
  }
  Pinned pinned;
  KVT_ASSIGN_OR_RETURN(const GpuStream stream, MakeGpuStream());
  KVT_ASSIGN_OR_RETURN(const GpuEvent copied, MakeGpuEvent());
  handlers.on_chunk = [&](const v1::ReadChunk& chunk) -> absl::Status {
    KVT_RETURN_IF_ERROR(pinned.Hold(static_cast<std::int64_t>(ChunkBytes(chunk))));
    std::byte* const k = pinned.memory.get();
    std::byte* const v = k + chunk.k().size();
    std::memcpy(k, chunk.k().data(), chunk.k().size());
    std::memcpy(v, chunk.v().data(), chunk.v().size());
    KVT_RETURN_IF_ERROR(Targets::Copy(targets.Of(chunk), k, v, stream));
    return Drain(stream, copied, options_.deadline);
  };
  return client_.Read(asked, handlers);
}

absl::StatusOr<std::unique_ptr<GpuAppend>> GpuClient::OpenAppend(const AppendOptions& options) {
  const OnGpu on_gpu(options_.device);
  KVT_RETURN_IF_ERROR(on_gpu.status());
  for (bool again = false;; again = true) {
    KVT_ASSIGN_OR_RETURN(std::shared_ptr<GpuAppendTransport> transport,
                         Transport(&GpuClient::appends_));
    if (transport != nullptr && !transport->ok() && !again) {
      Forget(&GpuClient::appends_, transport);
      continue;
    }
    AppendOptions asked = options;
    if (transport != nullptr) asked.open.set_transport_id(transport->id());
    auto stream = client_.OpenAppend(asked);
    if (stream.ok()) {
      std::unique_ptr<GpuAppend> append(
          new GpuAppend(*this, std::move(transport), *std::move(stream)));
      if (append->transport_ == nullptr) {
        append->host_ = std::make_unique<GpuAppend::Host>();
        KVT_ASSIGN_OR_RETURN(append->host_->stream, MakeGpuStream());
        KVT_ASSIGN_OR_RETURN(append->host_->copied, MakeGpuEvent());
      }
      return append;
    }
    if (transport != nullptr) Forget(&GpuClient::appends_, transport);
    if (again || transport == nullptr || !IsGone(stream.status())) return stream.status();
  }
}

GpuAppend::GpuAppend(GpuClient& client, std::shared_ptr<GpuAppendTransport> transport,
                     std::unique_ptr<AppendStream> stream)
    : client_(client), transport_(std::move(transport)), stream_(std::move(stream)) {}

GpuAppend::~GpuAppend() {
  if (finished_ || transport_ == nullptr) return;
  transport_->Close("an append over it was broken off");
  client_.Forget(&GpuClient::appends_, transport_);
}

absl::Status GpuAppend::Send(const GpuChunk& chunk, CUstream_st* after) {
  const OnGpu on_gpu(client_.options_.device);
  KVT_RETURN_IF_ERROR(on_gpu.status());
  if (transport_ == nullptr) return SendByHost(chunk, after);
  KVT_ASSIGN_OR_RETURN(GpuEvent made, MakeGpuEvent());
  std::shared_ptr<CUevent_st> filled = std::move(made);
  KVT_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(filled.get(), after), "cudaEventRecord"));
  v1::AppendChunk sent = chunk.place;
  KVT_ASSIGN_OR_RETURN(std::shared_ptr<const void> held,
                       transport_->Send(chunk.k, chunk.v, std::move(filled), sent));
  return stream_->Send(std::move(sent), std::move(held));
}

absl::Status GpuAppend::SendByHost(const GpuChunk& chunk, CUstream_st* after) {
  KVT_RETURN_IF_ERROR(host_->pinned.Hold(chunk.k.bytes + chunk.v.bytes));
  cudaStream_t stream = host_->stream.get();
  KVT_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(host_->copied.get(), after), "cudaEventRecord"));
  KVT_RETURN_IF_ERROR(
      CudaStatus(cudaStreamWaitEvent(stream, host_->copied.get(), 0), "cudaStreamWaitEvent"));
  v1::AppendChunk sent = chunk.place;
  std::byte* at = host_->pinned.memory.get();
  const auto copy = [&](const transport::DevicePiece& from) -> absl::Status {
    if (from.bytes == 0) return absl::OkStatus();
    KVT_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpyAsync(std::exchange(at, at + from.bytes), from.data,
                        static_cast<std::size_t>(from.bytes), cudaMemcpyDeviceToHost, stream),
        "cudaMemcpyAsync"));
    return absl::OkStatus();
  };
  KVT_RETURN_IF_ERROR(copy(chunk.k));
  KVT_RETURN_IF_ERROR(copy(chunk.v));
  KVT_RETURN_IF_ERROR(Drain(host_->stream, host_->copied, client_.options_.deadline));
  const auto* const k = reinterpret_cast<const char*>(host_->pinned.memory.get());
  sent.set_k(k, static_cast<std::size_t>(chunk.k.bytes));
  sent.set_v(k + chunk.k.bytes, static_cast<std::size_t>(chunk.v.bytes));
  return stream_->Send(std::move(sent));
}

absl::StatusOr<AppendProgress> GpuAppend::Finish() {
  KVT_ASSIGN_OR_RETURN(const AppendProgress progress, stream_->Finish());
  finished_ = true;
  return progress;
}

}  // namespace kvtier::client
