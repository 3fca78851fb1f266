// How a store makes room without losing tokens: pages that nobody uses are stored in fewer bits.

#include <algorithm>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/requantize.h"
#include "cachestore/store.h"

namespace kvtier::cachestore {
namespace {

bool Shrinks(const std::shared_ptr<const Part>& part, const TensorModel& tensor) {
  return part != nullptr && tensor.layout.bytes < part->bytes();
}

std::vector<std::int64_t> PartSizes(const Model& model) {
  std::vector<std::int64_t> sizes;
  for (const LayerModel& layer : model.layers) {
    for (const TensorModel* tensor : {&layer.k, &layer.v})
      if (tensor->dim() > 0) sizes.push_back(tensor->layout.bytes);
  }
  return sizes;
}

const Model& RungOf(const Evictor::Lowering& lowering) {
  return *lowering.column->owner().model->rungs()[static_cast<std::size_t>(lowering.rung - 1)];
}

}  // namespace

absl::Status Store::SetPressure(const std::string& name_space, Pressure pressure) {
  KVT_RETURN_IF_ERROR(namespaces_.SetPressure(name_space, pressure, [&](Namespace& changed) {
    evictor_.SetLowers(changed.candidates, pressure == Pressure::kLadder);
  }));
  KeepHeadroom();
  return absl::OkStatus();
}

bool Store::LowerOne(Namespace* of) {
  if (namespaces_.ladders() == 0) return false;
  // One at a time: two that took steps of one column would undo each other's.
  MutexLock lock(&lower_mutex_);
  KeepHeadroom();
  for (int lost_races = 0; lost_races < 4;) {
    // Outlives the column: those before it may have nobody else by then, and would end a call
    // deeper for each.
    Path path;
    const auto next = evictor_.NextToLower(of == nullptr ? nullptr : &of->candidates);
    if (!next.has_value()) return false;
    path = Path(next->column);
    absl::StatusOr<Lowered> lowered = Lower(*next->column, RungOf(*next));
    if (lowered.ok() && lowered->made.empty()) continue;  // it takes no step here
    const bool swapped =
        lowered.ok() && evictor_.IfUnused(*next, [&] { next->column->Swap(lowered->layers); });
    if (swapped) {
      for (const auto& part : lowered->made) part->GiveTo(next->column->owner().memory());
      lowered_.Add(RungOf(*next).format, 1);
      lowered->layers.clear();
      KeepHeadroom();
      return true;
    }
    evictor_.TakeBack(*next);
    if (!lowered.ok()) return false;
    ++lost_races;  // somebody uses it by now, and it stays as it is
  }
  return false;
}

bool Store::LowerFor(Namespace* of, std::int64_t bytes) {
  bool any = false;
  do {
    if (!LowerOne(of)) return any;
    any = true;
  } while (Left(of) < bytes);
  return any;
}

absl::StatusOr<Store::Lowered> Store::Lower(const Column& column, const Model& rung) {
  struct Job {
    std::shared_ptr<const Part>* part;
    const TensorModel* to;
  };
  Lowered lowered;
  for (std::size_t i = 0; i < rung.layers.size(); ++i) lowered.layers.push_back(column.layer(i));
  std::vector<Job> jobs;
  for (std::size_t i = 0; i < rung.layers.size(); ++i) {
    const LayerModel& to = rung.layers[i];
    if (Shrinks(lowered.layers[i].k, to.k)) jobs.push_back({&lowered.layers[i].k, &to.k});
    if (Shrinks(lowered.layers[i].v, to.v)) jobs.push_back({&lowered.layers[i].v, &to.v});
  }
  // All that it takes is there before any of the old parts goes: these lie side by side mostly, and
  // leave one large hole where small parts in their midst would leave many.
  std::vector<std::int64_t> sizes;
  sizes.reserve(jobs.size());
  for (const Job& job : jobs) sizes.push_back(job.to->layout.bytes);
  KVT_ASSIGN_OR_RETURN(std::vector<Allocation> memory, TakeForLowering(sizes));
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    KVT_ASSIGN_OR_RETURN(std::shared_ptr<Part> smaller,
                         Requantize(**jobs[i].part, *jobs[i].to, std::move(memory[i]), device_));
    if (smaller == nullptr) continue;
    lowered.made.push_back(smaller);
    *jobs[i].part = std::move(smaller);
  }
  return lowered;
}

absl::StatusOr<std::vector<Allocation>> Store::TakeForLowering(
    absl::Span<const std::int64_t> sizes) {
  const auto take = [&] {
    std::vector<Allocation> memory;
    for (const std::int64_t bytes : sizes) {
      memory.push_back(arena_.AllocateLow(bytes));
      if (!memory.back()) return std::vector<Allocation>();
    }
    return memory;
  };
  std::vector<Allocation> memory = take();
  if (memory.size() < sizes.size()) {
    DropHeadroom();
    memory = take();
  }
  if (memory.size() == sizes.size()) return memory;
  return Error(Reason::kBudget, "there is no room to store a page column in fewer bits");
}

void Store::KeepHeadroom() {
  std::vector<std::shared_ptr<ModelEntry>> models;
  if (namespaces_.ladders() > 0) models = models_.All();
  const Model* largest = nullptr;  // of what a first step makes
  for (const std::shared_ptr<ModelEntry>& model : models) {
    if (model->rungs().empty()) continue;
    const Model& first = *model->rungs().front();
    if (largest == nullptr || ColumnBytes(first) > ColumnBytes(*largest)) largest = &first;
  }
  // Piece by piece, as the parts are: of what a step lets go there may be no larger one.
  const auto sizes = largest == nullptr ? std::vector<std::int64_t>() : PartSizes(*largest);
  MutexLock lock(&headroom_mutex_);
  if (headroom_.size() > sizes.size() ||
      !std::equal(headroom_.begin(), headroom_.end(), sizes.begin(),
                  [](const Allocation& piece, std::int64_t size) { return piece.size() == size; }))
    headroom_.clear();
  while (headroom_.size() < sizes.size()) {
    Allocation piece = arena_.AllocateLow(sizes[headroom_.size()]);
    if (!piece) return;
    headroom_.push_back(std::move(piece));
  }
}

bool Store::DropHeadroom() {
  MutexLock lock(&headroom_mutex_);
  const bool had = !headroom_.empty();
  headroom_.clear();
  return had;
}

MemoryParts Store::memory() const {
  MutexLock lock(&headroom_mutex_);
  MemoryParts parts = arena_.Snapshot();
  for (const Allocation& piece : headroom_) {
    parts.slack -= piece.size();
    parts.staging += piece.size();
  }
  return parts;
}

}  // namespace kvtier::cachestore
