#pragma once

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cachestore/chunk.h"
#include "cachestore/layer_tensor.h"

namespace kvtier::cachestore {

// What of a chunk is checked, and how messages name it.
struct StoredCheck {
  int layer = 0;
  std::int64_t first_token = 0;  // the chunk's
  bool saturate_non_finite = false;
};

// Refuses the parts of one K or V of a chunk unless each is intact, is a final part of the shard's
// heads of this model, and reads as finite numbers where they are new to a head. What the codes
// were made from can't be known: that is the writer's word.
absl::Status CheckStoredPages(const LayerTensor& tensor, const StoredPages& pages,
                              absl::Span<const HeadAdvance> heads, const StoredCheck& check);

}  // namespace kvtier::cachestore
