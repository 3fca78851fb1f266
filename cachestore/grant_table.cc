#include "cachestore/grant_table.h"

#include <fmt/format.h>

namespace kvtier::cachestore {

absl::Status TooMany(const GrantLimit& limit) {
  return Error(limit.reason, fmt::format("{0} {1} are held; the limit ({2}) is {0}", limit.most,
                                         limit.what, limit.option));
}

}  // namespace kvtier::cachestore
