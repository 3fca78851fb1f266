#pragma once

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/codec.h"

// What a reader wants its bytes to be; decided alike by the store, which decodes for its readers,
// and by clients that decode for themselves.
namespace kvtier::cachestore {

enum class TokenLayout { kNhd, kHnd };

struct ReadFormat {
  std::optional<kernels::ElementType> as;  // unset: the source dtype
  TokenLayout layout = TokenLayout::kNhd;
  int block_tokens = 0;          // 0: what one Fill gives is one block
  std::optional<float> k_scale;  // FP8 output; unset: the stored scale where the layer is stored in
                                 // that type, else 1.0
  std::optional<float> v_scale;
  bool per_tensor_scales_only = false;
  bool measure_scales = false;     // FP8 output: what isn't asked for is measured over what is read
  bool stored = false;             // parts as they are; `as`, blocks and scales have no meaning
  bool accept_k_rotation = false;  // stored: the reader turns rotated keys back
};

// How K or V of a layer is scaled as it is stored: with no scale known beforehand, one, or one a
// head.
struct StoredScales {
  kernels::Codec codec;
  std::vector<float> scales;
};

// The scales of FP8 output: one, or one a head. `field`, "k_scale" or "v_scale", is the one that
// asks for `asked`. INVALID_ARGUMENT for a scale that is none, and for scales a head where only one
// is taken.
absl::StatusOr<std::vector<float>> OutputScales(const StoredScales& stored,
                                                const ReadFormat& format,
                                                const std::optional<float>& asked,
                                                const char* field);

}  // namespace kvtier::cachestore
