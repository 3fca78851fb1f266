#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvtier/v1/kv_tier.pb.h"

namespace kvtier::client {

// What a Hugging Face config.json says of a model's KV cache.
struct ModelConfig {
  // Layers, heads, dims, windows. Without a name; source_dtype is unspecified if the config names
  // none, and never that of the weights' quantization.
  v1::ModelSpec spec;
  std::uint64_t max_position_embeddings = 0;  // 0: not said
  std::string engine_dtype =
      "auto";                        // the kv_cache_dtype that engines take where none is asked for
  std::vector<std::string> notices;  // what to know before relying on it
};

// Grouped, multi-query and full attention, sliding windows in the ways transformers knows, and MLA
// are understood; a config with a field that lays the cache out in another way is INVALID_ARGUMENT
// with that field's name, for a guess would be a wrong size.
absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& text);

// The kv_cache_dtype that is meant by one that was asked for: the engines' for `auto`.
std::string ResolveAuto(const ModelConfig& config, const std::string& kv_cache_dtype);

}  // namespace kvtier::client
