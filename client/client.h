#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/append_stream.h"
#include "client/shared_memory.h"
#include "client/transport_choice.h"
#include "kvtier/v1/kv_tier.grpc.pb.h"

namespace kvtier::client {

struct ClientOptions {
  // How values travel that are inside messages otherwise, and how much memory that may take here.
  Transport transport = Transport::kAuto;
  std::int64_t shm_bytes = 16 << 20;
  // Is told how values travel, and why, when that is chosen.
  std::function<void(const std::string&)> tell;
  // Is told, once for each restart, by the first reply that shows it, on the thread that gets it:
  // the server holds nothing of before. Sequences must be appended anew; models this client
  // registers again by itself when they are asked for.
  std::function<void()> on_restart;
  // Of a call with one request and one reply.
  absl::Duration call_limit = absl::Seconds(30);
  // Of an append or a read, all of it.
  absl::Duration stream_limit = absl::Hours(1);
  // A stream on which nothing moves for this long while the client waits for it is given up.
  absl::Duration stall_limit = absl::Seconds(30);
};

// Takes what a read brings, in this order, on the thread that called Read. An error ends the read
// and becomes its result.
struct ReadHandlers {
  std::function<absl::Status(const v1::ReadManifest&)> on_manifest;  // once, may be empty
  std::function<absl::Status(v1::ReadChunk)> on_chunk;  // in manifest order, or as received
};

struct ReadResult {
  v1::ReadManifest manifest;
  v1::ReadSummary summary;
  std::uint64_t transferred_bytes = 0;  // of K and V, as they travelled
};

// How values travel: as values, or as the codes that the server stores, encoded and decoded here.
// The values are the same, bit for bit; of 2 to 4 bits an eighth to a quarter of the bytes travel.
enum class Transfer { kValues, kStored };

// Where one layer of a sequence goes: [tokens, heads, dim] for NHD, [heads, tokens, dim] for HND,
// of the manifest's type. The sizes must be exactly that; a V of dim 0 takes none.
struct LayerTarget {
  std::span<std::byte> k;
  std::span<std::byte> v;
};

// Says where the layers of a sequence go, in the manifest's order; called once for each sequence.
using PlaceSequence =
    std::function<absl::StatusOr<std::vector<LayerTarget>>(const v1::SequenceManifest&)>;

// A connection to one kvtier server. Thread-safe; each Client has a connection of its own, so
// workers that move much data should not share one. Errors carry the server's code and message;
// ErrorReason() gives their reason.
class Client {
 public:
  // `address` is host:port or unix:PATH. No network yet: a server that cannot be reached is
  // UNAVAILABLE at the first call, and later calls connect again.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& address,
                                                         const ClientOptions& options);
  ~Client();

  // Is remembered, for a server that restarts.
  absl::StatusOr<v1::RegisterModelResponse> RegisterModel(const v1::RegisterModelRequest& request);
  // Returns when the server has taken the stream; AppendStream::opened() says from which token on
  // data is wanted. The stream must go before the client.
  absl::StatusOr<std::unique_ptr<AppendStream>> OpenAppend(const AppendOptions& options);
  absl::StatusOr<v1::AppendBatchResponse> AppendBatch(const v1::AppendBatchRequest& request);
  absl::StatusOr<v1::LookupResponse> Lookup(const v1::LookupRequest& request);
  absl::StatusOr<v1::AcquireResponse> Acquire(const v1::AcquireRequest& request);
  absl::StatusOr<v1::RenewResponse> Renew(const v1::RenewRequest& request);
  absl::StatusOr<v1::ReleaseResponse> Release(const v1::ReleaseRequest& request);
  absl::StatusOr<v1::PinResponse> Pin(const v1::PinRequest& request);
  absl::StatusOr<v1::UnpinResponse> Unpin(const v1::UnpinRequest& request);
  absl::StatusOr<v1::ForkResponse> Fork(const v1::ForkRequest& request);
  absl::StatusOr<v1::TruncateResponse> Truncate(const v1::TruncateRequest& request);
  absl::StatusOr<v1::GetQuotaResponse> GetQuota(const v1::GetQuotaRequest& request);
  absl::StatusOr<v1::SetQuotaResponse> SetQuota(const v1::SetQuotaRequest& request);
  absl::StatusOr<v1::SetPressureResponse> SetPressure(const v1::SetPressureRequest& request);
  absl::StatusOr<v1::SealResponse> Seal(const v1::SealRequest& request);
  absl::StatusOr<v1::AbortResponse> Abort(const v1::AbortRequest& request);
  absl::StatusOr<v1::RemoveResponse> Remove(const v1::RemoveRequest& request);

  // Every chunk is checked against the manifest before it is handed on, and the whole against what
  // the manifest promised: DATA_LOSS names what is missing or too much. kStored takes no
  // block_tokens, and ranges of tokens that cut no group. With `follow` set it takes what is still
  // to come as it comes, and OK says that all of it is committed.
  absl::StatusOr<ReadResult> Read(const v1::ReadRequest& request, const ReadHandlers& handlers,
                                  Transfer transfer = Transfer::kValues);
  // The same, put together in the caller's memory.
  absl::StatusOr<ReadResult> ReadInto(const v1::ReadRequest& request, const PlaceSequence& place,
                                      Transfer transfer = Transfer::kValues);

  // Memory that this process and the server then both have: where K and V lie, or are to lie, that
  // needn't be copied here (AppendChunk.k_offset, ReadRequest.target, with its transport_id).
  // FAILED_PRECONDITION or UNAVAILABLE say why there is none. What a stream or read was given that
  // this end broke off may be used by the server a little longer.
  absl::StatusOr<std::shared_ptr<const SharedMemory>> Share(std::int64_t bytes);
  // Gives back room of a read into a ring of the caller's own (ReadTarget.ring).
  absl::StatusOr<v1::GrantCreditResponse> GrantCredit(const v1::GrantCreditRequest& request);
  // How values travel: "shm" or "inline"; empty before that was chosen.
  std::string transport() const;

  absl::StatusOr<v1::DescribeResponse> Describe(const v1::DescribeRequest& request);
  absl::StatusOr<v1::ListSequencesResponse> ListSequences(const v1::ListSequencesRequest& request);
  absl::StatusOr<v1::CapacityResponse> Capacity(const v1::CapacityRequest& request);
  absl::StatusOr<v1::ScalesResponse> Scales(const v1::ScalesRequest& request);
  absl::StatusOr<v1::DrainResponse> Drain();

 private:
  friend class GpuClient;
  class Impl;
  struct ChunkView;
  struct ViewHandlers;

  absl::StatusOr<ReadResult> ReadViews(const v1::ReadRequest& request, const ViewHandlers& handlers,
                                       Transfer transfer);
  absl::StatusOr<ReadResult> ReadOnce(const v1::ReadRequest& request, const ViewHandlers& handlers,
                                      Transfer transfer, const std::shared_ptr<SharedPool>& pool);
  explicit Client(std::unique_ptr<Impl> impl);
  v1::KvTierService::Stub& stub() const;

  const std::unique_ptr<Impl> impl_;
};

}  // namespace kvtier::client
