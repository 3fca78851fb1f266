#pragma once

#include <cstdint>

#include "cachestore/model/plan.h"

// How what a sequence takes goes with its length: a saw, for a page and a residual slot are taken
// whole when their first token arrives, and KIVI's residual grows and empties every R tokens. Pure
// functions.
namespace kvtier::cachestore {

// Over the lengths [tokens, tokens + period), in which pages and residual are in each of their
// phases once. Of a period beyond 4,096 tokens that many lengths are looked at, evenly spaced.
struct Phases {
  std::int64_t period = 1;
  std::int64_t most_residual = 0;  // bytes
  double least_ratio = 0;          // of CompressionRatio
  double mean_ratio = 0;
  double most_ratio = 0;
};
Phases PhasesFrom(const Model& model, std::int64_t tokens);

// What is left as tokens go to infinity, where the residual, which is bounded, weighs nothing.
struct Asymptote {
  double bytes_per_token = 0;  // everything included; 0 where every layer's tokens are bounded
  double compression_ratio = 0;
  double unpaged_ratio = 0;  // by UnpagedBytes
};
Asymptote AsymptoteOf(const Model& model);

}  // namespace kvtier::cachestore
