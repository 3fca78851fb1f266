#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "cachestore/chunk.h"
#include "cachestore/model/model.h"
#include "cachestore/part.h"

namespace kvtier::cachestore {

// What of a source tensor to check: tokens [begin, end) of one shard head, as positions in the
// sequence.
struct ValueRange {
  int layer = 0;
  Side side = Side::kK;
  int head = 0;                  // of the model
  int shard_head = 0;            // of the source
  std::int64_t first_token = 0;  // the chunk's
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// Whether NaN and Inf may be stored: in FP8 with a scale known beforehand, where they are to
// saturate.
bool TakesNonFinite(const TensorModel& tensor, bool saturate_non_finite);

// The largest magnitude that may be stored; where NaN and Inf may, the largest finite one.
float LimitOf(const TensorModel& tensor, bool saturate_non_finite);

// Refuses what the tensor's format can't store: NaN and Inf (unless they are to saturate, in FP8
// with a scale known beforehand), and magnitudes past the format's limit. FP8 sources are taken as
// they are. The message names layer, head, token and channel. Gives the largest finite magnitude
// there; 0 of sources that are quantized already.
absl::StatusOr<float> CheckValues(const TensorModel& tensor, const SourceTensor& source,
                                  const ValueRange& range, bool saturate_non_finite);

// The same of `heads` shard heads from range.shard_head on, in one pass over memory: their largest
// magnitudes. Nothing where not all can be stored, or must be looked at otherwise: CheckValues then
// says of which head.
std::vector<float> CheckHeads(const TensorModel& tensor, const SourceTensor& source,
                              const ValueRange& range, std::size_t heads, bool saturate_non_finite);

}  // namespace kvtier::cachestore
