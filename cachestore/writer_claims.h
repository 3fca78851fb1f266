#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cachestore/chunk.h"
#include "cachestore/model/model.h"
#include "cachestore/notices.h"

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

// Which streams write which layers and heads of one sequence, and the highest epoch that each has
// seen. Not thread-safe: the sequence's lock guards it.
class WriterClaims {
 public:
  explicit WriterClaims(const Model& model);

  // ABORTED below the highest epoch seen in the shard, ALREADY_EXISTS at that of a live writer;
  // above, the older ones end. `sequence`: its id, for the message.
  absl::Status Add(const std::shared_ptr<WriterClaim>& claim, const std::string& sequence,
                   Notices& notices);
  // ABORTED where a higher epoch was seen.
  absl::Status CheckEpoch(std::uint64_t epoch, const std::string& sequence) const;
  // Ends every writer and keeps those of an epoch below this one out from now on.
  void TakeOver(std::uint64_t epoch, Notices& notices);
  void Remove(const std::shared_ptr<WriterClaim>& claim) { std::erase(live_, claim); }
  // All of them end with `why`.
  void EndAll(const absl::Status& why, Notices& notices);

  // What epochs were seen, and no writer.
  WriterClaims WithoutWriters() const {
    WriterClaims claims = *this;
    claims.live_.clear();
    return claims;
  }

  bool empty() const { return live_.empty(); }

 private:
  std::vector<std::vector<std::uint64_t>> epochs_;  // [layer][head]
  std::vector<std::shared_ptr<WriterClaim>> live_;
};

}  // namespace kvtier::cachestore
