#include "service/rpc/append_session.h"

#include <fmt/format.h>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"

namespace kvtier::service {

using cachestore::Error;
using cachestore::Reason;

absl::StatusOr<v1::AppendResponse> AppendSession::Open(const v1::AppendOpen& open) {
  if (writer_ != nullptr)
    return Error(Reason::kInvalidField, "open came twice; want it first and once");
  KVT_RETURN_IF_ERROR(context_.CheckNotDraining());
  KVT_ASSIGN_OR_RETURN(cachestore::WriterRequest request, WriterRequestFrom(open));
  KVT_ASSIGN_OR_RETURN(layout_, SourceLayoutFrom(open));
  if (!open.transport_id().empty()) {
    KVT_ASSIGN_OR_RETURN(Transports::Found found,
                         context_.transports.Find(open.transport_id(), "open.transport_id"));
    if (found.nccl != nullptr && found.nccl->sends()) {
      return Error(Reason::kInvalidField,
                   "open.transport_id is of an NCCL transport for reads; want one for appends");
    }
    layout_.memory = std::move(found.memory);
    layout_.on_device = found.nccl != nullptr;
    nccl_ = std::move(found.nccl);
  }
  request.on_end = on_end_;
  KVT_ASSIGN_OR_RETURN(writer_, context_.store.OpenWriter(std::move(request)));
  layout_.residual_origin = writer_->standing().residual_origin;
  return Ack(writer_->standing());
}

absl::StatusOr<std::optional<v1::AppendResponse>> AppendSession::Take(
    const v1::AppendChunk& chunk, std::function<void(const absl::Status&)> on_received) {
  if (writer_ == nullptr) return Error(Reason::kInvalidField, "chunk came first; want open");
  std::size_t bytes = chunk.k().size() + chunk.v().size();
  for (const auto* parts : {&chunk.k_parts(), &chunk.v_parts()}) {
    for (const v1::StoredPart& part : *parts) bytes += part.data().size();
  }
  if (bytes > static_cast<std::size_t>(context_.max_message_bytes)) {
    return Error(Reason::kMessageTooLarge,
                 fmt::format("chunk.k and chunk.v, and their parts, have {} bytes; want at most {}",
                             bytes, context_.max_message_bytes));
  }
  absl::StatusOr<ChunkView> view = ChunkFrom(chunk, writer_->model(), writer_->shard(), layout_);
  // Nobody knows what the worker has sent: nothing that comes after it can be told from it.
  if (!view.ok() && chunk.has_transfer()) GiveUp();
  KVT_RETURN_IF_ERROR(view.status());
  if (view->chunk.on_device) {
    KVT_RETURN_IF_ERROR(Receive(chunk, *view, std::move(on_received)));
    return std::nullopt;
  }
  return Append(view->chunk);
}

absl::Status AppendSession::Receive(const v1::AppendChunk& chunk, const ChunkView& view,
                                    std::function<void(const absl::Status&)> on_received) {
  if (!chunk.has_transfer()) {
    return Error(Reason::kInvalidField,
                 "chunk.transfer is not set; over NCCL want the transfer's number");
  }
  receiving_ = view.chunk;
  const absl::Status posted = nccl_->channel().Post(
      chunk.transfer(), {.pieces = {view.k, view.v}, .done = std::move(on_received)});
  if (!absl::IsInvalidArgument(posted)) return posted;
  GiveUp();
  return Error(Reason::kInvalidField, "chunk.transfer: " + std::string(posted.message()));
}

absl::StatusOr<v1::AppendResponse> AppendSession::TakeReceived() {
  return Append(std::exchange(receiving_, {}));
}

void AppendSession::GiveUp() const {
  if (nccl_ != nullptr) nccl_->channel().Close("a stream over it was broken off, or refused");
}

absl::StatusOr<v1::AppendResponse> AppendSession::Append(const cachestore::Chunk& chunk) {
  const absl::Time started = context_.clock.Now();
  KVT_ASSIGN_OR_RETURN(const cachestore::AppendResult result, writer_->Append(chunk));
  context_.observer.ChunkAppended(context_.clock.Now() - started);
  ++chunks_;
  return Ack(result);
}

v1::AppendResponse AppendSession::Ack(const cachestore::AppendResult& result) const {
  v1::AppendResponse ack;
  ack.set_boot_id(context_.boot_id);
  ack.set_received_tokens(result.received_tokens);
  ack.set_committed_tokens(result.committed_tokens);
  ack.set_skipped_tokens(result.skipped_tokens);
  ack.set_saturated_values(result.saturated_values);
  ack.set_chunks(chunks_);
  ack.set_residual_origin(layout_.residual_origin);
  return ack;
}

}  // namespace kvtier::service
