// What those who follow a sequence see of it.

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/sequence.h"

namespace kvtier::cachestore {

absl::Status Sequence::Follow(std::shared_ptr<FollowClaim> claim) {
  MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(CheckHeld());
  followers_.Add(std::move(claim));
  return absl::OkStatus();
}

void Sequence::Unfollow(const std::shared_ptr<FollowClaim>& claim) {
  MutexLock lock(&mutex_);
  followers_.Remove(claim);
  LetGoBehindWindows();
}

void Sequence::EndFollowers(const absl::Status& why, Notices& notices) {
  if (why.code() == absl::StatusCode::kAborted) return followers_.EndAll(why, notices);
  followers_.EndAll(Error(Reason::kSequenceGone, fmt::format("sequence \"{}\" was given up: {}",
                                                             key_.id, std::string(why.message()))),
                    notices);
}

absl::StatusOr<FollowStanding> Sequence::Look(FollowClaim& claim, const ReadRange& range) {
  MutexLock lock(&mutex_);
  claim.told = false;
  KVT_RETURN_IF_ERROR(claim.ended);
  FollowStanding standing{.received = {}, .committed = Committed(), .end = {}};
  Shard layer = range.shard;
  layer.num_layers = 1;
  for (; layer.first_layer < range.shard.end_layer(); ++layer.first_layer)
    standing.received.push_back(LeastReceived(layer));
  if (range.tokens >= 0) standing.end = range.first_token + range.tokens;
  if (state_ != SequenceState::kSealed) return standing;
  const std::int64_t end = standing.end.value_or(std::max(range.first_token, sealed_tokens_));
  if (end > sealed_tokens_) {
    return Error(Reason::kPastCommitted,
                 fmt::format("tokens up to {} were asked of sequence \"{}\"; it was sealed with {}",
                             end, key_.id, sealed_tokens_));
  }
  if (end > standing.committed) return EvictedFrom(standing.committed);
  standing.end = end;
  return standing;
}

}  // namespace kvtier::cachestore
