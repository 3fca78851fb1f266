#include "cachestore/prefix_index.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cachestore/base/check.h"
#include "cachestore/column.h"

namespace kvtier::cachestore {

std::size_t PrefixIndex::Hash::operator()(const PrefixKey& key) const {
  std::size_t hash;
  std::memcpy(&hash, key.data(), sizeof hash);
  return hash;
}

void PrefixIndex::Add(absl::Span<const PrefixKey> keys, Holder holder) {
  if (keys.empty()) return;
  absl::MutexLock lock(&mutex_);
  for (const PrefixKey& key : keys) holders_[key].push_back(holder);
}

void PrefixIndex::Remove(absl::Span<const PrefixKey> keys, Holder holder) {
  if (keys.empty()) return;
  absl::MutexLock lock(&mutex_);
  for (const PrefixKey& key : keys) {
    const auto entry = holders_.find(key);
    KVT_CHECK(entry != holders_.end());
    Holders& holders = entry->second;
    const auto found = std::find(holders.begin(), holders.end(), holder);
    KVT_CHECK(found != holders.end());
    if (holders.size() == 1) {
      holders_.erase(entry);
    } else {
      *found = holders.back();
      holders.pop_back();
    }
  }
}

std::int64_t PrefixIndex::CountHeld(absl::Span<const PrefixKey> keys) const {
  absl::MutexLock lock(&mutex_);
  const auto missing = std::find_if(keys.begin(), keys.end(), [&](const PrefixKey& key) {
    mutex_.AssertReaderHeld();
    return !holders_.contains(key);
  });
  return missing - keys.begin();
}

PrefixIndex::Found PrefixIndex::FindColumn(absl::Span<const PrefixKey> keys) const {
  absl::MutexLock lock(&mutex_);
  std::vector<const Holders*> held;
  for (const PrefixKey& key : keys) {
    const auto entry = holders_.find(key);
    if (entry == holders_.end()) break;
    held.push_back(&entry->second);
  }
  // Only what is returned is ever locked: to let go of a column may end it, which takes our lock.
  for (; !held.empty(); held.pop_back()) {
    for (const Holder& holder : *held.back()) {
      const auto* column = std::get_if<const Column*>(&holder);
      if (column == nullptr) continue;
      // Null while it is going away.
      auto alive = (*column)->weak_from_this().lock();
      if (alive != nullptr) return {static_cast<std::int64_t>(held.size()), std::move(alive)};
    }
  }
  return {};
}

std::int64_t PrefixIndex::size() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<std::int64_t>(holders_.size());
}

}  // namespace kvtier::cachestore
