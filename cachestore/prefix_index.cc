#include "cachestore/prefix_index.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cachestore/base/check.h"
#include "cachestore/column.h"
#include "cachestore/sequence.h"

namespace kvtier::cachestore {

std::size_t PrefixIndex::Hash::operator()(const PrefixKey& key) const {
  std::size_t hash;
  std::memcpy(&hash, key.data(), sizeof hash);
  return hash;
}

void PrefixIndex::Add(absl::Span<const PrefixKey> keys, const Column* column) {
  AddTo(&Holders::columns, keys, column);
}

void PrefixIndex::Add(absl::Span<const PrefixKey> keys, Sequence* sequence) {
  AddTo(&Holders::sequences, keys, sequence);
}

void PrefixIndex::Remove(absl::Span<const PrefixKey> keys, const Column* column) {
  RemoveFrom(&Holders::columns, keys, column);
}

void PrefixIndex::Remove(absl::Span<const PrefixKey> keys, Sequence* sequence) {
  RemoveFrom(&Holders::sequences, keys, sequence);
}

template <class T>
void PrefixIndex::AddTo(HolderSet<T> Holders::*set, absl::Span<const PrefixKey> keys, T* holder) {
  if (keys.empty()) return;
  MutexLock lock(&mutex_);
  for (const PrefixKey& key : keys) (holders_[key].*set).Add(holder);
}

template <class T>
void PrefixIndex::RemoveFrom(HolderSet<T> Holders::*set, absl::Span<const PrefixKey> keys,
                             T* holder) {
  if (keys.empty()) return;
  MutexLock lock(&mutex_);
  for (const PrefixKey& key : keys) {
    const auto entry = holders_.find(key);
    KVT_CHECK(entry != holders_.end() && (entry->second.*set).Remove(holder));
    if (entry->second.columns.empty() && entry->second.sequences.empty()) holders_.erase(entry);
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
  for (; !held.empty(); held.pop_back()) {
    Found found{.blocks = static_cast<std::int64_t>(held.size()), .column = {}, .sequence = {}};
    const auto lock_holder = [](auto* holder) { return holder->weak_from_this().lock(); };
    found.column = held.back()->columns.FirstOf(lock_holder);
    if (found.column == nullptr && sequences)
      found.sequence = held.back()->sequences.FirstOf(lock_holder);
    if (found.column != nullptr || found.sequence != nullptr) return found;
  }
  return {};
}

}  // namespace kvtier::cachestore
