#include "service/rpc/read_handler.h"

#include <fmt/format.h>
#include <grpcpp/server_context.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "service/rpc/reply.h"
#include "service/rpc/rpc_status.h"
#include "service/rpc/wire.h"

namespace kvtier::service {
namespace {

using cachestore::Error;
using cachestore::Reason;
using cachestore::Side;
using StoredParts = google::protobuf::RepeatedPtrField<v1::StoredPart>;

constexpr int kMaxSequencesPerRead = 256;
// What a read pins costs some 24 bytes a part outside the budget.
constexpr std::int64_t kMaxPartsPerRead = 1 << 22;

// What one Read call sends, message by message: manifest, chunks in manifest order, summary.
class ReadSession {
 public:
  ReadSession(RpcContext& context, const v1::ReadRequest& request)
      : context_(context), request_(request) {}

  // kWorked: there is more to do before there is a message; others may go first.
  enum class Step { kWorked, kMessage, kEnd };

  // Writes the next message, or does some of the work for it.
  absl::StatusOr<Step> Next(v1::ReadResponse& out) {
    switch (stage_) {
      case Stage::kOpen:
        KVT_RETURN_IF_ERROR(Open());
        stage_ = Stage::kMeasure;
        [[fallthrough]];
      case Stage::kMeasure: {
        KVT_ASSIGN_OR_RETURN(const bool measured, MeasureScales());
        if (measured) return Step::kWorked;
        WriteManifest(out);
        stage_ = Stage::kChunks;
        return Step::kMessage;
      }
      case Stage::kChunks:
        if (SkipToTokens()) {
          KVT_RETURN_IF_ERROR(WriteChunk(out));
          return Step::kMessage;
        }
        stage_ = Stage::kDone;
        WriteSummary(out);
        return Step::kMessage;
      case Stage::kDone:
        return Step::kEnd;
    }
    return Step::kEnd;
  }

 private:
  enum class Stage { kOpen, kMeasure, kChunks, kDone };

  absl::Status Open() {
    if (request_.sequences_size() < 1 || request_.sequences_size() > kMaxSequencesPerRead) {
      return Error(Reason::kInvalidField,
                   fmt::format("sequences has {} entries; want 1 to {}", request_.sequences_size(),
                               kMaxSequencesPerRead));
    }
    KVT_ASSIGN_OR_RETURN(const cachestore::ReadFormat format, ReadFormatFrom(request_));
    std::int64_t parts = 0;
    for (const v1::SequenceRange& wanted : request_.sequences()) {
      KVT_ASSIGN_OR_RETURN(cachestore::SequenceReader reader, OpenReader(wanted, format));
      parts += reader.pinned_parts();
      if (parts > kMaxPartsPerRead) {
        return Error(
            Reason::kInvalidField,
            fmt::format("sequences up to \"{}\" hold {} page parts; want at most {} in one call",
                        wanted.sequence(), parts, kMaxPartsPerRead));
      }
      readers_.push_back(std::move(reader));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<cachestore::SequenceReader> OpenReader(
      const v1::SequenceRange& wanted, const cachestore::ReadFormat& format) const {
    KVT_ASSIGN_OR_RETURN(const cachestore::ReadRange range, ReadRangeFrom(request_, wanted));
    if (wanted.lease_id() == 0) {
      KVT_ASSIGN_OR_RETURN(const cachestore::SequenceKey key,
                           KeyFrom(request_.namespace_(), wanted.sequence()));
      return context_.store.OpenReader(key, wanted.model_id(), range, format);
    }
    if (!wanted.sequence().empty()) {
      return Error(Reason::kInvalidField,
                   fmt::format("sequences has a sequence \"{}\" and lease_id {} in one entry; want "
                               "one of the two",
                               wanted.sequence(), wanted.lease_id()));
    }
    KVT_ASSIGN_OR_RETURN(const std::string name_space, NamespaceFrom(request_.namespace_()));
    return context_.store.OpenReader(name_space, wanted.lease_id(), wanted.model_id(), range,
                                     format);
  }

  // A page's share, if any is left to measure: short steps, between which a read can end.
  absl::StatusOr<bool> MeasureScales() {
    for (cachestore::SequenceReader& reader : readers_) {
      KVT_ASSIGN_OR_RETURN(const bool measured, reader.MeasureScales());
      if (measured) return true;
    }
    return false;
  }

  void WriteManifest(v1::ReadResponse& out) const {
    v1::ReadManifest& manifest = *out.mutable_manifest();
    manifest.set_boot_id(context_.boot_id);
    std::int64_t total = 0;
    for (std::size_t i = 0; i < readers_.size(); ++i) {
      v1::SequenceManifest& sequence = *manifest.add_sequences();
      sequence = ManifestOf(readers_[i]);
      sequence.set_sequence(request_.sequences(static_cast<int>(i)).sequence());
      total += readers_[i].total_bytes();
    }
    manifest.set_total_bytes(total);
  }

  // Moves on to where tokens are left to send.
  bool SkipToTokens() {
    while (sequence_ < readers_.size()) {
      const cachestore::SequenceReader& reader = readers_[sequence_];
      if (layer_ < reader.layers().size() && sent_ < reader.pins().tokens) return true;
      sent_ = 0;
      if (++layer_ < reader.layers().size()) continue;
      layer_ = 0;
      ++sequence_;
    }
    return false;
  }

  absl::Status WriteChunk(v1::ReadResponse& out) {
    cachestore::SequenceReader& reader = readers_[sequence_];
    const cachestore::LayerOutput& layer = reader.layers()[layer_];
    const std::int64_t first = reader.pins().first_token + sent_;
    const std::int64_t tokens = std::min(
        reader.ChunkTokens(layer_, first, context_.read_chunk_bytes), reader.pins().tokens - sent_);
    v1::ReadChunk& chunk = *out.mutable_chunk();
    chunk.set_sequence_index(static_cast<std::uint32_t>(sequence_));
    chunk.set_layer(static_cast<std::uint32_t>(layer.layer));
    chunk.set_first_token(first);
    chunk.set_num_tokens(static_cast<std::uint32_t>(tokens));
    std::int64_t bytes = tokens * (layer.k_bytes_per_token() + layer.v_bytes_per_token());
    if (reader.stored()) {
      KVT_ASSIGN_OR_RETURN(bytes, WriteStored(reader, chunk));
    } else {
      KVT_RETURN_IF_ERROR(reader.Fill(
          layer_, first, tokens, Room(tokens * layer.k_bytes_per_token(), *chunk.mutable_k()),
          Room(tokens * layer.v_bytes_per_token(), *chunk.mutable_v())));
    }
    sent_ += tokens;
    reader.pins().model->Add({.read_tokens = layer_ == 0 ? tokens : 0, .read_bytes = bytes});
    return absl::OkStatus();
  }

  // Both sides of a chunk whose tokens are set. How many bytes.
  absl::StatusOr<std::int64_t> WriteStored(cachestore::SequenceReader& reader,
                                           v1::ReadChunk& chunk) const {
    KVT_ASSIGN_OR_RETURN(
        const std::int64_t k,
        WriteStored(reader, Side::kK, chunk, *chunk.mutable_k_parts(), *chunk.mutable_k()));
    KVT_ASSIGN_OR_RETURN(
        const std::int64_t v,
        WriteStored(reader, Side::kV, chunk, *chunk.mutable_v_parts(), *chunk.mutable_v()));
    return k + v;
  }

  absl::StatusOr<std::int64_t> WriteStored(cachestore::SequenceReader& reader, Side side,
                                           const v1::ReadChunk& chunk, StoredParts& parts,
                                           std::string& rows) const {
    const cachestore::StoredSpan span = reader.Span(
        layer_, side, static_cast<std::int64_t>(chunk.first_token()), chunk.num_tokens());
    const cachestore::TensorPins& tensor = reader.pinned(layer_, side);
    const cachestore::HeadRange heads = reader.heads(layer_);
    // Not cleared: the parts of the chunk before keep their memory for these.
    while (parts.size() > span.pages()) parts.RemoveLast();
    while (parts.size() < span.pages()) parts.Add();
    std::int64_t bytes = 0;
    for (int i = 0; i < parts.size(); ++i) {
      const std::int64_t page = span.first_page + i;
      v1::StoredPart& part = parts[i];
      part.set_page(static_cast<std::uint32_t>(page));
      const std::vector<std::int64_t> tokens = cachestore::PartTokens(tensor, heads, page);
      const bool alike = std::count(tokens.begin(), tokens.end(), tokens[0]) ==
                         static_cast<std::ptrdiff_t>(tokens.size());
      part.mutable_tokens()->Assign(tokens.begin(), alike ? tokens.begin() + 1 : tokens.end());
      const std::int64_t part_bytes = cachestore::PartBytes(tensor.model->layout, heads.count());
      KVT_RETURN_IF_ERROR(
          reader.FillPart(layer_, side, page, Room(part_bytes, *part.mutable_data())));
      bytes += part_bytes;
    }
    if (span.rows == 0) {
      rows.clear();
      return bytes;
    }
    const std::int64_t row_bytes = span.rows * heads.count() * tensor.model->source_row_bytes();
    KVT_RETURN_IF_ERROR(reader.FillRows(layer_, side, span, Room(row_bytes, rows)));
    return bytes + row_bytes;
  }

  // The strings keep their memory from chunk to chunk, so this clears nothing.
  static std::byte* Room(std::int64_t bytes, std::string& out) {
    out.resize(static_cast<std::size_t>(bytes));
    return reinterpret_cast<std::byte*>(out.data());
  }

  void WriteSummary(v1::ReadResponse& out) const {
    std::int64_t saturated = 0;
    for (const cachestore::SequenceReader& reader : readers_)
      saturated += reader.saturated_values();
    out.mutable_summary()->set_saturated_values(saturated);
  }

  RpcContext& context_;
  const v1::ReadRequest request_;
  Stage stage_ = Stage::kOpen;
  std::vector<cachestore::SequenceReader> readers_;
  std::size_t sequence_ = 0;
  std::size_t layer_ = 0;
  std::int64_t sent_ = 0;  // tokens of this layer
};

// Fills one message while the other is on its way out.
class ReadReactor final : public grpc::ServerWriteReactor<v1::ReadResponse>,
                          public WatchedStream,
                          public std::enable_shared_from_this<ReadReactor> {
 public:
  ReadReactor(RpcContext& context, grpc::CallbackServerContext& call,
              const v1::ReadRequest& request)
      : context_(context),
        call_(call),
        started_(context.clock.Now()),
        session_(std::in_place, context, request) {}

  void Start() {
    self_ = shared_from_this();
    absl::MutexLock lock(&mutex_);
    waiting_since_ = started_;
    context_.watch.Add(self_);
    Advance();
  }

  void OnWriteDone(bool ok) override {
    const auto keep = shared_from_this();
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    over_ |= !ok;
    Advance();
  }

  void OnCancel() override {
    const auto keep = shared_from_this();
    absl::MutexLock lock(&mutex_);
    over_ = true;
    Advance();
  }

  void OnDone() override { const auto keep = std::exchange(self_, nullptr); }

  void EndIfStalled(absl::Time limit) override {
    absl::MutexLock lock(&mutex_);
    // Under the lock: until it is finished, gRPC keeps the call.
    if (!finished_ && writing_ && waiting_since_ < limit) call_.TryCancel();
  }

 private:
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_) return;
    if (!over_ && have_ready_ && !writing_) {
      have_ready_ = false;
      writing_ = true;
      waiting_since_ = context_.clock.Now();
      std::swap(filling_, sending_);
      StartWrite(&messages_[sending_]);
    }
    if (!over_ && !have_ready_ && !working_) {
      working_ = true;
      if (!context_.work.Post(WorkQueue::Priority::kRead,
                              [self = shared_from_this()] { self->DoWork(); })) {
        working_ = false;
        over_ = true;
        end_ = Overloaded();
      }
    }
    if (!over_ || working_ || writing_) return;
    finished_ = true;
    session_.reset();  // lets the bytes go before the reader hears of the end
    if (complete_) context_.observer.ReadServed(context_.clock.Now() - started_);
    if (!end_.ok()) context_.observer.Rejected("Read", cachestore::ReasonOf(end_));
    Finish(complete_ || !end_.ok() ? ToGrpc(end_) : grpc::Status::CANCELLED);
  }

  void DoWork() ABSL_LOCKS_EXCLUDED(mutex_) {
    int filling;
    {
      absl::MutexLock lock(&mutex_);
      filling = filling_;
    }
    const absl::StatusOr<ReadSession::Step> step = session_->Next(messages_[filling]);
    absl::MutexLock lock(&mutex_);
    working_ = false;
    have_ready_ = step.ok() && *step == ReadSession::Step::kMessage;
    complete_ = step.ok() && *step == ReadSession::Step::kEnd;
    if (!step.ok()) end_ = step.status();
    over_ |= !step.ok() || complete_;
    Advance();
  }

  RpcContext& context_;
  grpc::CallbackServerContext& call_;
  const absl::Time started_;
  std::shared_ptr<ReadReactor> self_;         // until OnDone
  std::optional<ReadSession> session_;        // used by one task at a time
  std::array<v1::ReadResponse, 2> messages_;  // one being filled, one being sent

  absl::Mutex mutex_;
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
  absl::Time waiting_since_ ABSL_GUARDED_BY(mutex_);
  int filling_ ABSL_GUARDED_BY(mutex_) = 0;
  int sending_ ABSL_GUARDED_BY(mutex_) = 1;
  bool have_ready_ ABSL_GUARDED_BY(mutex_) = false;
  bool working_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool complete_ ABSL_GUARDED_BY(mutex_) = false;  // every message was written
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

grpc::ServerWriteReactor<v1::ReadResponse>* ServeRead(RpcContext& context,
                                                      grpc::CallbackServerContext& call,
                                                      const v1::ReadRequest& request) {
  const auto reactor = std::make_shared<ReadReactor>(context, call, request);
  reactor->Start();
  return reactor.get();
}

}  // namespace kvtier::service
