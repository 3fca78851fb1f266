#include "cachestore/model_registry.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cachestore/base/errors.h"

namespace kvtier::cachestore {

ModelTotals& ModelTotals::operator+=(const ModelTotals& other) {
  open_sequences += other.open_sequences;
  sealed_sequences += other.sealed_sequences;
  sequence_tokens += other.sequence_tokens;
  tokens_held += other.tokens_held;
  behind_windows_bytes += other.behind_windows_bytes;
  appended_tokens += other.appended_tokens;
  appended_bytes += other.appended_bytes;
  read_tokens += other.read_tokens;
  read_bytes += other.read_bytes;
  saturated_values += other.saturated_values;
  return *this;
}

void ModelEntry::Add(const ModelTotals& delta) {
  MutexLock lock(&mutex_);
  totals_ += delta;
}

ModelTotals ModelEntry::totals() const {
  MutexLock lock(&mutex_);
  ModelTotals totals = totals_;
  totals.held = memory_.held();
  return totals;
}

void ModelEntry::Observe(const std::vector<HeadObservation>& observations) {
  MutexLock lock(&mutex_);
  if (observed_.empty()) {
    for (const LayerModel& layer : model_->layers)
      observed_.emplace_back(static_cast<std::size_t>(layer.spec.kv_heads));
  }
  for (const HeadObservation& observation : observations) {
    HeadMagnitudes& head = observed_[static_cast<std::size_t>(observation.layer)]
                                    [static_cast<std::size_t>(observation.head)];
    head.k = std::max(head.k, observation.magnitudes.k);
    head.v = std::max(head.v, observation.magnitudes.v);
    head.tokens += observation.magnitudes.tokens;
  }
}

std::vector<std::vector<HeadMagnitudes>> ModelEntry::observed() const {
  MutexLock lock(&mutex_);
  return observed_;
}

absl::StatusOr<std::shared_ptr<ModelEntry>> ModelRegistry::Add(std::shared_ptr<const Model> model,
                                                               Rungs rungs) {
  MutexLock lock(&mutex_);
  if (const auto found = entries_.find(model->id); found != entries_.end()) return found->second;
  if (static_cast<int>(entries_.size()) >= max_models_) {
    return Error(Reason::kTooManyModels,
                 fmt::format("{} models are registered; the limit (max_models) is {}",
                             entries_.size(), max_models_));
  }
  const std::string id = model->id;
  return entries_.emplace(id, std::make_shared<ModelEntry>(std::move(model), std::move(rungs)))
      .first->second;
}

absl::StatusOr<std::shared_ptr<ModelEntry>> ModelRegistry::Find(const std::string& id) const {
  MutexLock lock(&mutex_);
  if (const auto found = entries_.find(id); found != entries_.end()) return found->second;
  return Error(
      Reason::kUnknownModel,
      fmt::format("model_id \"{:.64}\" is not registered here; call RegisterModel first", id));
}

std::vector<std::shared_ptr<ModelEntry>> ModelRegistry::All() const {
  MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<ModelEntry>> all;
  for (const auto& [id, entry] : entries_) all.push_back(entry);
  return all;
}

}  // namespace kvtier::cachestore
