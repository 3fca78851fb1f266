#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/time/time.h"

namespace kvtier::cachestore {

// What a policy knows of something that may be let go.
struct EvictionCandidate {
  std::uint64_t id = 0;       // ascending in the order in which things came
  std::uint64_t content = 0;  // the same when the same comes again; 0: it could not be told
  absl::Time last_access;     // or when it came
  std::int64_t accesses = 0;  // since it came
};

// In which order things go that may go. What is in use is no candidate: it is removed, and added
// again, as it is then, once nobody uses it. Not thread-safe; nothing is known of bytes, nor of who
// must go before whom: only what may go by itself is ever a candidate.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  virtual void Add(const EvictionCandidate& candidate) = 0;
  // As it was added.
  virtual void Remove(const EvictionCandidate& candidate) = 0;
  // Something that is no candidate now will never be one again: it was evicted, or went otherwise.
  virtual void Forget(const EvictionCandidate& candidate, bool evicted) = 0;

  // The candidate that is to go next; it stays one until it is removed.
  virtual std::optional<EvictionCandidate> Next() = 0;
};

enum class EvictionPolicyName {
  kNone,    // nothing is evicted for room: what doesn't fit is refused
  kLru,     // what was not used for longest
  kS3Fifo,  // what was used once goes before what was used more often
};

std::unique_ptr<EvictionPolicy> MakeEvictionPolicy(EvictionPolicyName name);

}  // namespace kvtier::cachestore
