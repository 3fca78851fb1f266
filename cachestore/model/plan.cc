#include "cachestore/model/plan.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvtier::cachestore {
namespace {

// "1234567" as "1,234,567".
std::string WithCommas(std::int64_t n) {
  std::string digits = std::to_string(n);
  for (int i = static_cast<int>(digits.size()) - 3; i > 0; i -= 3)
    digits.insert(static_cast<std::size_t>(i), ",");
  return digits;
}

// Of `tokens` tokens the newest `kept`. The residual counts from the sequence's first token; a
// group that a window cuts is kept whole.
MemoryHeld PlanTensor(const TensorModel& tensor, std::int64_t tokens, std::int64_t kept) {
  MemoryHeld held;
  if (tensor.dim() == 0 || tokens == 0) return held;
  const PartLayout& layout = tensor.layout;
  const std::int64_t residual = std::min(kept, tensor.residual.ResidualTokens(tokens));
  const std::int64_t codes = kept - residual;
  const std::int64_t pages = (codes + layout.page_tokens - 1) / layout.page_tokens;
  const auto of_codes = [&](std::int64_t unit_bytes) {
    return codes / layout.unit_tokens * layout.heads * unit_bytes +
           codes % layout.unit_tokens * layout.heads * unit_bytes / layout.unit_tokens;
  };
  held.use = {.codes = of_codes(layout.unit.codes),
              .scales = of_codes(layout.unit.scales),
              .residual = residual * layout.heads * tensor.source_row_bytes(),
              .header = pages * layout.header_use()};
  held.allocated = pages * layout.bytes + tensor.residual_slot_bytes();
  return held;
}

// Sums f(tensor, tokens, tokens kept) over every K and V.
template <class F>
auto SumTensors(const Model& model, std::int64_t tokens, Retention retention, F f) {
  decltype(f(model.layers[0].k, tokens, tokens)) sum{};
  for (const LayerModel& layer : model.layers) {
    const bool windowed =
        retention == Retention::kWindow && layer.spec.kind == LayerKind::kSlidingWindow;
    const std::int64_t kept = windowed ? std::min<std::int64_t>(tokens, layer.spec.window) : tokens;
    sum += f(layer.k, tokens, kept);
    sum += f(layer.v, tokens, kept);
  }
  return sum;
}

}  // namespace

MemoryHeld PlanSequence(const Model& model, std::int64_t tokens, Retention retention) {
  return SumTensors(model, tokens, retention, PlanTensor);
}

MemoryHeld PlanSealed(const Model& model, std::int64_t tokens, Retention retention) {
  return SumTensors(model, tokens, retention,
                    [](const TensorModel& tensor, std::int64_t length, std::int64_t kept) {
                      MemoryHeld held = PlanTensor(tensor, length, kept);
                      if (length > 0 && held.use.residual == 0)
                        held.allocated -= tensor.residual_slot_bytes();
                      return held;
                    });
}

std::int64_t SourceBytes(const Model& model, std::int64_t tokens, Retention retention) {
  return SumTensors(model, tokens, retention,
                    [](const TensorModel& tensor, std::int64_t, std::int64_t kept) {
                      return kept * tensor.heads() * tensor.source_row_bytes();
                    });
}

std::int64_t TokensThatFit(const Model& model, std::int64_t free, Retention retention) {
  const auto fits = [&](std::int64_t tokens) {
    return PlanSequence(model, tokens, retention).allocated <= free;
  };
  std::int64_t low = 0;
  std::int64_t high = 1;
  while (high < kAnyTokens && fits(high)) high *= 2;
  if (high == kAnyTokens && fits(high)) return kAnyTokens;
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

std::int64_t SequencesThatFit(const Model& model, std::int64_t tokens, std::int64_t free,
                              Retention retention) {
  const std::int64_t each = PlanSequence(model, tokens, retention).allocated;
  return each > 0 && free > 0 ? free / each : 0;
}

double CompressionRatio(const Model& model, std::int64_t tokens, Retention retention) {
  const std::int64_t stored = PlanSealed(model, tokens, retention).allocated;
  return stored == 0 ? 0.0
                     : static_cast<double>(SourceBytes(model, tokens, retention)) /
                           static_cast<double>(stored);
}

CapacityFigures PlanCapacity(const Model& model, std::int64_t budget, std::int64_t max_tokens,
                             Retention retention) {
  if (max_tokens == 0) max_tokens = model.max_tokens;
  CapacityFigures figures;
  figures.concurrency = static_cast<double>(budget) /
                        static_cast<double>(PlanSequence(model, max_tokens, retention).allocated);
  figures.tokens = static_cast<std::int64_t>(figures.concurrency * static_cast<double>(max_tokens));
  figures.line = fmt::format(
      "KV cache size: {} tokens, Maximum concurrency for {} tokens per request: {:.2f}x",
      WithCommas(figures.tokens), WithCommas(max_tokens), figures.concurrency);
  return figures;
}

std::int64_t OnePageOfEveryLayer(const Model& model) {
  return SumTensors(model, 1, Retention::kAll,
                    [](const TensorModel& tensor, std::int64_t, std::int64_t) {
                      return tensor.dim() == 0 ? std::int64_t{0}
                                               : tensor.layout.bytes + tensor.residual_slot_bytes();
                    });
}

}  // namespace kvtier::cachestore
