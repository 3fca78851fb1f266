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
    KVT_ASSIGN_OR_RETURN(layout_.memory,
                         context_.transports.Find(open.transport_id(), "open.transport_id"));
  }
  request.on_end = on_end_;
  KVT_ASSIGN_OR_RETURN(writer_, context_.store.OpenWriter(std::move(request)));
  layout_.residual_origin = writer_->standing().residual_origin;
  return Ack(writer_->standing());
}

absl::StatusOr<v1::AppendResponse> AppendSession::Take(const v1::AppendChunk& chunk) {
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
  const absl::Time started = context_.clock.Now();
  KVT_ASSIGN_OR_RETURN(const cachestore::Chunk values,
                       ChunkFrom(chunk, writer_->model(), writer_->shard(), layout_));
  KVT_ASSIGN_OR_RETURN(const cachestore::AppendResult result, writer_->Append(values));
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
