#include "client/client.h"

#include <fmt/format.h>

#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "cachestore/base/status_macros.h"
#include "client/append_reactor.h"
#include "client/client_impl.h"
#include "client/error_reason.h"
#include "client/read_check.h"
#include "client/read_reactor.h"
#include "client/ring_reader.h"
#include "client/stored_decoder.h"
#include "kvtier/v1/kv_tier.grpc.pb.h"

namespace kvtier::client {
namespace {

constexpr std::int64_t kRingBytes = 8 << 20;
// Less is as well inside a message.
constexpr std::size_t kLeastShared = 32 << 10;
constexpr char kUnknownTransport[] = "UNKNOWN_TRANSPORT";
constexpr int kMostTries = 3;

// Copies one chunk's K or V to where its layer is put together.
absl::Status Scatter(std::span<const std::byte> chunk, const ReadGeometry& geometry,
                     std::uint64_t first, std::span<std::byte> layer) {
  const std::uint64_t token_bytes = geometry.heads * geometry.vector_bytes;
  if (token_bytes == 0) return absl::OkStatus();
  return ForEachRun(geometry, first, chunk.size() / token_bytes, [&](const ByteRun& run) {
    std::memcpy(layer.data() + run.layer_offset, chunk.data() + run.chunk_offset, run.size);
    return absl::OkStatus();
  });
}

ReadKind KindOf(const v1::ReadRequest& request) {
  if (request.as() == v1::READ_AS_STORED) return ReadKind::kStored;
  return request.follow() ? ReadKind::kFollowed : ReadKind::kValues;
}

// K and V of a chunk that only says where they are: in a ring, or in the caller's own memory, where
// nobody looks at them here.
struct FoundValues {
  ReadCheck::Sizes sizes;
  std::span<const std::byte> k;
  std::span<const std::byte> v;
};
absl::StatusOr<FoundValues> FindValues(ReadCheck& check, const v1::ReadChunk& chunk,
                                       const RingReader* ring, bool stored) {
  FoundValues found;
  if (stored) {
    check.PartsAreElsewhere();
    return found;
  }
  KVT_ASSIGN_OR_RETURN(found.sizes, check.Expected(chunk));
  if (ring == nullptr) return found;
  KVT_ASSIGN_OR_RETURN(found.k, ring->At(chunk.k_offset(), found.sizes.k));
  KVT_ASSIGN_OR_RETURN(found.v, ring->At(chunk.v_offset(), found.sizes.v));
  return found;
}

absl::Status CheckTargets(const v1::SequenceManifest& sequence,
                          const std::vector<LayerTarget>& targets) {
  if (static_cast<int>(targets.size()) != sequence.layers_size()) {
    return absl::InvalidArgumentError(fmt::format("sequence {} has {} layers, but {} targets",
                                                  sequence.sequence(), sequence.layers_size(),
                                                  targets.size()));
  }
  for (int i = 0; i < sequence.layers_size(); ++i) {
    const v1::LayerManifest& layer = sequence.layers(i);
    const LayerTarget& target = targets[static_cast<std::size_t>(i)];
    const std::uint64_t rows = LayerTokens(sequence, layer) * layer.num_heads();
    const std::uint64_t k_bytes = rows * *RowBytes(layer.dtype(), layer.k_head_dim());
    const std::uint64_t v_bytes = rows * *RowBytes(layer.dtype(), layer.v_head_dim());
    if (target.k.size() != k_bytes || target.v.size() != v_bytes) {
      return absl::InvalidArgumentError(fmt::format(
          "sequence {}, layer {}: targets of {} bytes for K and {} for V; {} and {} are "
          "needed",
          sequence.sequence(), layer.layer(), target.k.size(), target.v.size(), k_bytes, v_bytes));
    }
  }
  return absl::OkStatus();
}

}  // namespace

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::~Client() = default;
v1::KvTierService::Stub& Client::stub() const { return impl_->stub(); }

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& address,
                                                        const ClientOptions& options) {
  if (address.empty()) return absl::InvalidArgumentError("the server's address is empty");
  // gRPC would take the port modulo 65536.
  if (std::int64_t port = 1; absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port) &&
                             (port < 1 || port > 65535)) {
    return absl::InvalidArgumentError(
        fmt::format("the server's address is {}; want a port of 1 to 65535", address));
  }
  if (options.call_limit <= absl::ZeroDuration() || options.stream_limit <= absl::ZeroDuration() ||
      options.stall_limit <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("a limit of the client is not above zero");
  }
  return std::unique_ptr<Client>(new Client(std::make_unique<Impl>(address, options)));
}

absl::StatusOr<v1::RegisterModelResponse> Client::RegisterModel(
    const v1::RegisterModelRequest& request) {
  auto registered = impl_->Call(&v1::KvTierService::Stub::RegisterModel, request);
  if (registered.ok()) impl_->Remember(registered->model_id(), request);
  return registered;
}

absl::StatusOr<v1::AppendBatchResponse> Client::AppendBatch(const v1::AppendBatchRequest& request) {
  return impl_->Call(&v1::KvTierService::Stub::AppendBatch, request);
}

absl::StatusOr<v1::LookupResponse> Client::Lookup(const v1::LookupRequest& request) {
  return impl_->CallOfModel(&v1::KvTierService::Stub::Lookup, request);
}

absl::StatusOr<v1::AcquireResponse> Client::Acquire(const v1::AcquireRequest& request) {
  return impl_->CallOfModel(&v1::KvTierService::Stub::Acquire, request);
}

absl::StatusOr<v1::RenewResponse> Client::Renew(const v1::RenewRequest& request) {
  return impl_->Call(&v1::KvTierService::Stub::Renew, request);
}

absl::StatusOr<v1::ReleaseResponse> Client::Release(const v1::ReleaseRequest& request) {
  return impl_->Call(&v1::KvTierService::Stub::Release, request);
}

absl::StatusOr<v1::PinResponse> Client::Pin(const v1::PinRequest& request) {
  return impl_->CallOfModel(&v1::KvTierService::Stub::Pin, request);
}

absl::StatusOr<v1::UnpinResponse> Client::Unpin(const v1::UnpinRequest& request) {
  return impl_->Call(&v1::KvTierService::Stub::Unpin, request);
}

absl::StatusOr<v1::TruncateResponse> Client::Truncate(const v1::TruncateRequest& request) {
  return impl_->Call(&v1::KvTierService::Stub::Truncate, request);
}

absl::StatusOr<v1::GetQuotaResponse> Client::GetQuota(const v1::GetQuotaRequest& request) {
  return impl_->Call(&v1::KvTierService::Stub::GetQuota, request);
}

absl::StatusOr<v1::SetQuotaResponse> Client::SetQuota(const v1::SetQuotaRequest& request) {
  return impl_->Call(&v1::KvTierService::Stub::SetQuota, request);
}

absl::StatusOr<v1::ForkResponse> Client::Fork(const v1::ForkRequest& request) {
  return impl_->Call(&v1::KvTierService::Stub::Fork, request);
}

absl::StatusOr<v1::SetPressureResponse> Client::SetPressure(const v1::SetPressureRequest& request) {
  return impl_->Call(&v1::KvTierService::Stub::SetPressure, request);
}

absl::StatusOr<v1::SealResponse> Client::Seal(const v1::SealRequest& request) {
  return impl_->Call(&v1::KvTierService::Stub::Seal, request);
}

absl::StatusOr<v1::AbortResponse> Client::Abort(const v1::AbortRequest& request) {
  return impl_->Call(&v1::KvTierService::Stub::Abort, request);
}

absl::StatusOr<v1::RemoveResponse> Client::Remove(const v1::RemoveRequest& request) {
  return impl_->Call(&v1::KvTierService::Stub::Remove, request);
}

absl::StatusOr<v1::DescribeResponse> Client::Describe(const v1::DescribeRequest& request) {
  return impl_->Call(&v1::KvTierService::Stub::Describe, request);
}

absl::StatusOr<v1::ListSequencesResponse> Client::ListSequences(
    const v1::ListSequencesRequest& request) {
  return impl_->Call(&v1::KvTierService::Stub::ListSequences, request);
}

absl::StatusOr<v1::CapacityResponse> Client::Capacity(const v1::CapacityRequest& request) {
  return impl_->CallOfModel(&v1::KvTierService::Stub::Capacity, request);
}

absl::StatusOr<v1::ScalesResponse> Client::Scales(const v1::ScalesRequest& request) {
  return impl_->CallOfModel(&v1::KvTierService::Stub::Scales, request);
}

absl::StatusOr<v1::GrantCreditResponse> Client::GrantCredit(const v1::GrantCreditRequest& request) {
  return impl_->Call(&v1::KvTierService::Stub::GrantCredit, request);
}

absl::StatusOr<v1::DrainResponse> Client::Drain() {
  return impl_->Call(&v1::KvTierService::Stub::Drain, v1::DrainRequest());
}

absl::StatusOr<std::unique_ptr<AppendStream>> Client::OpenAppend(const AppendOptions& options) {
  if (options.max_unacked_chunks < 1) {
    return absl::InvalidArgumentError(
        fmt::format("max_unacked_chunks is {}; at least 1 is needed", options.max_unacked_chunks));
  }
  const bool auto_choice = impl_->options().transport == Transport::kAuto;
  const bool own = !options.open.transport_id().empty();
  for (int tries = 0;; ++tries) {
    std::shared_ptr<SharedPool> pool;
    if (!own) {
      KVT_ASSIGN_OR_RETURN(pool, impl_->transport().Pool(impl_->stub(), options.expected_bytes));
    }
    auto reactor = std::make_unique<AppendStream::Reactor>(AppendStream::Reactor::Limits{
        .max_unacked_chunks = options.max_unacked_chunks,
        .stall = impl_->options().stall_limit,
        .deadline = impl_->StreamDeadline(),
        .pool = pool,
        .least_shared = auto_choice ? kLeastShared : 0,
        .count = [this](std::uint64_t bytes) { impl_->transport().Count(bytes); }});
    const absl::Status opened = reactor->Open(impl_->stub(), options.open);
    if (opened.ok()) {
      impl_->SawBoot(reactor->opened().boot_id());
      return std::make_unique<AppendStream>(std::move(reactor));
    }
    // The server restarted: the transport is gone, and the model.
    if (pool != nullptr && ErrorReason(opened) == kUnknownTransport) {
      impl_->transport().Forget(pool);
    } else if (!impl_->Recovers(opened, options.open.model_id())) {
      return opened;
    }
    if (tries == kMostTries) return opened;
  }
}

absl::StatusOr<std::shared_ptr<const SharedMemory>> Client::Share(std::int64_t bytes) {
  return OpenShm(impl_->stub(), bytes, impl_->options().call_limit);
}

std::string Client::transport() const { return impl_->transport().name(); }

// A chunk, and where its K and V are.
struct Client::ChunkView {
  v1::ReadChunk& chunk;
  std::span<const std::byte> k;
  std::span<const std::byte> v;
};

struct Client::ViewHandlers {
  std::function<absl::Status(const v1::ReadManifest&)> on_manifest;
  std::function<absl::Status(const ChunkView&)> on_chunk;
};

absl::StatusOr<ReadResult> Client::Read(const v1::ReadRequest& request,
                                        const ReadHandlers& handlers, Transfer transfer) {
  ViewHandlers views{.on_manifest = handlers.on_manifest, .on_chunk = {}};
  views.on_chunk = [&](const ChunkView& view) {
    if (!handlers.on_chunk) return absl::OkStatus();
    const auto put_inside = [](std::span<const std::byte> from, std::string& to) {
      const auto* const bytes = reinterpret_cast<const char*>(from.data());
      if (!from.empty() && bytes != to.data()) to.assign(bytes, from.size());
    };
    put_inside(view.k, *view.chunk.mutable_k());
    put_inside(view.v, *view.chunk.mutable_v());
    if (!request.has_target()) {
      view.chunk.clear_k_offset();
      view.chunk.clear_v_offset();
    }
    return handlers.on_chunk(std::move(view.chunk));
  };
  return ReadViews(request, views, transfer);
}

absl::StatusOr<ReadResult> Client::ReadViews(const v1::ReadRequest& request,
                                             const ViewHandlers& handlers, Transfer transfer) {
  // Codes are so few that they are as well inside messages.
  const bool shares =
      transfer == Transfer::kValues && request.as() != v1::READ_AS_STORED && !request.has_target();
  for (bool again = false;; again = true) {
    std::shared_ptr<SharedPool> pool;
    if (shares) {
      KVT_ASSIGN_OR_RETURN(pool, impl_->transport().Pool(impl_->stub(), 0));
    }
    absl::StatusOr<ReadResult> result = ReadOnce(request, handlers, transfer, pool);
    if (result.ok()) impl_->SawBoot(result->manifest.boot_id());
    if (again || pool == nullptr || ErrorReason(result.status()) != kUnknownTransport)
      return result;
    impl_->transport().Forget(pool);  // the server restarted
  }
}

absl::StatusOr<ReadResult> Client::ReadOnce(const v1::ReadRequest& request,
                                            const ViewHandlers& handlers, Transfer transfer,
                                            const std::shared_ptr<SharedPool>& pool) {
  std::optional<StoredDecoder> decoder;
  if (transfer == Transfer::kStored && request.has_target())
    return absl::InvalidArgumentError("target is set; with Transfer::kStored values are made here");
  if (transfer == Transfer::kStored) {
    KVT_ASSIGN_OR_RETURN(decoder, StoredDecoder::Make(request));
  }
  v1::ReadRequest asked = decoder ? decoder->request() : request;
  const ReadKind kind = KindOf(asked);
  std::optional<RingReader> ring;
  if (pool != nullptr) {
    if (auto piece = pool->Take(kRingBytes)) ring.emplace(impl_->stub(), pool, *std::move(piece));
  }
  if (ring) *asked.mutable_target() = ring->target();
  // One that follows stands still while its writer does.
  ReadReactor reactor(asked.follow() ? absl::InfiniteDuration() : impl_->options().stall_limit,
                      impl_->StreamDeadline());
  reactor.Start(impl_->stub(), asked);
  ReadCheck check;
  ReadResult result;
  v1::ReadResponse message;
  bool begun = false;
  bool ended = false;
  for (;;) {
    const absl::StatusOr<bool> more = reactor.Next(message);
    if (ring && (more.ok() ? !*more : !ErrorReason(more.status()).empty())) ring->ServerEnded();
    KVT_RETURN_IF_ERROR(more.status());
    if (!*more) break;
    if (ended || begun == message.has_manifest()) {
      return absl::DataLossError("the read's messages are not manifest, chunks, summary");
    }
    if (message.has_manifest()) {
      begun = true;
      KVT_RETURN_IF_ERROR(check.Begin(message.manifest(), request.sequences_size(), kind));
      result.manifest = message.manifest();
      if (decoder) {
        KVT_ASSIGN_OR_RETURN(result.manifest, decoder->Begin(message.manifest()));
      }
      if (handlers.on_manifest) {
        KVT_RETURN_IF_ERROR(handlers.on_manifest(result.manifest));
      }
    } else if (message.has_chunk()) {
      v1::ReadChunk& chunk = *message.mutable_chunk();
      FoundValues found{.sizes = {chunk.k().size(), chunk.v().size()}, .k = {}, .v = {}};
      if (asked.has_target()) {
        KVT_ASSIGN_OR_RETURN(
            found, FindValues(check, chunk, ring ? &*ring : nullptr, kind == ReadKind::kStored));
      }
      KVT_RETURN_IF_ERROR(check.Take(chunk, found.sizes));
      if (decoder) {
        KVT_ASSIGN_OR_RETURN(chunk, decoder->Decode(chunk));
      }
      if (!asked.has_target()) {
        found.k = std::as_bytes(std::span(chunk.k()));
        found.v = std::as_bytes(std::span(chunk.v()));
      }
      const ChunkView view{.chunk = chunk, .k = found.k, .v = found.v};
      KVT_RETURN_IF_ERROR(handlers.on_chunk(view));
      if (ring) ring->Done();
    } else if (message.has_summary()) {
      ended = true;
      result.summary = message.summary();
    }
  }
  if (!ended) return absl::DataLossError("the read ended without a summary");
  KVT_RETURN_IF_ERROR(check.End(result.summary));
  if (decoder) result.summary.set_saturated_values(decoder->saturated_values());
  result.transferred_bytes = check.bytes();
  if (!ring && !asked.has_target()) impl_->transport().Count(check.bytes());
  return result;
}

absl::StatusOr<ReadResult> Client::ReadInto(const v1::ReadRequest& request,
                                            const PlaceSequence& place, Transfer transfer) {
  if (request.as() == v1::READ_AS_STORED) {
    return absl::InvalidArgumentError(
        "as is STORED; want values to place: ask for them with Transfer::kStored to have them "
        "travel as codes");
  }
  if (request.has_target()) {
    return absl::InvalidArgumentError(
        "target is set, which says where values go: take the read's end by Read");
  }
  if (request.follow()) {
    return absl::InvalidArgumentError(
        "follow is set; what is received in the end has no place yet: take its chunks by Read");
  }
  std::vector<std::vector<LayerTarget>> targets;
  v1::ReadManifest manifest;
  ViewHandlers handlers;
  handlers.on_manifest = [&](const v1::ReadManifest& arrived) {
    manifest = arrived;
    for (const v1::SequenceManifest& sequence : manifest.sequences()) {
      KVT_ASSIGN_OR_RETURN(std::vector<LayerTarget> layers, place(sequence));
      KVT_RETURN_IF_ERROR(CheckTargets(sequence, layers));
      targets.push_back(std::move(layers));
    }
    return absl::OkStatus();
  };
  handlers.on_chunk = [&](const ChunkView& view) {
    const v1::ReadChunk& chunk = view.chunk;
    const auto& sequence = manifest.sequences(static_cast<int>(chunk.sequence_index()));
    const std::uint32_t index = chunk.layer() - sequence.layers(0).layer();
    const v1::LayerManifest& layer = sequence.layers(static_cast<int>(index));
    const LayerTarget& target = targets[chunk.sequence_index()][index];
    const std::uint64_t first = chunk.first_token() - FirstToken(sequence, layer);
    ReadGeometry geometry{.layout = request.layout(),
                          .block_tokens = request.block_tokens(),
                          .tokens = LayerTokens(sequence, layer),
                          .heads = layer.num_heads(),
                          .vector_bytes = *RowBytes(layer.dtype(), layer.k_head_dim())};
    KVT_RETURN_IF_ERROR(Scatter(view.k, geometry, first, target.k));
    geometry.vector_bytes = *RowBytes(layer.dtype(), layer.v_head_dim());
    return Scatter(view.v, geometry, first, target.v);
  };
  return ReadViews(request, handlers, transfer);
}

}  // namespace kvtier::client
