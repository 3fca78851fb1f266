#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier::cachestore {

// XXH3, 64 bits, seed 0, by what the CPU has of vectors.
std::uint64_t ChecksumOf(const std::byte* data, std::int64_t bytes);

}  // namespace kvtier::cachestore
