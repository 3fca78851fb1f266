#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cachestore/device/device.h"
#include "cachestore/lease.h"
#include "cachestore/model/read_format.h"
#include "cachestore/sequence.h"
#include "cachestore/sequence_reader.h"

namespace kvtier::cachestore {

// Reads a sequence as it is received, in pieces of one layer each, which it takes from the store
// when it is asked for the next: nothing is queued for it, and between two pieces it keeps nothing
// from its writers. Not thread-safe; one caller at a time. Must not outlive the store.
class SequenceFollower {
 public:
  // INVALID_ARGUMENT and the like as SequenceReader::Make. `range` with its shard resolved;
  // `on_news` as FollowClaim's. `device` must outlive it.
  static absl::StatusOr<SequenceFollower> Make(std::shared_ptr<const Lease> lease,
                                               std::shared_ptr<FollowClaim> claim,
                                               const ReadRange& range, const ReadFormat& format,
                                               Device& device);
  SequenceFollower(SequenceFollower&&) = default;
  SequenceFollower& operator=(SequenceFollower&&) = delete;
  ~SequenceFollower();

  // A reader of no tokens: what comes out for each layer.
  const SequenceReader& opening() const { return opening_; }
  const ReadRange& range() const { return range_; }
  absl::Time deadline() const { return lease_->deadline(); }

  // The next piece, of whole blocks and at most `bytes` as SequenceReader::ChunkTokens: a reader
  // of it alone. What a layer has when its turn comes is given before another layer's. Nothing:
  // all that is here was given; unless it is done(), it will be told of news. ABORTED once the
  // sequence went or the lease ended; errors as Sequence::Look.
  absl::StatusOr<std::optional<SequenceReader>> Next(std::int64_t bytes);
  // All that was asked for was given, and is committed.
  bool done() const { return done_; }
  // That are committed, of those asked for: all, once it is done.
  std::int64_t tokens() const { return tokens_; }

 private:
  SequenceFollower(std::shared_ptr<const Lease> lease, std::shared_ptr<FollowClaim> claim,
                   const ReadRange& range, const ReadFormat& format, SequenceReader opening,
                   Device& device);

  // How many tokens of a layer may be given now, in whole blocks.
  std::int64_t Available(const FollowStanding& now, std::size_t layer) const;
  // How many of the layer whose turn it is; moves on to the next that has any. 0: none has.
  std::int64_t TakeTurn(const FollowStanding& now);

  std::shared_ptr<const Lease> lease_;
  std::shared_ptr<FollowClaim> claim_;
  ReadRange range_;
  ReadFormat format_;
  SequenceReader opening_;
  Device* device_;
  std::vector<std::int64_t> given_;  // by layer, where its next piece begins
  std::size_t layer_;                // whose turn it is
  std::int64_t turn_end_;            // what it had when its turn came
  std::int64_t tokens_ = 0;
  bool done_ = false;
};

}  // namespace kvtier::cachestore
