#include "cachestore/column.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cachestore/base/check.h"

namespace kvtier::cachestore {
namespace {

// The last key stands for all tokens so far, and is as good as random.
std::uint64_t ContentOf(const HashBlocks& blocks) {
  std::uint64_t content = 0;
  if (blocks.size() > 0) std::memcpy(&content, blocks.keys.back().data(), sizeof content);
  return content;
}

// A column whose `before` is the last hold on the column before it would end one call deeper, for
// each page of a prefix: here they end one after the other.
void LetGo(std::shared_ptr<const Column> column) {
  thread_local std::vector<std::shared_ptr<const Column>>* waiting = nullptr;
  if (waiting != nullptr) return waiting->push_back(std::move(column));
  std::vector<std::shared_ptr<const Column>> columns = {std::move(column)};
  waiting = &columns;
  while (!columns.empty()) {
    const std::shared_ptr<const Column> next = std::move(columns.back());
    columns.pop_back();
  }
  waiting = nullptr;
}

MemoryHeld HeldOf(const std::vector<Column::Layer>& layers) {
  MemoryHeld held;
  for (const Column::Layer& layer : layers) {
    for (const auto& part : {layer.k, layer.v})
      if (part != nullptr) held += part->held();
  }
  return held;
}

}  // namespace

std::shared_ptr<Column> Column::Make(std::shared_ptr<const Column> before, Content content,
                                     const Owner& owner, const SequenceHome& home,
                                     EvictionNode& end) {
  auto column =
      std::make_shared<Column>(OfMake(), std::move(before), std::move(content), owner, home);
  home.evictor.AddColumn(column->node_, end);
  owner.name_space->index.Add(AllOf(column->blocks_), column.get());
  return column;
}

Column::Column(OfMake, std::shared_ptr<const Column> before, Content content, const Owner& owner,
               const SequenceHome& home)
    : before_(std::move(before)),
      page_(before_ == nullptr ? 0 : before_->page_ + 1),
      blocks_(std::move(content.blocks)),
      owner_(owner),
      evictor_(home.evictor),
      node_(owner.node_place(), this, ContentOf(*blocks_)),
      layers_(std::move(content.layers)) {
  MutexLock lock(&mutex_);
  held_ = HeldOf(layers_);
  keepers_.assign(owner_.model->model().windows.size(), 1);
  for (const Layer& layer : layers_) {
    for (const auto& part : {layer.k, layer.v})
      if (part != nullptr) saturated_ += part->saturated_values();
  }
  owner_.model->Add({.tokens_held = owner_.model->model().page_tokens});
}

Column::~Column() {
  owner_.name_space->index.Remove(AllOf(blocks_), this);
  evictor_.Remove(node_);
  {
    MutexLock lock(&mutex_);
    owner_.model->Add({.tokens_held = -owner_.model->model().page_tokens,
                       .behind_windows_bytes = -behind_windows_bytes_});
  }
  LetGo(std::move(before_));
}

void Column::Swap(std::vector<Layer>& layers) const {
  MutexLock lock(&mutex_);
  for (std::size_t i = 0; i < layers.size(); ++i)
    if (layers_[i].k == nullptr) layers[i] = {};
  layers_.swap(layers);
  held_ = HeldOf(layers_);
}

bool Column::KeepWindow(std::size_t window) const {
  MutexLock lock(&mutex_);
  if (keepers_[window] == 0) return false;
  ++keepers_[window];
  return true;
}

void Column::LeaveWindow(std::size_t window) const {
  if (!LetGoOfWindow(window).empty()) owner_.name_space->index.NoLongerHit(AllOf(blocks_), this);
}

std::vector<Column::Layer> Column::LetGoOfWindow(std::size_t window) const {
  const Model& model = owner_.model->model();
  std::vector<Layer> gone;
  MutexLock lock(&mutex_);
  if (--keepers_[window] > 0) return gone;
  std::int64_t bytes = 0;
  for (const std::size_t layer : model.windows[window].layers) {
    gone.push_back(std::exchange(layers_[layer], {}));
    bytes += model.page_tokens * model.layers[layer].source_bytes();
  }
  held_ -= HeldOf(gone);
  behind_windows_bytes_ += bytes;
  owner_.model->Add({.behind_windows_bytes = bytes});
  return gone;
}

bool HitSearch::Hits(const Column& column, std::int64_t tokens) {
  const Model& model = column.owner().model->model();
  if (model.windows.empty()) return true;
  std::vector<std::int64_t> first;  // page, of each window
  for (const Window& window : model.windows)
    first.push_back(window.FirstSeenPage(tokens, model.page_tokens));
  const auto has_all = [&](const Column& seen) {
    for (std::size_t i = 0; i < first.size(); ++i)
      if (seen.page() >= first[i] && !seen.HasWindow(i)) return false;
    return !missed_.contains(&seen);
  };
  const std::int64_t end = *std::min_element(first.begin(), first.end());
  std::vector<const Column*> looked_at;
  for (const Column* at = &column; at != nullptr && at->page() >= end; at = at->before().get()) {
    if (at->page() * model.page_tokens >= tokens) continue;
    looked_at.push_back(at);
    if (has_all(*at)) continue;
    missed_.insert(looked_at.begin(), looked_at.end());
    return false;
  }
  return true;
}

std::int64_t Column::end_token() const { return (page_ + 1) * owner_.model->model().page_tokens; }

Path::Path(std::shared_ptr<const Column> last) : last_(std::move(last)) {
  if (last_ != nullptr) columns_.resize(static_cast<std::size_t>(last_->page() + 1));
  for (const Column* at = last_.get(); at != nullptr; at = at->before().get())
    columns_[static_cast<std::size_t>(at->page())] = at;
}

void Path::Add(std::shared_ptr<const Column> column) {
  KVT_CHECK(column->before() == last_);
  columns_.push_back(column.get());
  last_ = std::move(column);
}

void Path::CutTo(std::int64_t pages) {
  if (pages >= this->pages()) return;
  columns_.resize(static_cast<std::size_t>(pages));
  last_ = columns_.empty() ? nullptr : columns_.back()->shared_from_this();
}

MemoryHeld Path::held() const {
  MemoryHeld held;
  for (const auto& column : columns_) held += column->held();
  return held;
}

std::int64_t Path::saturated_values() const {
  std::int64_t saturated = 0;
  for (const auto& column : columns_) saturated += column->saturated_values();
  return saturated;
}

}  // namespace kvtier::cachestore
