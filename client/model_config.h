#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "kvtier/v1/kv_tier.pb.h"

namespace kvtier::client {

// What a model's KV cache holds by the text of its Hugging Face config.json: layers, heads, dims,
// windows. `name` stays empty; source_dtype is unspecified if the config names none. Grouped,
// multi-query and full attention, sliding windows in the ways transformers knows, and MLA are
// understood; a config with a field that lays the cache out in another way is INVALID_ARGUMENT with
// that field's name, for a guess would be a wrong size.
absl::StatusOr<v1::ModelSpec> SpecFromConfig(const std::string& text);

}  // namespace kvtier::client
