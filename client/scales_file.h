#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/checkpoint_scales.h"
#include "kvtier/v1/kv_tier.pb.h"

namespace kvtier::client {

// One JSON object, which ReadScales takes back: source, calibrated, warnings, and for each layer
// its number and k_scale, v_scale, q_scale with k_tensor, v_tensor, q_tensor.
std::string ScalesToJson(const CheckpointScales& scales);

// The scales of a checkpoint directory, or of a file that ScalesToJson made; `options` are a
// directory's. INVALID_ARGUMENT names what can't be.
absl::StatusOr<CheckpointScales> ReadScales(const std::string& path,
                                            const CheckpointScalesOptions& options);

// Whether kv_cache_dtype_skip_layers names that layer.
bool KeepsSourceDtype(const v1::RegisterModelRequest& request, int layer);

// Puts them into a request whose spec and policy are set, for every layer that isn't skipped.
// INVALID_ARGUMENT for another number of layers, and for fp8_e5m2, whose range a checkpoint's
// scales are not made for.
absl::Status SetScales(const CheckpointScales& scales, v1::RegisterModelRequest& request);

}  // namespace kvtier::client
