#include "cachestore/capacity.h"

#include <algorithm>

#include "cachestore/model/plan.h"

namespace kvtier::cachestore {
namespace {

// Sequences that have no committed token yet count as well: they are on their way to some.
std::int64_t MeanTokens(const Model& model, const ModelTotals& totals) {
  if (totals.sequence_tokens == 0 || totals.sequences() == 0) return model.max_tokens;
  return std::max<std::int64_t>(1, totals.sequence_tokens / totals.sequences());
}

double Ratio(std::int64_t numerator, std::int64_t denominator) {
  return denominator == 0 ? 0.0 : static_cast<double>(numerator) / static_cast<double>(denominator);
}

}  // namespace

std::int64_t SourceBytesHeld(const Model& model, const ModelTotals& totals) {
  return totals.tokens_held * model.source_bytes_per_token - totals.behind_windows_bytes;
}

ModelCapacity CapacityOf(const Model& model, const ModelTotals& totals, std::int64_t free) {
  ModelCapacity capacity;
  capacity.source_bytes = SourceBytesHeld(model, totals);
  capacity.stored_bytes = totals.held.allocated;
  capacity.compression_ratio = Ratio(capacity.source_bytes, capacity.stored_bytes);
  capacity.mean_tokens = MeanTokens(model, totals);
  capacity.more_tokens = TokensThatFit(model, free);
  capacity.more_sequences = SequencesThatFit(model, capacity.mean_tokens, free);
  capacity.bytes_per_token = Ratio(PlanSealed(model, model.max_tokens).allocated, model.max_tokens);
  capacity.planned_compression_ratio = CompressionRatio(model, model.max_tokens);
  return capacity;
}

}  // namespace kvtier::cachestore
