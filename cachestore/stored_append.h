#pragma once

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cachestore/chunk.h"
#include "cachestore/layer_tensor.h"

namespace kvtier::cachestore {

// What of one head of a chunk was looked at.
struct Seen {
  float largest = 0;  // finite magnitude
  std::int64_t tokens = 0;
};

// What of a chunk is checked, and how messages name it.
struct StoredCheck {
  int layer = 0;
  std::int64_t first_token = 0;  // the chunk's
  bool saturate_non_finite = false;
};

// Refuses the parts of one K or V of a chunk unless each is intact, is a final part of the shard's
// heads of this model, and reads as finite numbers where they are new to a head. What the codes
// were made from can't be known: that is the writer's word.
// `seen`, of each of `heads`: adds what they read as.
absl::Status CheckStoredPages(const LayerTensor& tensor, const StoredPages& pages,
                              absl::Span<const HeadAdvance> heads, const StoredCheck& check,
                              absl::Span<Seen> seen);

}  // namespace kvtier::cachestore
