#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvtier::client {

// What of a checkpoint's configuration its KV scales go by.
struct CheckpointConfig {
  std::vector<int> kv_layers;  // the layers that keep K and V, by their number in the checkpoint
  int kv_heads = 0;     // 0: not said, or not the same everywhere; scales are per tensor then
  int query_heads = 0;  // 0: not said
  bool mla = false;     // K alone is cached
  std::optional<bool> per_head;  // strategy attn_head or tensor; unset: the config names none
};

// Reads config.json, and ModelOpt's hf_quant_config.json where there is one. Keys that say nothing
// about KV scales are ignored; a kv_cache_scheme that can't be served (another type, num_bits or
// strategy) and calculate_kv_scales are INVALID_ARGUMENT with the key's name.
absl::StatusOr<CheckpointConfig> ReadCheckpointConfig(const std::string& directory);

}  // namespace kvtier::client
