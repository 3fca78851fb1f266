#include "service/rpc/read_handler.h"

#include <fmt/format.h>
#include <grpcpp/server_context.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
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

constexpr int kMaxSequencesPerRead = 256;
// What a read pins costs some 24 bytes a part outside the budget.
constexpr std::int64_t kMaxPartsPerRead = 1 << 22;

// What one Read call sends, message by message: manifest, chunks in manifest order, summary.
class ReadSession {
 public:
  ReadSession(RpcContext& context, const v1::ReadRequest& request)
      : context_(context), request_(request) {}

  // Writes the next message. False when the last one was written before.
  absl::StatusOr<bool> Next(v1::ReadResponse& out) {
    switch (stage_) {
      case Stage::kManifest:
        KVT_RETURN_IF_ERROR(Open(out));
        stage_ = Stage::kChunks;
        return true;
      case Stage::kChunks:
        if (SkipToTokens()) {
          KVT_RETURN_IF_ERROR(WriteChunk(out));
          return true;
        }
        stage_ = Stage::kDone;
        WriteSummary(out);
        return true;
      case Stage::kDone:
        return false;
    }
    return false;
  }

 private:
  enum class Stage { kManifest, kChunks, kDone };

  absl::Status Open(v1::ReadResponse& out) {
    if (request_.sequences_size() < 1 || request_.sequences_size() > kMaxSequencesPerRead) {
      return Error(Reason::kInvalidField,
                   fmt::format("sequences has {} entries; want 1 to {}", request_.sequences_size(),
                               kMaxSequencesPerRead));
    }
    KVT_ASSIGN_OR_RETURN(const cachestore::ReadFormat format, ReadFormatFrom(request_));
    v1::ReadManifest& manifest = *out.mutable_manifest();
    manifest.set_boot_id(context_.boot_id);
    std::int64_t total = 0;
    std::int64_t parts = 0;
    for (const v1::SequenceRange& wanted : request_.sequences()) {
      KVT_ASSIGN_OR_RETURN(const cachestore::SequenceKey key,
                           KeyFrom(request_.namespace_(), wanted.sequence()));
      KVT_ASSIGN_OR_RETURN(const cachestore::ReadRange range, ReadRangeFrom(request_, wanted));
      KVT_ASSIGN_OR_RETURN(cachestore::SequenceReader reader,
                           context_.store.OpenReader(key, wanted.model_id(), range, format));
      v1::SequenceManifest& sequence = *manifest.add_sequences();
      sequence = ManifestOf(reader);
      sequence.set_sequence(wanted.sequence());
      total += reader.total_bytes();
      parts += reader.pinned_parts();
      if (parts > kMaxPartsPerRead) {
        return Error(
            Reason::kInvalidField,
            fmt::format("sequences up to \"{}\" hold {} page parts; want at most {} in one call",
                        wanted.sequence(), parts, kMaxPartsPerRead));
      }
      readers_.push_back(std::move(reader));
    }
    manifest.set_total_bytes(total);
    return absl::OkStatus();
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
    const std::int64_t tokens = std::min(reader.ChunkTokens(layer_, context_.read_chunk_bytes),
                                         reader.pins().tokens - sent_);
    const std::int64_t first = reader.pins().first_token + sent_;
    v1::ReadChunk& chunk = *out.mutable_chunk();
    chunk.set_sequence_index(static_cast<std::uint32_t>(sequence_));
    chunk.set_layer(static_cast<std::uint32_t>(layer.layer));
    chunk.set_first_token(first);
    chunk.set_num_tokens(static_cast<std::uint32_t>(tokens));
    // The strings keep their memory from chunk to chunk, so this clears nothing.
    chunk.mutable_k()->resize(static_cast<std::size_t>(tokens * layer.k_bytes_per_token()));
    chunk.mutable_v()->resize(static_cast<std::size_t>(tokens * layer.v_bytes_per_token()));
    KVT_RETURN_IF_ERROR(reader.Fill(layer_, first, tokens,
                                    reinterpret_cast<std::byte*>(chunk.mutable_k()->data()),
                                    reinterpret_cast<std::byte*>(chunk.mutable_v()->data())));
    sent_ += tokens;
    reader.pins().model->Add(
        {.read_tokens = layer_ == 0 ? tokens : 0,
         .read_bytes = tokens * (layer.k_bytes_per_token() + layer.v_bytes_per_token())});
    return absl::OkStatus();
  }

  void WriteSummary(v1::ReadResponse& out) const {
    std::int64_t saturated = 0;
    for (const cachestore::SequenceReader& reader : readers_)
      saturated += reader.saturated_values();
    out.mutable_summary()->set_saturated_values(saturated);
  }

  RpcContext& context_;
  const v1::ReadRequest request_;
  Stage stage_ = Stage::kManifest;
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
    const absl::StatusOr<bool> more = session_->Next(messages_[filling]);
    absl::MutexLock lock(&mutex_);
    working_ = false;
    have_ready_ = more.ok() && *more;
    complete_ = more.ok() && !*more;
    if (!more.ok()) end_ = more.status();
    over_ |= !have_ready_;
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
