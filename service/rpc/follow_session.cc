// A Read that follows: what its sequences receive is sent as it comes.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "cachestore/base/status_macros.h"
#include "cachestore/sequence_follower.h"
#include "service/rpc/read_chunk.h"
#include "service/rpc/read_session.h"
#include "service/rpc/read_targets.h"
#include "service/rpc/reply.h"
#include "service/rpc/wire.h"

namespace kvtier::service {
namespace {

using cachestore::SequenceFollower;
using cachestore::SequenceReader;

class FollowSession final : public ReadSession {
 public:
  FollowSession(RpcContext& context, const v1::ReadRequest& request, std::function<void()> on_news)
      : context_(context), request_(request), on_news_(std::move(on_news)) {}

  absl::StatusOr<Step> Next(v1::ReadResponse& out) override {
    if (ended_) return Step::kEnd;
    if (followers_.empty()) {
      KVT_RETURN_IF_ERROR(Open());
      WriteManifest(out);
      return Step::kMessage;
    }
    if (!piece_.has_value()) {
      KVT_RETURN_IF_ERROR(TakePiece());
    }
    if (piece_.has_value()) return WritePiece(out);
    ended_ = std::all_of(followers_.begin(), followers_.end(),
                         [](const SequenceFollower& follower) { return follower.done(); });
    if (!ended_) return Step::kWaiting;
    WriteSummary(*out.mutable_summary());
    return Step::kMessage;
  }

  absl::Time deadline() const override {
    absl::Time first = absl::InfiniteFuture();
    for (const SequenceFollower& follower : followers_)
      first = std::min(first, follower.deadline());
    return first;
  }

 private:
  absl::Status Open() {
    KVT_RETURN_IF_ERROR(CheckSequences(request_));
    KVT_ASSIGN_OR_RETURN(const cachestore::ReadFormat format, ReadFormatFrom(request_));
    KVT_ASSIGN_OR_RETURN(targets_, ReadTargets::Open(context_.transports, request_, on_news_));
    for (const v1::SequenceRange& wanted : request_.sequences()) {
      KVT_ASSIGN_OR_RETURN(const cachestore::ReadRange range, ReadRangeFrom(request_, wanted));
      KVT_ASSIGN_OR_RETURN(const cachestore::SequenceKey key,
                           KeyFrom(request_.namespace_(), wanted.sequence()));
      KVT_ASSIGN_OR_RETURN(
          SequenceFollower follower,
          context_.store.Follow({key, wanted.model_id(), on_news_}, range, format));
      KVT_RETURN_IF_ERROR(targets_.Add(wanted, follower.opening(), follower.range()));
      followers_.push_back(std::move(follower));
    }
    return absl::OkStatus();
  }

  void WriteManifest(v1::ReadResponse& out) const {
    v1::ReadManifest& manifest = *out.mutable_manifest();
    manifest.set_boot_id(context_.boot_id);
    std::int64_t total = 0;
    bool known = true;
    for (std::size_t i = 0; i < followers_.size(); ++i) {
      const cachestore::ReadRange& range = followers_[i].range();
      const std::int64_t tokens = std::max<std::int64_t>(0, range.tokens);
      v1::SequenceManifest& sequence = *manifest.add_sequences();
      sequence = ManifestOf(followers_[i].opening());
      sequence.set_sequence(request_.sequences(static_cast<int>(i)).sequence());
      sequence.set_first_token(static_cast<std::uint64_t>(range.first_token));
      sequence.set_num_tokens(static_cast<std::uint64_t>(tokens));
      targets_.SayOffsets(i, sequence);
      known &= tokens > 0;
      for (const cachestore::LayerOutput& layer : followers_[i].opening().layers())
        total += tokens * (layer.k_bytes_per_token() + layer.v_bytes_per_token());
    }
    manifest.set_total_bytes(static_cast<std::uint64_t>(known ? total : 0));
  }

  // One of each sequence in turn, of those that have any.
  absl::Status TakePiece() {
    for (std::size_t i = 0; i < followers_.size(); ++i) {
      sequence_ = std::exchange(next_, (next_ + 1) % followers_.size());
      if (followers_[sequence_].done()) continue;  // whatever becomes of it now
      KVT_ASSIGN_OR_RETURN(
          std::optional<SequenceReader> piece,
          followers_[sequence_].Next(targets_.ChunkBytes(context_.read_chunk_bytes)));
      if (!piece.has_value()) continue;
      piece_.emplace(*std::move(piece));
      return absl::OkStatus();
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Step> WritePiece(v1::ReadResponse& out) {
    const cachestore::SequencePins& pins = piece_->pins();
    const int layer = pins.shard.first_layer - followers_[sequence_].range().shard.first_layer;
    KVT_ASSIGN_OR_RETURN(const std::optional<ChunkRoom> room,
                         targets_.Room(sequence_, static_cast<std::size_t>(layer),
                                       piece_->ChunkBytes(0, pins.first_token, pins.tokens)));
    if (!room.has_value()) return Step::kNoRoom;
    KVT_ASSIGN_OR_RETURN(const std::int64_t bytes,
                         WriteChunk(*piece_, {sequence_, 0, pins.first_token, pins.tokens}, *room,
                                    *out.mutable_chunk()));
    KVT_RETURN_IF_ERROR(targets_.Filled(*room, bytes, *out.mutable_chunk()));
    saturated_ += piece_->saturated_values();
    pins.model->Add({.read_tokens = layer == 0 ? pins.tokens : 0, .read_bytes = bytes});
    piece_.reset();
    return Step::kMessage;
  }

  void WriteSummary(v1::ReadSummary& summary) const {
    summary.set_saturated_values(static_cast<std::uint64_t>(saturated_));
    for (const SequenceFollower& follower : followers_)
      summary.add_tokens(static_cast<std::uint64_t>(follower.tokens()));
  }

  RpcContext& context_;
  const v1::ReadRequest request_;
  const std::function<void()> on_news_;
  ReadTargets targets_;
  std::vector<SequenceFollower> followers_;
  std::size_t next_ = 0;                 // sequence
  std::optional<SequenceReader> piece_;  // to be sent, of sequence_
  std::size_t sequence_ = 0;
  std::int64_t saturated_ = 0;
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<ReadSession> MakeFollowSession(RpcContext& context, const v1::ReadRequest& request,
                                               std::function<void()> on_news) {
  return std::make_unique<FollowSession>(context, request, std::move(on_news));
}

}  // namespace kvtier::service
