#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/kv_file.h"
#include "client/model_config.h"
#include "kvtier/v1/kv_tier.pb.h"

namespace kvtier::client {

// ParseModelConfig of a file; errors start with its path. The spec's name is the file's without its
// ending, or the folder's where the file is called config.json.
absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& path);

// From the shapes in a file: every layer is full attention, or MLA if it has no V. The name is the
// file's, without its ending.
v1::ModelSpec SpecFromKvFile(const KvFile& file);

// Whether the file's K and V are the model's, layer by layer; INVALID_ARGUMENT names the tensor and
// the field. A spec without source_dtype takes the file's.
absl::Status MatchSpec(const KvFile& file, v1::ModelSpec& spec);

}  // namespace kvtier::client
