#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvtier/v1/kv_tier.pb.h"

namespace kvtier::client {

struct ObservedScalesOptions {
  double headroom = 1.25;  // other texts reach further than the ones observed
  bool per_head = false;
};

// The fp8_e4m3 scales that these magnitudes ask for: headroom * amax / 448, one, or one per KV
// head. FAILED_PRECONDITION where nothing was observed.
absl::StatusOr<std::vector<float>> ScalesFor(const google::protobuf::RepeatedField<float>& amax,
                                             const ObservedScalesOptions& options);

// Writes model.safetensors and config.json into a directory, which it makes, as LLM Compressor
// would: ReadCheckpointScales takes them back, and a checkpoint can carry the tensors.
// FAILED_PRECONDITION names the layers never observed; INVALID_ARGUMENT if either file is there.
absl::Status WriteObservedScales(const v1::ScalesResponse& observed,
                                 const ObservedScalesOptions& options,
                                 const std::string& directory);

}  // namespace kvtier::client
