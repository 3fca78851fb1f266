#include "cachestore/shard.h"

#include <fmt/format.h>

#include <algorithm>

#include "cachestore/base/errors.h"

namespace kvtier::cachestore {

absl::StatusOr<Shard> ResolveShard(Shard shard, const Model& model) {
  const int layers = static_cast<int>(model.layers.size());
  const Shard asked = shard;
  if (shard.num_layers == 0) shard.num_layers = layers - shard.first_layer;
  if (shard.first_layer < 0 || shard.num_layers < 1 ||
      shard.num_layers > layers - shard.first_layer) {
    return Error(Reason::kInvalidField,
                 fmt::format("first_layer {} and num_layers {} are outside the model's {} layers",
                             asked.first_layer, asked.num_layers, layers));
  }
  const bool to_the_last = shard.num_heads == 0;
  for (int layer = shard.first_layer; layer < shard.end_layer(); ++layer) {
    const int heads = model.layers[static_cast<std::size_t>(layer)].spec.kv_heads;
    if (to_the_last) shard.num_heads = std::max(shard.num_heads, heads - shard.first_head);
    if (shard.first_head < 0 || shard.first_head >= heads || shard.num_heads < 1 ||
        (!to_the_last && shard.num_heads > heads - shard.first_head)) {
      return Error(
          Reason::kInvalidField,
          fmt::format("first_head {} and num_heads {} are outside the {} KV heads of layer {}",
                      asked.first_head, asked.num_heads, heads, layer));
    }
  }
  return shard;
}

}  // namespace kvtier::cachestore
