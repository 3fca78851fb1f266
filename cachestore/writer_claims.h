#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cachestore/chunk.h"
#include "cachestore/model/model.h"

namespace kvtier::cachestore {

// One append stream's claim on a shard of a sequence. The sequence ends it when a higher epoch
// takes over or when the sequence goes.
struct WriterClaim {
  Shard shard;
  std::uint64_t epoch = 0;
  // Called once, outside the sequence's lock, when the sequence ends the claim, with OK when it was
  // sealed; not when the writer leaves by itself.
  std::function<void(const absl::Status&)> on_end;

  absl::Status ended;  // not OK: the claim is over. Guarded by the sequence's lock.
};

using EndedClaims = std::vector<std::shared_ptr<WriterClaim>>;

// Tells each what its `ended` says. Outside locks.
void NotifyEnded(const EndedClaims& claims);

// Which streams write which layers and heads of one sequence, and the highest epoch that each has
// seen. Not thread-safe: the sequence's lock guards it.
class WriterClaims {
 public:
  explicit WriterClaims(const Model& model);

  // ABORTED below the highest epoch seen in the shard, ALREADY_EXISTS at that of a live writer;
  // above, the older ones go to `ended`. `sequence`: its id, for the message.
  absl::Status Add(const std::shared_ptr<WriterClaim>& claim, const std::string& sequence,
                   EndedClaims& ended);
  // ABORTED where a higher epoch was seen.
  absl::Status CheckEpoch(std::uint64_t epoch, const std::string& sequence) const;
  // Ends every writer and keeps those of an epoch below this one out from now on.
  EndedClaims TakeOver(std::uint64_t epoch);
  void Remove(const std::shared_ptr<WriterClaim>& claim) { std::erase(live_, claim); }
  // All of them end with `why`.
  EndedClaims EndAll(const absl::Status& why);

  // What epochs were seen, and no writer.
  WriterClaims WithoutWriters() const {
    WriterClaims claims = *this;
    claims.live_.clear();
    return claims;
  }

  bool empty() const { return live_.empty(); }

 private:
  std::vector<std::vector<std::uint64_t>> epochs_;  // [layer][head]
  EndedClaims live_;
};

}  // namespace kvtier::cachestore
