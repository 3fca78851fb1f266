#include "service/rpc/read_session.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "service/rpc/read_chunk.h"
#include "service/rpc/read_targets.h"
#include "service/rpc/reply.h"
#include "service/rpc/wire.h"

namespace kvtier::service {
namespace {

using cachestore::Error;
using cachestore::Reason;

constexpr int kMaxSequencesPerRead = 256;
// What a read pins costs some 24 bytes a part outside the budget.
constexpr std::int64_t kMaxPartsPerRead = 1 << 22;

class WholeRead final : public ReadSession {
 public:
  WholeRead(RpcContext& context, const v1::ReadRequest& request, std::function<void()> on_news)
      : context_(context), request_(request), on_news_(std::move(on_news)) {}

  absl::StatusOr<Step> Next(v1::ReadResponse& out) override {
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
        if (SkipToTokens()) return WriteNext(out);
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
    KVT_RETURN_IF_ERROR(CheckSequences(request_));
    KVT_ASSIGN_OR_RETURN(const cachestore::ReadFormat format, ReadFormatFrom(request_));
    KVT_ASSIGN_OR_RETURN(targets_, ReadTargets::Open(context_.transports, request_, on_news_));
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
      KVT_RETURN_IF_ERROR(
          targets_.Add(wanted, reader,
                       {.first_token = reader.pins().first_token, .tokens = reader.pins().tokens}));
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
      targets_.SayOffsets(i, sequence);
      total += readers_[i].total_bytes();
    }
    manifest.set_total_bytes(total);
  }

  // Moves on to where tokens are left to send.
  bool SkipToTokens() {
    while (sequence_ < readers_.size()) {
      const cachestore::SequenceReader& reader = readers_[sequence_];
      if (layer_ < reader.layers().size() && sent_ < reader.layers()[layer_].tokens) return true;
      sent_ = 0;
      if (++layer_ < reader.layers().size()) continue;
      layer_ = 0;
      ++sequence_;
    }
    return false;
  }

  absl::StatusOr<Step> WriteNext(v1::ReadResponse& out) {
    cachestore::SequenceReader& reader = readers_[sequence_];
    const cachestore::LayerOutput& layer = reader.layers()[layer_];
    const std::int64_t first = layer.first_token + sent_;
    const std::int64_t tokens =
        std::min(reader.ChunkTokens(layer_, first, targets_.ChunkBytes(context_.read_chunk_bytes)),
                 layer.tokens - sent_);
    KVT_ASSIGN_OR_RETURN(
        const std::optional<ChunkRoom> room,
        targets_.Room(sequence_, layer_, reader.ChunkBytes(layer_, first, tokens)));
    if (!room.has_value()) return Step::kNoRoom;
    KVT_ASSIGN_OR_RETURN(
        const std::int64_t bytes,
        WriteChunk(reader, {sequence_, layer_, first, tokens}, *room, *out.mutable_chunk()));
    KVT_RETURN_IF_ERROR(targets_.Filled(*room, bytes, *out.mutable_chunk()));
    sent_ += tokens;
    const bool counted = layer_ == LongestLayer(reader);
    reader.pins().model->Add({.read_tokens = counted ? tokens : 0, .read_bytes = bytes});
    return Step::kMessage;
  }

  // Within windows others have fewer tokens.
  static std::size_t LongestLayer(const cachestore::SequenceReader& reader) {
    const auto& layers = reader.layers();
    const auto longest =
        std::max_element(layers.begin(), layers.end(),
                         [](const auto& a, const auto& b) { return a.tokens < b.tokens; });
    return static_cast<std::size_t>(longest - layers.begin());
  }

  void WriteSummary(v1::ReadResponse& out) const {
    v1::ReadSummary& summary = *out.mutable_summary();
    std::int64_t saturated = 0;
    for (const cachestore::SequenceReader& reader : readers_) {
      saturated += reader.saturated_values();
      summary.add_tokens(static_cast<std::uint64_t>(reader.pins().tokens));
    }
    summary.set_saturated_values(static_cast<std::uint64_t>(saturated));
  }

  RpcContext& context_;
  const v1::ReadRequest request_;
  const std::function<void()> on_news_;
  Stage stage_ = Stage::kOpen;
  ReadTargets targets_;
  std::vector<cachestore::SequenceReader> readers_;
  std::size_t sequence_ = 0;
  std::size_t layer_ = 0;
  std::int64_t sent_ = 0;  // tokens of this layer
};

}  // namespace

absl::Status CheckSequences(const v1::ReadRequest& request) {
  if (request.sequences_size() >= 1 && request.sequences_size() <= kMaxSequencesPerRead)
    return absl::OkStatus();
  return Error(Reason::kInvalidField, fmt::format("sequences has {} entries; want 1 to {}",
                                                  request.sequences_size(), kMaxSequencesPerRead));
}

std::unique_ptr<ReadSession> MakeReadSession(RpcContext& context, const v1::ReadRequest& request,
                                             std::function<void()> on_news) {
  return std::make_unique<WholeRead>(context, request, std::move(on_news));
}

}  // namespace kvtier::service
