#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "cachestore/store.h"
#include "kvtier/v1/kv_tier.pb.h"
#include "service/rpc/rpc_context.h"
#include "service/rpc/wire.h"

namespace kvtier::service {

// The protocol of one append stream: an open, then chunks. One message at a time, in order: the
// next once the one before has its ack.
class AppendSession {
 public:
  // `on_end` as WriterRequest has it.
  AppendSession(RpcContext& context, std::function<void(const absl::Status&)> on_end)
      : context_(context), on_end_(std::move(on_end)) {}

  absl::StatusOr<v1::AppendResponse> Open(const v1::AppendOpen& open);
  // Nothing: its values are still to come, over NCCL. `on_received` is told from any thread,
  // perhaps before this returns, when they are there, or never will be; then the ack is
  // TakeReceived's.
  absl::StatusOr<std::optional<v1::AppendResponse>> Take(
      const v1::AppendChunk& chunk, std::function<void(const absl::Status&)> on_received);
  absl::StatusOr<v1::AppendResponse> TakeReceived();
  // The worker is gone, and what it was to send with it.
  void GiveUp() const;

 private:
  absl::StatusOr<v1::AppendResponse> Append(const cachestore::Chunk& chunk);
  absl::Status Receive(const v1::AppendChunk& chunk, const ChunkView& view,
                       std::function<void(const absl::Status&)> on_received);
  v1::AppendResponse Ack(const cachestore::AppendResult& result) const;

  RpcContext& context_;
  const std::function<void(const absl::Status&)> on_end_;
  SourceLayout layout_;
  std::shared_ptr<NcclTransport> nccl_;  // null: of another kind, or none
  cachestore::Chunk receiving_;
  std::unique_ptr<cachestore::Writer> writer_;
  std::uint64_t chunks_ = 0;
};

}  // namespace kvtier::service
