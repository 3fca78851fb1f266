#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "cachestore/base/mutex.h"
#include "cachestore/event_log.h"
#include "cachestore/holder_set.h"
#include "cachestore/model/hash_blocks.h"

namespace kvtier::cachestore {

class Column;
class Sequence;

// Who of a namespace holds the prefix that a key stands for: a column, or a sequence, in the pages
// that it has not filled in every layer. A holder of a key holds all keys before it, so that a
// prefix is held as far as its keys are found; whether it is hit, its windows decide, where the
// model keeps any. Holds nothing alive. Thread-safe; its lock is held for a few steps a key, and
// the event log's or a column's is taken under it.
class PrefixIndex {
 public:
  // A holder must take back what it added before it goes.
  void Add(const BlockRange& blocks, const Column* column) ABSL_LOCKS_EXCLUDED(mutex_);
  void Add(const BlockRange& blocks, Sequence* sequence) ABSL_LOCKS_EXCLUDED(mutex_);
  void Remove(const BlockRange& blocks, const Column* column) ABSL_LOCKS_EXCLUDED(mutex_);
  // Of a column that was added a window went: it is held, and nothing that ends in it is hit.
  void NoLongerHit(const BlockRange& blocks, const Column* column) ABSL_LOCKS_EXCLUDED(mutex_);
  void Remove(const BlockRange& blocks, Sequence* sequence) ABSL_LOCKS_EXCLUDED(mutex_);

  // How many of a prompt's keys are held, from the first on.
  std::int64_t CountHeld(absl::Span<const PrefixKey> keys) const ABSL_LOCKS_EXCLUDED(mutex_);

  // Who holds the last of these keys that somebody holds, and all that the model's windows see
  // there; a column rather than a sequence. Of none both are null. A column may reach past the
  // key's block.
  struct Found {
    std::int64_t blocks = 0;
    std::shared_ptr<const Column> column;
    std::shared_ptr<Sequence> sequence;
  };
  Found Find(absl::Span<const PrefixKey> keys) const ABSL_LOCKS_EXCLUDED(mutex_);
  // The same of columns alone, and of what windows see of their whole pages.
  Found FindColumn(absl::Span<const PrefixKey> keys) const ABSL_LOCKS_EXCLUDED(mutex_);

  // Where it says which keys come and go, as long as somebody keeps that alive; null where nobody
  // does.
  std::shared_ptr<EventLog> log() const ABSL_LOCKS_EXCLUDED(mutex_);
  void SetLog(const std::shared_ptr<EventLog>& log) ABSL_LOCKS_EXCLUDED(mutex_);
  // All that is held, as of an event of the log, which must be alive: each block after the one
  // before it, in ranges of at most MaxEventBlocks.
  struct Listing {
    std::uint64_t number = 0;
    std::vector<BlockRange> ranges;
  };
  Listing List() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Keys are as good as random already.
  struct Hash {
    std::size_t operator()(const PrefixKey& key) const;
  };
  struct Holders {
    HolderSet<const Column> columns;
    HolderSet<const Column> missed;  // columns that are no longer hit
    HolderSet<Sequence> sequences;
    HashBlocksPtr blocks;    // of a holder: a column's where there is one, which are the fewest
    std::int64_t index = 0;  // among them
    bool empty() const { return columns.empty() && missed.empty() && sequences.empty(); }
  };

  template <class T>
  void AddTo(HolderSet<T> Holders::*set, const BlockRange& range, T* holder)
      ABSL_LOCKS_EXCLUDED(mutex_);
  template <class T>
  void RemoveFrom(HolderSet<T> Holders::*set, const BlockRange& range, T* holder)
      ABSL_LOCKS_EXCLUDED(mutex_);
  Found FindAmong(absl::Span<const PrefixKey> keys, bool sequences) const
      ABSL_LOCKS_EXCLUDED(mutex_);

  mutable Mutex mutex_;
  absl::flat_hash_map<PrefixKey, Holders, Hash> holders_ ABSL_GUARDED_BY(mutex_);
  std::weak_ptr<EventLog> log_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier::cachestore
