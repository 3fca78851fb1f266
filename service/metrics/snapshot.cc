#include "service/metrics/snapshot.h"

#include <algorithm>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "cachestore/capacity.h"
#include "cachestore/store.h"

namespace kvtier::service {
namespace {

std::string ModelLabel(const cachestore::ModelSpec& spec) {
  return spec.revision.empty() ? spec.name : spec.name + "@" + spec.revision;
}

void Add(const cachestore::Model& model, const cachestore::ModelTotals& totals, std::int64_t free,
         ModelFigures& figures) {
  const cachestore::ModelCapacity capacity = CapacityOf(model, totals, free);
  const bool first = figures.layers == 0;
  const auto least = [&](std::int64_t& held, std::int64_t other) {
    held = first ? other : std::min(held, other);
  };
  least(figures.tokens_as_one_sequence, capacity.more_tokens);
  least(figures.tokens_as_mean_sequences, capacity.more_tokens_as_mean_sequences());

  figures.tokens_held += totals.tokens_held;
  figures.source_bytes += capacity.source_bytes;
  figures.stored_bytes += capacity.stored_bytes;
  figures.open_sequences += totals.open_sequences;
  figures.sealed_sequences += totals.sealed_sequences;
  figures.layers += static_cast<std::int64_t>(model.layers.size());
  figures.unit_scale_layers += model.unit_scale_layers;
  figures.append_bytes += totals.appended_bytes;
  figures.append_tokens += totals.appended_tokens;
  figures.read_bytes += totals.read_bytes;
  figures.read_tokens += totals.read_tokens;
  figures.saturated_values += totals.saturated_values;
}

double RangeUsed(const cachestore::TensorModel& tensor, std::size_t head, float amax) {
  const kernels::Codec& codec = tensor.layout.codec;
  if (codec.id != kernels::CodecId::kFp8) return 0;
  return amax / (double{kernels::LargestFp8(codec.element)} * tensor.scales[head]);
}

void AddRanges(const cachestore::ModelEntry& entry, ModelFigures& figures) {
  const cachestore::Model& model = entry.model();
  if (model.scaled_layers == 0) return;
  const auto observed = entry.observed();
  for (std::size_t layer = 0; layer < observed.size(); ++layer) {
    const cachestore::LayerModel& tensors = model.layers[layer];
    for (std::size_t head = 0; head < observed[layer].size(); ++head) {
      const cachestore::HeadMagnitudes& largest = observed[layer][head];
      figures.k_range_used = std::max(figures.k_range_used, RangeUsed(tensors.k, head, largest.k));
      figures.v_range_used = std::max(figures.v_range_used, RangeUsed(tensors.v, head, largest.v));
    }
  }
}

}  // namespace

Snapshot TakeSnapshot(const cachestore::Store& store) {
  Snapshot snapshot;
  snapshot.budget = store.budget();
  snapshot.memory = store.memory();
  snapshot.leases = store.leases();
  snapshot.pins = store.pins();
  snapshot.subscriptions = store.subscriptions();
  snapshot.evictions = store.evictions();
  snapshot.lowered = store.lowered();
  snapshot.process = ReadProcessFigures();

  std::map<std::pair<std::string, std::string>, ModelFigures> models;
  for (const std::shared_ptr<cachestore::ModelEntry>& entry : store.Models()) {
    const cachestore::Model& model = entry->model();
    ModelFigures& figures = models[{ModelLabel(model.request.spec), model.format}];
    Add(model, entry->totals(), snapshot.memory.free, figures);
    AddRanges(*entry, figures);
  }
  for (auto& [name, figures] : models) {
    std::tie(figures.model, figures.format) = name;
    snapshot.models.push_back(std::move(figures));
  }
  return snapshot;
}

}  // namespace kvtier::service
