#include "cachestore/sequence_follower.h"

#include <algorithm>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"

namespace kvtier::cachestore {

absl::StatusOr<SequenceFollower> SequenceFollower::Make(std::shared_ptr<const Lease> lease,
                                                        std::shared_ptr<FollowClaim> claim,
                                                        const ReadRange& range,
                                                        const ReadFormat& format, Device& device) {
  const ReadRange nothing{.shard = range.shard, .tokens = 0};
  KVT_ASSIGN_OR_RETURN(SequenceReader opening,
                       SequenceReader::Open(lease, nothing, format, device));
  KVT_RETURN_IF_ERROR(lease->sequence()->Follow(claim));
  return SequenceFollower(std::move(lease), std::move(claim), range, format, std::move(opening),
                          device);
}

SequenceFollower::SequenceFollower(std::shared_ptr<const Lease> lease,
                                   std::shared_ptr<FollowClaim> claim, const ReadRange& range,
                                   const ReadFormat& format, SequenceReader opening, Device& device)
    : lease_(std::move(lease)),
      claim_(std::move(claim)),
      range_(range),
      format_(format),
      opening_(std::move(opening)),
      device_(&device),
      given_(static_cast<std::size_t>(range.shard.num_layers), range.first_token),
      layer_(given_.size() - 1),  // the first is next
      turn_end_(range.first_token) {}

SequenceFollower::~SequenceFollower() {
  if (lease_ != nullptr) lease_->sequence()->Unfollow(claim_);
}

std::int64_t SequenceFollower::Available(const FollowStanding& now, std::size_t layer) const {
  const std::int64_t until = std::min(now.received[layer], now.end.value_or(now.received[layer]));
  const std::int64_t tokens = std::max<std::int64_t>(0, until - given_[layer]);
  if (format_.block_tokens == 0 || until == now.end) return tokens;
  return tokens / format_.block_tokens * format_.block_tokens;
}

std::int64_t SequenceFollower::TakeTurn(const FollowStanding& now) {
  const std::int64_t left = std::min(turn_end_ - given_[layer_], Available(now, layer_));
  if (left > 0) return left;
  for (std::size_t i = 0; i < given_.size(); ++i) {
    layer_ = (layer_ + 1) % given_.size();
    const std::int64_t tokens = Available(now, layer_);
    turn_end_ = given_[layer_] + tokens;
    if (tokens > 0) return tokens;
  }
  return 0;
}

absl::StatusOr<std::optional<SequenceReader>> SequenceFollower::Next(std::int64_t bytes) {
  for (;;) {
    KVT_RETURN_IF_ERROR(lease_->Check());
    KVT_ASSIGN_OR_RETURN(const FollowStanding now, lease_->sequence()->Look(*claim_, range_));
    const std::int64_t until = std::min(now.committed, now.end.value_or(now.committed));
    tokens_ = std::max<std::int64_t>(0, until - range_.first_token);
    std::int64_t tokens = TakeTurn(now);
    if (tokens == 0) {
      done_ = now.end.has_value() && now.committed >= *now.end;
      if (done_) lease_->sequence()->Unfollow(claim_);  // its windows may move on
      return std::nullopt;
    }
    tokens = std::min(tokens, opening_.ChunkTokens(layer_, given_[layer_], bytes));
    ReadRange piece{.shard = range_.shard, .first_token = given_[layer_], .tokens = tokens};
    piece.shard.first_layer += static_cast<int>(layer_);
    piece.shard.num_layers = 1;
    piece.received = true;
    auto reader = SequenceReader::Open(lease_, piece, format_, *device_);
    // It may have been truncated since it was looked at, never to less than was given.
    if (ReasonOf(reader.status()) == ReasonName(Reason::kPastCommitted)) continue;
    KVT_RETURN_IF_ERROR(reader.status());
    given_[layer_] += tokens;
    return *std::move(reader);
  }
}

}  // namespace kvtier::cachestore
