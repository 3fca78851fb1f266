// What of a sequence others may share: its columns, the keys by which they are found, forks.

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "cachestore/base/check.h"
#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/sequence.h"

namespace kvtier::cachestore {

bool Sequence::StandTogether() const {
  const std::int64_t first = layers_[0].received[0];
  return std::all_of(layers_.begin(), layers_.end(), [&](const LayerState& layer) {
    return std::all_of(layer.received.begin(), layer.received.end(),
                       [&](std::int64_t received) { return received == first; });
  });
}

std::int64_t Sequence::BlocksIn(std::int64_t tokens) const {
  return tokens / owner_.model->model().request.spec.hash_block_tokens;
}

std::int64_t Sequence::PathTokens() const {
  return path_.pages() * owner_.model->model().page_tokens;
}

std::int64_t Sequence::SharedPages() const {
  return layers_.empty() ? 0 : layers_[0].k.origin() / owner_.model->model().page_tokens;
}

absl::Status Sequence::CheckBlocks(const HashBlocks& blocks) const {
  const std::size_t both = std::min(blocks.keys.size(), blocks_->keys.size());
  for (std::size_t block = 0; block < both; ++block) {
    if (blocks.keys[block] == blocks_->keys[block]) continue;
    return Error(Reason::kPromptMismatch,
                 fmt::format("prompt is not the one that sequence \"{}\" was opened with: they "
                             "differ in hash block {}",
                             key_.id, block));
  }
  return absl::OkStatus();
}

void Sequence::TakeBlocks(const HashBlocksPtr& blocks) {
  if (blocks->size() <= blocks_->size()) return;
  // Columns that are there already were made without: they stay as they are.
  blocks_ = blocks;
  Publish();
}

void Sequence::Publish() {
  MakeColumns();
  const std::int64_t begin = BlocksOf(PathTokens()).end;
  const std::int64_t end = std::max(begin, BlocksOf(Committed()).end);
  PrefixIndex& index = owner_.name_space->index;
  index.Add({blocks_, std::max(begin, indexed_end_), end}, this);
  index.Remove({blocks_, indexed_begin_, std::min(begin, indexed_end_)}, this);
  indexed_begin_ = begin;
  indexed_end_ = end;
  LetGoBehindWindows();
}

std::int64_t Sequence::FinalPages(std::int64_t most) const {
  for (const LayerState& layer : layers_) {
    most = layer.k.FinalPages(most);
    if (layer.v.model().dim() > 0) most = layer.v.FinalPages(most);
    if (most == 0) return 0;
  }
  return most;
}

void Sequence::MakeColumns() {
  // While layers come one after another, some have many pages and some have none.
  if (layers_.empty() || FinalPages(1) == 0) return;
  const std::int64_t pages = FinalPages(std::numeric_limits<std::int64_t>::max());
  std::vector<std::vector<Column::Layer>> columns(static_cast<std::size_t>(pages));
  for (LayerState& layer : layers_) {
    std::vector<std::shared_ptr<Part>> k = layer.k.TakePages(pages), v;
    if (layer.v.model().dim() > 0) v = layer.v.TakePages(pages);
    for (std::size_t i = 0; i < columns.size(); ++i)
      columns[i].push_back({std::move(k[i]), v.empty() ? nullptr : std::move(v[i])});
  }
  for (std::vector<Column::Layer>& layers : columns) {
    BlockRange blocks = BlocksOf(PathTokens() + owner_.model->model().page_tokens);
    blocks.begin = BlocksOf(PathTokens()).end;
    path_.Add(Column::Make(path_.last(), {std::move(layers), CopyOf(blocks)}, owner_, home_, end_));
  }
}

void Sequence::Unlist() {
  owner_.name_space->index.Remove({blocks_, indexed_begin_, indexed_end_}, this);
  indexed_end_ = indexed_begin_;
}

BlockRange Sequence::BlocksOf(std::int64_t tokens) const {
  return {blocks_, 0, std::min(blocks_->size(), BlocksIn(tokens))};
}

void Sequence::List() {
  MutexLock lock(&mutex_);
  if (state_ != SequenceState::kGone) Publish();
}

std::shared_ptr<Sequence> Sequence::Columns(absl::Time now) const {
  MutexLock lock(&mutex_);
  if (!counts_ || path_.pages() == 0) return nullptr;
  return ForReader(key_, owner_, home_, now, path_);
}

absl::Status Sequence::CheckRoomForCopy(std::int64_t& needed) const {
  needed = 0;
  for (const LayerState& layer : layers_) needed += layer.k.CopyBytes() + layer.v.CopyBytes();
  return Memory().Check(needed);
}

absl::StatusOr<SequenceFork> Sequence::Fork(SequenceKey key, std::int64_t tokens, absl::Time now,
                                            std::int64_t& needed) const {
  MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(CheckHeld());
  const std::int64_t committed = Committed();
  if (tokens > committed && tokens <= sealed_tokens_) return EvictedFrom(committed);
  if (tokens > committed) {
    return Error(
        Reason::kPastCommitted,
        fmt::format("tokens is {}; sequence \"{}\" has {} committed", tokens, key_.id, committed));
  }
  if (tokens < 0) tokens = committed;
  SequenceStart start{.path = path_};
  const bool exact = tokens == committed && StandTogether();
  if (!exact) {
    start.path.CutTo(tokens / owner_.model->model().page_tokens);
    tokens = start.path.pages() * owner_.model->model().page_tokens;
  }
  const bool hit =
      exact ? Hits(tokens) : tokens == 0 || HitSearch().Hits(*start.path.last(), tokens);
  if (!hit) return WindowsMovedOn(Reason::kBehindWindow, tokens);
  start.tokens = tokens;
  start.blocks = CopyOf(BlocksOf(tokens));
  if (exact) {
    KVT_RETURN_IF_ERROR(CheckRoomForCopy(needed));
  }
  auto fork = std::make_shared<Sequence>(std::move(key), owner_, home_, now, std::move(start));
  if (!exact) {
    MutexLock fork_lock(&fork->mutex_);
    // Others may have let go of it since.
    if (fork->PathTokens() < tokens) return WindowsMovedOn(Reason::kBehindWindow, tokens);
    return SequenceFork{fork, tokens};
  }
  KVT_RETURN_IF_ERROR(CopyEndTo(*fork));
  return SequenceFork{std::move(fork), tokens};
}

absl::Status Sequence::CopyEndTo(Sequence& fork) const {
  MutexLock lock(&fork.mutex_);
  KVT_CHECK(fork.path_.pages() == path_.pages());
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    LayerState& layer = fork.layers_[i];
    layer.received = layers_[i].received;
    KVT_ASSIGN_OR_RETURN(layer.k, layers_[i].k.Copy(Memory()));
    KVT_ASSIGN_OR_RETURN(layer.v, layers_[i].v.Copy(Memory()));
  }
  KVT_RETURN_IF_ERROR(home_.device.Health());
  fork.reported_.appended_tokens = Committed();
  fork.reported_.saturated_values = Saturated();
  fork.Report(0);
  return absl::OkStatus();
}

}  // namespace kvtier::cachestore
