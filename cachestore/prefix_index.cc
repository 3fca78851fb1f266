#include "cachestore/prefix_index.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cachestore/base/check.h"
#include "cachestore/column.h"
#include "cachestore/sequence.h"

namespace kvtier::cachestore {
namespace {

// Tells a log, if there is one, of blocks that changed one by one, as few events as can be.
class Changes {
 public:
  Changes(BlockEvent::Kind kind, const BlockRange& range, std::shared_ptr<EventLog> log)
      : kind_(kind),
        log_(std::move(log)),
        most_(MaxEventBlocks(*range.blocks)),
        run_{range.blocks, range.begin, range.begin} {}
  ~Changes() { Flush(); }
  Changes(const Changes&) = delete;
  Changes& operator=(const Changes&) = delete;

  void Add(std::int64_t index) {
    if (log_ == nullptr) return;
    if (index != run_.end || run_.size() == most_) {
      Flush();
      run_.begin = index;
    }
    run_.end = index + 1;
  }

 private:
  void Flush() {
    if (run_.empty()) return;
    log_->Append({kind_, kind_ == BlockEvent::Kind::kStored ? CopyOf(run_) : KeysOf(run_)});
  }

  const BlockEvent::Kind kind_;
  const std::shared_ptr<EventLog> log_;
  const std::int64_t most_;  // blocks
  BlockRange run_;
};

}  // namespace

std::size_t PrefixIndex::Hash::operator()(const PrefixKey& key) const {
  std::size_t hash;
  std::memcpy(&hash, key.data(), sizeof hash);
  return hash;
}

void PrefixIndex::Add(const BlockRange& blocks, const Column* column) {
  AddTo(&Holders::columns, blocks, column);
}

void PrefixIndex::Add(const BlockRange& blocks, Sequence* sequence) {
  AddTo(&Holders::sequences, blocks, sequence);
}

void PrefixIndex::Remove(const BlockRange& blocks, const Column* column) {
  RemoveFrom(&Holders::columns, blocks, column);
}

void PrefixIndex::Remove(const BlockRange& blocks, Sequence* sequence) {
  RemoveFrom(&Holders::sequences, blocks, sequence);
}

template <class T>
void PrefixIndex::AddTo(HolderSet<T> Holders::*set, const BlockRange& range, T* holder) {
  if (range.empty()) return;
  MutexLock lock(&mutex_);
  Changes stored(BlockEvent::Kind::kStored, range, log_.lock());
  for (std::int64_t index = range.begin; index < range.end; ++index) {
    Holders& holders = holders_[range.blocks->keys[static_cast<std::size_t>(index)]];
    if (holders.empty()) stored.Add(index);
    if (holders.empty() || std::is_same_v<T, const Column>) {
      holders.blocks = range.blocks;
      holders.index = index;
    }
    (holders.*set).Add(holder);
  }
}

template <class T>
void PrefixIndex::RemoveFrom(HolderSet<T> Holders::*set, const BlockRange& range, T* holder) {
  if (range.empty()) return;
  MutexLock lock(&mutex_);
  Changes removed(BlockEvent::Kind::kRemoved, range, log_.lock());
  for (std::int64_t index = range.begin; index < range.end; ++index) {
    const auto entry = holders_.find(range.blocks->keys[static_cast<std::size_t>(index)]);
    KVT_CHECK(entry != holders_.end());
    bool was_there = (entry->second.*set).Remove(holder);
    if constexpr (std::is_same_v<T, const Column>)
      was_there = was_there || entry->second.missed.Remove(holder);
    KVT_CHECK(was_there);
    if (!entry->second.empty()) continue;
    holders_.erase(entry);
    removed.Add(index);
  }
}

void PrefixIndex::NoLongerHit(const BlockRange& blocks, const Column* column) {
  MutexLock lock(&mutex_);
  for (const PrefixKey& key : blocks.keys()) {
    Holders& holders = holders_.at(key);
    if (holders.columns.Remove(column)) holders.missed.Add(column);
  }
}

std::int64_t PrefixIndex::CountHeld(absl::Span<const PrefixKey> keys) const {
  MutexLock lock(&mutex_);
  const auto missing = std::find_if(keys.begin(), keys.end(), [&](const PrefixKey& key) {
    mutex_.AssertHeld();
    return !holders_.contains(key);
  });
  return missing - keys.begin();
}

PrefixIndex::Found PrefixIndex::Find(absl::Span<const PrefixKey> keys) const {
  return FindAmong(keys, true);
}

PrefixIndex::Found PrefixIndex::FindColumn(absl::Span<const PrefixKey> keys) const {
  return FindAmong(keys, false);
}

PrefixIndex::Found PrefixIndex::FindAmong(absl::Span<const PrefixKey> keys, bool sequences) const {
  MutexLock lock(&mutex_);
  std::vector<const Holders*> held;
  for (const PrefixKey& key : keys) {
    const auto entry = holders_.find(key);
    if (entry == holders_.end()) break;
    held.push_back(&entry->second);
  }
  // Only what is returned is ever locked: to let go of a holder may end it, which takes our lock.
  // A holder that is going away can't be locked any more.
  HitSearch search;
  for (; !held.empty(); held.pop_back()) {
    Found found{.blocks = static_cast<std::int64_t>(held.size()), .column = {}, .sequence = {}};
    found.column = held.back()->columns.FirstOf([&](const Column* column) {
      const Model& model = column->owner().model->model();
      std::int64_t tokens = found.blocks * model.request.spec.hash_block_tokens;
      if (!sequences) tokens -= tokens % model.page_tokens;
      return search.Hits(*column, tokens) ? column->weak_from_this().lock() : nullptr;
    });
    if (found.column == nullptr && sequences) {
      found.sequence = held.back()->sequences.FirstOf([&](Sequence* sequence) {
        const Model& model = sequence->model().model();
        const bool hits = sequence->Hits(found.blocks * model.request.spec.hash_block_tokens);
        return hits ? sequence->weak_from_this().lock() : nullptr;
      });
    }
    if (found.column != nullptr || found.sequence != nullptr) return found;
  }
  return {};
}

std::shared_ptr<EventLog> PrefixIndex::log() const {
  MutexLock lock(&mutex_);
  return log_.lock();
}

void PrefixIndex::SetLog(const std::shared_ptr<EventLog>& log) {
  MutexLock lock(&mutex_);
  log_ = log;
}

PrefixIndex::Listing PrefixIndex::List() const {
  Listing listing;
  std::vector<BlockRange>& blocks = listing.ranges;
  {
    MutexLock lock(&mutex_);
    blocks.reserve(holders_.size());
    for (const auto& [key, holders] : holders_)
      blocks.push_back({holders.blocks, holders.index, holders.index + 1});
    listing.number = log_.lock()->last();
  }
  std::sort(blocks.begin(), blocks.end(), [](const BlockRange& a, const BlockRange& b) {
    return std::pair(a.blocks, a.begin) < std::pair(b.blocks, b.begin);
  });
  // What lies together becomes one.
  std::size_t ranges = 0;
  for (BlockRange& block : blocks) {
    BlockRange* const last = ranges == 0 ? nullptr : &blocks[ranges - 1];
    if (last != nullptr && last->blocks == block.blocks && last->end == block.begin &&
        last->size() < MaxEventBlocks(*block.blocks)) {
      last->end = block.end;
    } else if (&block != &blocks[ranges++]) {
      blocks[ranges - 1] = std::move(block);
    }
  }
  blocks.resize(ranges);
  // The range of the block before a range begins earlier in its prompt than that does.
  const auto first = [](const BlockRange& range) { return range.blocks->first + range.begin; };
  std::sort(blocks.begin(), blocks.end(),
            [&](const BlockRange& a, const BlockRange& b) { return first(a) < first(b); });
  return listing;
}

}  // namespace kvtier::cachestore
