#include "cachestore/model/read_format.h"

#include <fmt/format.h>

#include <cmath>

#include "cachestore/base/errors.h"

namespace kvtier::cachestore {

absl::StatusOr<std::vector<float>> OutputScales(const StoredScales& stored,
                                                const ReadFormat& format,
                                                const std::optional<float>& asked,
                                                const char* field) {
  if (asked.has_value()) {
    if (std::isnormal(*asked) && *asked > 0) return std::vector<float>{*asked};
    return Error(Reason::kInvalidField,
                 fmt::format("{} is {}; want a finite normal number above 0", field, *asked));
  }
  if (format.measure_scales) return std::vector<float>{1.0f};  // until they are
  if (stored.scales.empty() || stored.codec.element != *format.as) return std::vector<float>{1.0f};
  if (stored.scales.size() > 1 && format.per_tensor_scales_only) {
    return Error(Reason::kFormatRefused,
                 fmt::format("per_tensor_scales_only is set; the layer is stored as {} with a "
                             "scale per head: give {} or take "
                             "per-head scales",
                             kernels::ElementName(*format.as), field));
  }
  return stored.scales;
}

}  // namespace kvtier::cachestore
