#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "cachestore/base/mutex.h"
#include "cachestore/eviction/evictor.h"
#include "cachestore/home.h"
#include "cachestore/model/hash_blocks.h"
#include "cachestore/part.h"

namespace kvtier::cachestore {

// One page of every layer, final, behind the pages before it: what sequences that begin alike
// share. Whoever holds a column holds, by its `before`, all of a prefix, but for the layers of
// Model::windows: what these have here goes once nobody keeps the window (KeptWindows). Nothing
// else of it changes but the format of its parts, while nobody uses it. Thread-safe.
class Column : public std::enable_shared_from_this<Column> {
  struct OfMake {};  // nobody else makes one

 public:
  struct Layer {
    std::shared_ptr<const Part> k;  // null once it went with its window, as is V
    std::shared_ptr<const Part> v;  // null where the layer has no V
  };

  struct Content {
    std::vector<Layer> layers;
    HashBlocksPtr blocks;  // that end in it
  };

  // Is found by its blocks until it goes. `before`: null for page 0. What `home` points to must
  // outlive it. The `end` of its maker stands behind it from now on, so that it isn't evicted; its
  // maker keeps its windows.
  static std::shared_ptr<Column> Make(std::shared_ptr<const Column> before, Content content,
                                      const Owner& owner, const SequenceHome& home,
                                      EvictionNode& end);
  Column(OfMake, std::shared_ptr<const Column> before, Content content, const Owner& owner,
         const SequenceHome& home);
  ~Column();
  Column(const Column&) = delete;
  Column& operator=(const Column&) = delete;

  const std::shared_ptr<const Column>& before() const { return before_; }
  std::int64_t page() const { return page_; }
  std::int64_t end_token() const;
  Layer layer(std::size_t index) const ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return layers_[index];
  }
  // `layers` take the place of those that they were made of, which they are then; of what went
  // meanwhile they do not.
  void Swap(std::vector<Layer>& layers) const ABSL_LOCKS_EXCLUDED(mutex_);
  const Owner& owner() const { return owner_; }
  const HashBlocks& blocks() const { return *blocks_; }
  MemoryHeld held() const ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return held_;
  }
  std::int64_t saturated_values() const { return saturated_; }
  EvictionNode& node() const { return node_; }

  // What the layers of a window have here stays until LeaveWindow. False where it went already.
  bool KeepWindow(std::size_t window) const ABSL_LOCKS_EXCLUDED(mutex_);
  void LeaveWindow(std::size_t window) const ABSL_LOCKS_EXCLUDED(mutex_);
  bool HasWindow(std::size_t window) const ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return keepers_[window] > 0;
  }

 private:
  // One keeper fewer; after the last, what the window's layers had.
  std::vector<Layer> LetGoOfWindow(std::size_t window) const ABSL_LOCKS_EXCLUDED(mutex_);

  std::shared_ptr<const Column> before_;  // stays, until this goes
  const std::int64_t page_;
  const HashBlocksPtr blocks_;
  const Owner owner_;
  Evictor& evictor_;
  mutable EvictionNode node_;
  std::int64_t saturated_ = 0;

  mutable Mutex mutex_;
  mutable std::vector<Layer> layers_ ABSL_GUARDED_BY(mutex_);
  mutable MemoryHeld held_ ABSL_GUARDED_BY(mutex_);
  mutable std::vector<std::int64_t> keepers_ ABSL_GUARDED_BY(mutex_);  // of each window
  mutable std::int64_t behind_windows_bytes_ ABSL_GUARDED_BY(mutex_) =
      0;  // ModelTotals::behind_windows_bytes of it
};

// Whether prefixes are hit, asked at ever fewer tokens: then no column is looked at twice.
class HitSearch {
 public:
  // Whether all is there that the windows see of the first `tokens` tokens, of which the last lies
  // in `column` or before it.
  bool Hits(const Column& column, std::int64_t tokens);

 private:
  // Behind each of these there is a gap that its tokens would see, and so would fewer.
  absl::flat_hash_set<const Column*> missed_;
};

// The columns of a sequence from page 0 on. Holds the last, and by that all: however long it is, to
// copy it, or to let go of it, touches one of them.
class Path {
 public:
  Path() = default;
  // Of `last` and all before it; empty for null.
  explicit Path(std::shared_ptr<const Column> last);

  std::int64_t pages() const { return static_cast<std::int64_t>(columns_.size()); }
  const Column& operator[](std::int64_t page) const {
    return *columns_[static_cast<std::size_t>(page)];
  }
  const std::shared_ptr<const Column>& last() const { return last_; }
  // Of the last of its first pages; null for none.
  EvictionNode* NodeAt(std::int64_t pages) const {
    return pages == 0 ? nullptr : &(*this)[pages - 1].node();
  }
  // Behind last().
  void Add(std::shared_ptr<const Column> column);
  void CutTo(std::int64_t pages);

  MemoryHeld held() const;
  std::int64_t saturated_values() const;

 private:
  std::shared_ptr<const Column> last_;
  std::vector<const Column*> columns_;
};

}  // namespace kvtier::cachestore
