#pragma once

#include <cstdint>

namespace kvtier::cachestore {

// Bytes of memory that hold something, by what they hold.
struct MemoryUse {
  std::int64_t codes = 0;
  std::int64_t scales = 0;
  std::int64_t residual = 0;
  std::int64_t header = 0;

  constexpr std::int64_t total() const { return codes + scales + residual + header; }
  constexpr MemoryUse& operator+=(const MemoryUse& other) {
    codes += other.codes;
    scales += other.scales;
    residual += other.residual;
    header += other.header;
    return *this;
  }
  constexpr MemoryUse& operator-=(const MemoryUse& other) { return *this += -other; }
  constexpr MemoryUse operator-() const { return {-codes, -scales, -residual, -header}; }
  friend constexpr MemoryUse operator-(MemoryUse a, const MemoryUse& b) { return a -= b; }
  friend constexpr bool operator==(const MemoryUse&, const MemoryUse&) = default;
};

// Memory taken, and what of it is in use; the rest is slack: unfilled pages and alignment.
struct MemoryHeld {
  MemoryUse use;
  std::int64_t allocated = 0;

  constexpr std::int64_t slack() const { return allocated - use.total(); }
  constexpr MemoryHeld& operator+=(const MemoryHeld& other) {
    use += other.use;
    allocated += other.allocated;
    return *this;
  }
  constexpr MemoryHeld& operator-=(const MemoryHeld& other) {
    use -= other.use;
    allocated -= other.allocated;
    return *this;
  }
  friend constexpr bool operator==(const MemoryHeld&, const MemoryHeld&) = default;
};

// The whole budget: use, slack, staging and free sum to it exactly.
struct MemoryParts {
  MemoryUse use;
  std::int64_t slack = 0;
  std::int64_t staging = 0;
  std::int64_t free = 0;
};

}  // namespace kvtier::cachestore
