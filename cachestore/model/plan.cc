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

MemoryHeld PlanTensor(const TensorModel& tensor, std::int64_t tokens) {
  MemoryHeld held;
  if (tensor.dim() == 0 || tokens == 0) return held;
  const PartLayout& layout = tensor.layout;
  const std::int64_t codes = tensor.residual.CodeTokens(tokens);
  const std::int64_t pages = (codes + layout.page_tokens - 1) / layout.page_tokens;
  const std::int64_t units = codes / layout.unit_tokens * layout.heads;
  held.use = {.codes = units * layout.unit.codes,
              .scales = units * layout.unit.scales,
              .residual = (tokens - codes) * layout.heads * tensor.source_row_bytes(),
              .header = pages * layout.header_use()};
  held.allocated = pages * layout.bytes + tensor.residual_slot_bytes();
  return held;
}

// Sums f over every K and V.
template <class F>
auto SumTensors(const Model& model, F f) {
  decltype(f(model.layers[0].k)) sum{};
  for (const LayerModel& layer : model.layers) {
    sum += f(layer.k);
    sum += f(layer.v);
  }
  return sum;
}

}  // namespace

MemoryHeld PlanSequence(const Model& model, std::int64_t tokens) {
  return SumTensors(model, [&](const TensorModel& tensor) { return PlanTensor(tensor, tokens); });
}

MemoryHeld PlanSealed(const Model& model, std::int64_t tokens) {
  return SumTensors(model, [&](const TensorModel& tensor) {
    MemoryHeld held = PlanTensor(tensor, tokens);
    if (tokens > 0 && held.use.residual == 0) held.allocated -= tensor.residual_slot_bytes();
    return held;
  });
}

std::int64_t TokensThatFit(const Model& model, std::int64_t free) {
  const auto fits = [&](std::int64_t tokens) {
    return PlanSequence(model, tokens).allocated <= free;
  };
  std::int64_t low = 0;
  std::int64_t high = 1;
  while (fits(high)) high *= 2;
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

std::int64_t SequencesThatFit(const Model& model, std::int64_t tokens, std::int64_t free) {
  const std::int64_t each = PlanSequence(model, tokens).allocated;
  return each > 0 && free > 0 ? free / each : 0;
}

double CompressionRatio(const Model& model, std::int64_t tokens) {
  const std::int64_t stored = PlanSealed(model, tokens).allocated;
  return stored == 0
             ? 0.0
             : static_cast<double>(tokens) * static_cast<double>(model.source_bytes_per_token) /
                   static_cast<double>(stored);
}

CapacityFigures PlanCapacity(const Model& model, std::int64_t budget, std::int64_t max_tokens) {
  if (max_tokens == 0) max_tokens = model.max_tokens;
  CapacityFigures figures;
  figures.concurrency =
      static_cast<double>(budget) / static_cast<double>(PlanSequence(model, max_tokens).allocated);
  figures.tokens = static_cast<std::int64_t>(figures.concurrency * static_cast<double>(max_tokens));
  figures.line = fmt::format(
      "KV cache size: {} tokens, Maximum concurrency for {} tokens per request: {:.2f}x",
      WithCommas(figures.tokens), WithCommas(max_tokens), figures.concurrency);
  return figures;
}

std::int64_t OnePageOfEveryLayer(const Model& model) {
  return SumTensors(model, [](const TensorModel& tensor) {
    return tensor.dim() == 0 ? std::int64_t{0} : tensor.layout.bytes + tensor.residual_slot_bytes();
  });
}

}  // namespace kvtier::cachestore
