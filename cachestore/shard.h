#pragma once

#include <algorithm>

#include "absl/status/statusor.h"
#include "cachestore/model/model.h"

namespace kvtier::cachestore {

// A range of a model's layers and KV heads: what one append stream sends. Of a layer that has fewer
// heads than end_head(), those it has.
struct Shard {
  int first_layer = 0;
  int num_layers = 0;
  int first_head = 0;
  int num_heads = 0;

  constexpr int end_layer() const { return first_layer + num_layers; }
  constexpr int end_head() const { return first_head + num_heads; }
  constexpr int EndHeadIn(int layer_heads) const { return std::min(end_head(), layer_heads); }
  constexpr int HeadsIn(int layer_heads) const { return EndHeadIn(layer_heads) - first_head; }
};

// With "num_layers 0: all that follow" and num_heads 0, of each layer, resolved. INVALID_ARGUMENT
// where it isn't inside every layer.
absl::StatusOr<Shard> ResolveShard(Shard shard, const Model& model);

}  // namespace kvtier::cachestore
