#include "cachestore/model/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

namespace kvtier::cachestore {
namespace {

// "1234567" as "1,234,567".
std::string WithCommas(std::int64_t n) {
  std::string digits = std::to_string(n);
  for (int i = static_cast<int>(digits.size()) - 3; i > 0; i -= 3)
    digits.insert(static_cast<std::size_t>(i), ",");
  return digits;
}

std::int64_t PagesOf(std::int64_t tokens, int page_tokens) {
  return (tokens + page_tokens - 1) / page_tokens;
}

// Of `tokens` tokens those from `first` on, whose page is the first there is.
MemoryHeld PlanTensor(const TensorModel& tensor, std::int64_t tokens, std::int64_t first) {
  MemoryHeld held;
  if (tensor.dim() == 0 || tokens == 0) return held;
  const PartLayout& layout = tensor.layout;
  const std::int64_t end = std::max(first, tensor.residual.CodeTokens(tokens));
  const std::int64_t codes = end - first;
  const std::int64_t pages = PagesOf(end, layout.page_tokens) - first / layout.page_tokens;
  const auto of_codes = [&](std::int64_t unit_bytes) {
    return codes / layout.unit_tokens * layout.heads * unit_bytes +
           codes % layout.unit_tokens * layout.heads * unit_bytes / layout.unit_tokens;
  };
  held.use = {.codes = of_codes(layout.unit.codes),
              .scales = of_codes(layout.unit.scales),
              .residual = (tokens - end) * layout.heads * tensor.source_row_bytes(),
              .header = pages * layout.header_use()};
  held.allocated = pages * layout.bytes + tensor.residual_slot_bytes();
  return held;
}

// Sums f(tensor, tokens, first) over every K and V; `first(layer)` is where a layer's tokens begin.
template <class First, class F>
auto SumTensors(const Model& model, std::int64_t tokens, First first, F f) {
  decltype(f(model.layers[0].k, tokens, tokens)) sum{};
  for (const LayerModel& layer : model.layers) {
    for (const TensorModel* tensor : {&layer.k, &layer.v}) sum += f(*tensor, tokens, first(layer));
  }
  return sum;
}

// Pages that are codes to their end in every layer: only of these is anything let go.
std::int64_t FinalPages(const Model& model, std::int64_t tokens) {
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (const LayerModel& layer : model.layers) {
    for (const TensorModel* tensor : {&layer.k, &layer.v}) {
      if (tensor->dim() == 0) continue;
      least = std::min(least, tensor->residual.CodeTokens(tokens) / model.page_tokens);
    }
  }
  return least;
}

// Where a layer begins, in pages.
auto FirstKept(const Model& model, std::int64_t tokens) {
  const std::int64_t final = model.windows.empty() ? 0 : FinalPages(model, tokens);
  return [&model, tokens, final](const LayerModel& layer) -> std::int64_t {
    if (layer.window_index < 0) return 0;
    const Window& window = model.windows[static_cast<std::size_t>(layer.window_index)];
    return window.FirstKeptPage(tokens, final, model.page_tokens) * model.page_tokens;
  };
}

// To the token.
auto FirstSeen(std::int64_t tokens) {
  return [tokens](const LayerModel& layer) {
    return layer.window_index < 0 ? 0 : std::max<std::int64_t>(0, tokens - layer.spec.window);
  };
}

}  // namespace

MemoryHeld PlanSequence(const Model& model, std::int64_t tokens) {
  return SumTensors(model, tokens, FirstKept(model, tokens), PlanTensor);
}

MemoryHeld PlanSealed(const Model& model, std::int64_t tokens) {
  return SumTensors(model, tokens, FirstKept(model, tokens),
                    [](const TensorModel& tensor, std::int64_t length, std::int64_t first) {
                      MemoryHeld held = PlanTensor(tensor, length, first);
                      if (length > 0 && held.use.residual == 0)
                        held.allocated -= tensor.residual_slot_bytes();
                      return held;
                    });
}

std::int64_t PlanMostAllocated(const Model& model, std::int64_t tokens) {
  std::int64_t most = PlanSequence(model, tokens).allocated;
  if (model.windows.empty()) return most;
  std::set<std::pair<int, int>> takes;  // of each rule: after how many tokens, and again after each
  for (const LayerModel& layer : model.layers) {
    for (const TensorModel* tensor : {&layer.k, &layer.v}) {
      const ResidualRule& rule = tensor->residual;
      if (tensor->dim() == 0) continue;
      takes.insert(rule.block > 1 ? std::pair(rule.block, rule.block)
                                  : std::pair(rule.window + 1, model.page_tokens));
    }
  }
  // Most is held when pages were just taken and nothing let go yet. What was held earlier, in the
  // same phase of pages and residuals, was less.
  constexpr std::int64_t kTakes = 16;
  for (const auto& [first, step] : takes) {
    if (tokens < first) continue;
    const std::int64_t last = first + (tokens - first) / step * step;
    for (std::int64_t length = last; length >= std::max<std::int64_t>(first, last - kTakes * step);
         length -= step) {
      const MemoryHeld held = SumTensors(model, length, FirstKept(model, length - 1), PlanTensor);
      most = std::max(most, held.allocated);
    }
  }
  return most;
}

std::int64_t SourceBytes(const Model& model, std::int64_t tokens) {
  if (model.windows.empty()) return tokens * model.source_bytes_per_token;
  return SumTensors(model, tokens, FirstSeen(tokens),
                    [](const TensorModel& tensor, std::int64_t length, std::int64_t first) {
                      return (length - first) * tensor.heads() * tensor.source_row_bytes();
                    });
}

std::int64_t UnpagedBytes(const Model& model, std::int64_t tokens) {
  const MemoryUse use = SumTensors(model, tokens, FirstSeen(tokens), PlanTensor).use;
  return use.total() - use.header;
}

std::int64_t TokensThatFit(const Model& model, std::int64_t free) {
  const auto fits = [&](std::int64_t tokens) { return PlanMostAllocated(model, tokens) <= free; };
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

std::int64_t SequencesThatFit(const Model& model, std::int64_t tokens, std::int64_t free) {
  const std::int64_t each = PlanSequence(model, tokens).allocated;
  return each > 0 && free > 0 ? free / each : 0;
}

double CompressionRatio(const Model& model, std::int64_t tokens) {
  const std::int64_t stored = PlanSealed(model, tokens).allocated;
  return stored == 0
             ? 0.0
             : static_cast<double>(SourceBytes(model, tokens)) / static_cast<double>(stored);
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
  return SumTensors(
      model, 1, [](const LayerModel&) { return std::int64_t{0}; },
      [](const TensorModel& tensor, std::int64_t, std::int64_t) {
        return tensor.dim() == 0 ? std::int64_t{0}
                                 : tensor.layout.bytes + tensor.residual_slot_bytes();
      });
}

}  // namespace kvtier::cachestore
