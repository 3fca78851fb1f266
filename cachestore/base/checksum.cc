#include "cachestore/base/checksum.h"

// Chooses at run time. Elsewhere the library has the one that its architecture always has.
#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

namespace kvtier::cachestore {

std::uint64_t ChecksumOf(const std::byte* data, std::int64_t bytes) {
  return XXH3_64bits(data, static_cast<std::size_t>(bytes));
}

}  // namespace kvtier::cachestore
