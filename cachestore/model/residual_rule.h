#pragma once

#include <cstdint>

namespace kvtier::cachestore {

// Which of T received tokens are codes, as a function of T alone: never of how they arrived. Codes
// always cover a prefix; the rest is residual, kept at source precision.
//   KIVI's K (R)      window 0, block R (R = 0: block G)     codes = floor(T / R) * R
//   KIVI's V (R)      window R, block 1                      codes = max(0, T - R)
//   all other formats window 0, block 1                      codes = T
struct ResidualRule {
  int window = 0;  // newest tokens that are never codes
  int block = 1;   // tokens become codes this many at a time

  constexpr std::int64_t CodeTokens(std::int64_t tokens) const {
    const std::int64_t eligible = tokens > window ? tokens - window : 0;
    return eligible / block * block;
  }
  // Of a sequence whose first `origin` tokens are other sequences' codes: the rest counts from
  // there.
  constexpr std::int64_t CodeTokens(std::int64_t tokens, std::int64_t origin) const {
    return tokens <= origin ? tokens : origin + CodeTokens(tokens - origin);
  }
  constexpr std::int64_t ResidualTokens(std::int64_t tokens) const {
    return tokens - CodeTokens(tokens);
  }

  // Tokens a residual slot has room for; token t lies at t mod capacity. 0: the format keeps no
  // residual. Only one of window and block is ever in use, which is what makes this enough.
  constexpr int capacity() const { return window > 0 ? window : (block > 1 ? block : 0); }

  friend constexpr bool operator==(const ResidualRule&, const ResidualRule&) = default;
};

}  // namespace kvtier::cachestore
