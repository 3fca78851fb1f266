#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cachestore/model/model_spec.h"
#include "cachestore/model/plan.h"

namespace kvtier::client {

// Layers of a model that take the same bytes.
struct LayerGroup {
  cachestore::LayerSpec layer;
  std::int64_t layers = 0;
  std::int64_t tokens = 0;  // that each keeps
};
// In the order of each group's first layer.
std::vector<LayerGroup> GroupLayers(const cachestore::ModelSpec& spec, std::int64_t tokens,
                                    cachestore::Retention retention);

// The size of the cache in its source dtype, M_KV = 2 * L * B * T * H_KV * d * b, with the numbers
// filled in. Where K and V or the layers differ it's the sum that this is short for.
struct KvFormula {
  std::string text;  // of a line or more, without the last newline
  std::int64_t bytes = 0;
};
KvFormula FormulaOf(const cachestore::ModelSpec& spec, const std::vector<LayerGroup>& groups,
                    std::int64_t requests);

}  // namespace kvtier::client
