#include "cachestore/eviction/policy.h"

#include "cachestore/eviction/lru.h"
#include "cachestore/eviction/s3_fifo.h"

namespace kvtier::cachestore {

std::unique_ptr<EvictionPolicy> MakeEvictionPolicy(EvictionPolicyName name) {
  if (name == EvictionPolicyName::kS3Fifo) return std::make_unique<S3Fifo>();
  return std::make_unique<Lru>();
}

}  // namespace kvtier::cachestore
