#include "cachestore/column.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvtier::cachestore {
namespace {

// The last key stands for all tokens so far, and is as good as random.
std::uint64_t ContentOf(const HashBlocks& blocks) {
  std::uint64_t content = 0;
  if (blocks.size() > 0) std::memcpy(&content, blocks.keys.back().data(), sizeof content);
  return content;
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
  std::shared_ptr<Column> column(new Column(std::move(before), std::move(content), owner, home));
  home.evictor.AddColumn(column->node_, end);
  owner.name_space->index.Add(AllOf(column->blocks_), column.get());
  return column;
}

Column::Column(std::shared_ptr<const Column> before, Content content, const Owner& owner,
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
  for (const Layer& layer : layers_) {
    for (const auto& part : {layer.k, layer.v})
      if (part != nullptr) saturated_ += part->saturated_values();
  }
  owner_.model->Add({.tokens_held = owner_.model->model().page_tokens});
}

Column::~Column() {
  owner_.name_space->index.Remove(AllOf(blocks_), this);
  evictor_.Remove(node_);
  owner_.model->Add({.tokens_held = -owner_.model->model().page_tokens});
}

void Column::Swap(std::vector<Layer>& layers) const {
  MutexLock lock(&mutex_);
  layers_.swap(layers);
  held_ = HeldOf(layers_);
}

std::int64_t Column::end_token() const { return (page_ + 1) * owner_.model->model().page_tokens; }

Path::Path(std::shared_ptr<const Column> last) {
  for (; last != nullptr; last = last->before()) columns_.push_back(last);
  std::reverse(columns_.begin(), columns_.end());
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
