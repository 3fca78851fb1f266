#include "cachestore/model/plan_curve.h"

#include <algorithm>
#include <numeric>

namespace kvtier::cachestore {
namespace {

constexpr std::int64_t kMostPhases = 4096;

// After how many tokens pages and residuals of all layers are in the same phase again.
std::int64_t PeriodOf(const Model& model) {
  std::int64_t period = model.page_tokens;
  for (const LayerModel& layer : model.layers) {
    period =
        std::lcm(period, std::lcm<std::int64_t>(layer.k.residual.block, layer.v.residual.block));
  }
  return period;
}

double Ratio(double source, double stored) { return stored == 0 ? 0.0 : source / stored; }

}  // namespace

Phases PhasesFrom(const Model& model, std::int64_t tokens) {
  Phases phases{.period = PeriodOf(model)};
  // Odd, so that it meets every phase of periods that are powers of two.
  const std::int64_t step = phases.period > kMostPhases ? phases.period / kMostPhases | 1 : 1;
  double sum = 0;
  std::int64_t seen = 0;
  for (std::int64_t length = tokens; length < tokens + phases.period; length += step, ++seen) {
    const double ratio = CompressionRatio(model, length);
    sum += ratio;
    phases.least_ratio = seen == 0 ? ratio : std::min(phases.least_ratio, ratio);
    phases.most_ratio = std::max(phases.most_ratio, ratio);
    phases.most_residual = std::max(phases.most_residual, PlanSequence(model, length).use.residual);
  }
  phases.mean_ratio = sum / static_cast<double>(seen);
  return phases;
}

Asymptote AsymptoteOf(const Model& model) {
  double source = 0, stored = 0, unpaged = 0;
  for (const LayerModel& layer : model.layers) {
    if (layer.window_index >= 0) continue;
    for (const TensorModel* tensor : {&layer.k, &layer.v}) {
      if (tensor->dim() == 0) continue;
      const PartLayout& layout = tensor->layout;
      source += static_cast<double>(tensor->heads() * tensor->source_row_bytes());
      stored += static_cast<double>(layout.bytes) / layout.page_tokens;
      unpaged += static_cast<double>(layout.unit.total() * layout.heads) / layout.unit_tokens;
    }
  }
  if (source > 0) return {stored, Ratio(source, stored), Ratio(source, unpaged)};
  const auto bounded = static_cast<double>(SourceBytes(model, kAnyTokens));
  return {.bytes_per_token = 0,
          .compression_ratio = CompressionRatio(model, kAnyTokens),
          .unpaged_ratio = Ratio(bounded, static_cast<double>(UnpagedBytes(model, kAnyTokens)))};
}

}  // namespace kvtier::cachestore
