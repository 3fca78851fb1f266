#pragma once

#include <string>

#include "absl/time/time.h"

namespace kvtier::service {

// What the RPC handlers tell of their work; metrics implement it. Thread-safe.
class Observer {
 public:
  virtual ~Observer() = default;

  // One chunk of an append stream, from received to ready to be acknowledged. Only chunks that were
  // taken.
  virtual void ChunkAppended(absl::Duration took) = 0;
  // One Read call that ended well, from asked to last byte handed over. Not of one that follows.
  virtual void ReadServed(absl::Duration took) = 0;
  // A call, or a chunk, was refused. `rpc` is the method's name, `reason` one of
  // cachestore::ReasonNameAt.
  virtual void Rejected(const std::string& rpc, const std::string& reason) = 0;
};

}  // namespace kvtier::service
