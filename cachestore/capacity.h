#pragma once

#include <cstdint>

#include "cachestore/model/model.h"
#include "cachestore/model_registry.h"

namespace kvtier::cachestore {

// What a model's sequences hold and what more of them would fit: the figures that Capacity answers
// and that metrics export.
struct ModelCapacity {
  std::int64_t source_bytes = 0;  // what the tokens held take in the source dtype
  std::int64_t stored_bytes = 0;  // what the sequences take here, everything included
  double compression_ratio = 0;   // source over stored; 0 while nothing is held

  std::int64_t mean_tokens = 0;     // of a sequence; the model's max_tokens while no token is held
  std::int64_t more_tokens = 0;     // that fit as one long sequence
  std::int64_t more_sequences = 0;  // of mean_tokens that fit

  double bytes_per_token = 0;            // planned at max_tokens, everything included
  double planned_compression_ratio = 0;  // planned at max_tokens

  std::int64_t more_tokens_as_mean_sequences() const { return more_sequences * mean_tokens; }
};

// What the tokens held take in the source dtype; of windows, all of the pages that are kept.
std::int64_t SourceBytesHeld(const Model& model, const ModelTotals& totals);

// `free` is the bytes of the budget that hold nothing. `model` need not be the one that `totals`
// are of: so the same sequences are asked about in another format, whose stored figures mean
// nothing.
ModelCapacity CapacityOf(const Model& model, const ModelTotals& totals, std::int64_t free);

}  // namespace kvtier::cachestore
