#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvtier::client {

// K's, V's or Q's scale of one layer.
struct SideScales {
  std::vector<float> values;  // one, or one per KV head; empty: the checkpoint has none
  std::string tensor;         // where they come from; empty: from none, 1.0 stands in
};

struct LayerCalibration {
  int layer = 0;  // the layer's number in the checkpoint
  SideScales k;
  SideScales v;
  SideScales q;
};

// The KV scales of a calibrated checkpoint, of one tensor-parallel rank.
struct CheckpointScales {
  std::string source;                    // the checkpoint's name
  std::vector<LayerCalibration> layers;  // those that keep K and V, in order
  int calibrated = 0;                    // of them
  std::vector<std::string> warnings;
};

struct CheckpointScalesOptions {
  int tp_size = 1;
  int tp_rank = 0;
  bool allow_partial = false;  // layers without scales take 1.0
};

// Reads config.json, and of the safetensors files (those of model.safetensors.index.json where it
// is there, else all of the directory) headers and scales, never weights. INVALID_ARGUMENT names
// the tensor and file of a scale that can't be (0, NaN, Inf, negative, subnormal, a wrong length or
// type), and the layers that have none while others have. Zero points are ignored.
absl::StatusOr<CheckpointScales> ReadCheckpointScales(const std::string& directory,
                                                      const CheckpointScalesOptions& options);

}  // namespace kvtier::client
