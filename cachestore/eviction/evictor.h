#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "cachestore/base/clock.h"
#include "cachestore/base/mutex.h"
#include "cachestore/eviction/policy.h"
#include "cachestore/holder_set.h"

namespace kvtier::cachestore {

class Column;
class Sequence;

// Candidates in order: those that are pinned softly go after all others. Guarded by its evictor's
// lock.
class EvictionQueue {
 public:
  // Candidates behind which there may be columns to lower, in order: how far they are lowered,
  // their last use, their id.
  using ToLower = absl::btree_set<std::tuple<int, absl::Time, std::uint64_t>>;

  explicit EvictionQueue(EvictionPolicyName name)
      : ordinary_(MakeEvictionPolicy(name)), pinned_(MakeEvictionPolicy(name)) {}

  EvictionPolicy& tier(bool pinned) { return pinned ? *pinned_ : *ordinary_; }
  std::optional<EvictionCandidate> Next() {
    if (auto next = ordinary_->Next()) return next;
    return pinned_->Next();
  }
  ToLower& to_lower() { return to_lower_; }
  bool lowers() const { return lowers_; }
  void set_lowers(bool lowers) { lowers_ = lowers; }

 private:
  std::unique_ptr<EvictionPolicy> ordinary_;
  std::unique_ptr<EvictionPolicy> pinned_;
  ToLower to_lower_;
  bool lowers_ = false;  // of a namespace: its columns take the ladder before they go
};

// One thing that is kept or goes as a whole: a column, or the end of a sequence, which is what it
// holds behind its columns. It belongs to what it stands for; the evictor's lock guards it.
class EvictionNode {
 public:
  // `queue`: of a namespace. `rungs`: how often a column can be lowered.
  struct Place {
    EvictionQueue& queue;
    int rungs = 0;
  };
  // Of a column. `content`: as EvictionCandidate's.
  EvictionNode(const Place& place, const Column* column, std::uint64_t content)
      : queue_(place.queue), rungs_(place.rungs), column_(column) {
    candidate_.content = content;
  }
  // Of a sequence's end.
  EvictionNode(const Place& place, Sequence* sequence)
      : queue_(place.queue), rungs_(place.rungs), sequence_(sequence) {}
  EvictionNode(const EvictionNode&) = delete;
  EvictionNode& operator=(const EvictionNode&) = delete;

 private:
  friend class Evictor;
  enum class State { kOut, kKept, kEvicted };

  EvictionQueue& queue_;
  const int rungs_;
  const Column* const column_ = nullptr;  // null for an end
  Sequence* const sequence_ = nullptr;    // null for a column
  State state_ = State::kOut;
  EvictionNode* before_ = nullptr;  // the column that it stands behind
  int guards_ = 0;                  // holds on it, and what is kept behind it
  bool pinned_ = false;             // softly
  int rung_ = 0;                    // of a column: how often it was lowered
  int all_at_ = 0;                  // of a candidate: no column that it alone keeps is above that
  EvictionCandidate candidate_;
  HolderSet<EvictionNode> evicted_ends_;  // of a column: ends that stand here and don't guard it
};

// Keeps what is in use, and says of the rest what is to go next. Columns and the ends of sequences
// are a tree; whatever is kept guards what it stands behind, so that only what nothing stands
// behind can go, and what stays of a sequence is a prefix. Thread-safe; its lock is held for a few
// steps, whatever the number of nodes (of S3-FIFO on the average; to lower one, along its
// prefix), and only a column's is taken under it.
class Evictor {
 public:
  // `for_idle`: whether EvictUnused is ever called.
  Evictor(EvictionPolicyName policy, bool for_idle, const Clock& clock)
      : for_room_(policy != EvictionPolicyName::kNone),
        for_idle_(for_idle),
        clock_(clock),
        all_(policy) {}

  // `end` stands behind `column` (null: behind nothing) and has one guard. False, and it is as if
  // it was evicted, where the column was.
  bool AddEnd(EvictionNode& end, EvictionNode* column) ABSL_LOCKS_EXCLUDED(mutex_);
  // `column` comes between `end`, which has a guard, and what that stood behind.
  void AddColumn(EvictionNode& column, EvictionNode& end) ABSL_LOCKS_EXCLUDED(mutex_);
  // What it stands for goes.
  void Remove(EvictionNode& node) ABSL_LOCKS_EXCLUDED(mutex_);

  // Keeps `end`, evicted or not, and all that it stands behind. False where some of that was
  // evicted.
  bool Guard(EvictionNode& end) ABSL_LOCKS_EXCLUDED(mutex_);
  enum class Use {
    kNone,
    kWritten,  // it is as fresh as what was just read, but nobody asked for it yet
    kRead,
  };
  // `use`: what the guard was for.
  void Unguard(EvictionNode& end, Use use) ABSL_LOCKS_EXCLUDED(mutex_);
  // It goes only after everything that is not pinned, or no longer so.
  void SetPinned(EvictionNode& end, bool pinned) ABSL_LOCKS_EXCLUDED(mutex_);

  // Whether `end` was evicted, and what of its sequence it stands for is to go.
  bool Evicted(const EvictionNode& end) const ABSL_LOCKS_EXCLUDED(mutex_);
  // The same of the column that it stands behind.
  bool ColumnEvicted(const EvictionNode& end) const ABSL_LOCKS_EXCLUDED(mutex_);
  // An evicted end stands behind an earlier column from now on, or behind nothing.
  void StandBehind(EvictionNode& end, EvictionNode* column) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same of one that is kept, and that column with it.
  void MoveBack(EvictionNode& end, EvictionNode* column) ABSL_LOCKS_EXCLUDED(mutex_);

  // What was evicted: each of these sequences has to let go of it.
  using Victim = std::vector<std::shared_ptr<Sequence>>;
  // Evicts the next, for room; null where nothing can go. Of one namespace's, or of all.
  std::optional<Victim> Evict(EvictionQueue* of = nullptr) ABSL_LOCKS_EXCLUDED(mutex_);
  // A column that nobody uses, to be stored as its model's rung `rung` (from 1 on).
  struct Lowering {
    std::shared_ptr<const Column> column;
    int rung = 0;
    std::uint64_t candidate = 0;  // behind which it lies
  };
  // Of what may go, and is not pinned, the next column to be lowered: all take a step before one
  // takes the next, and what was not used for longest goes first. Only in namespaces that want it;
  // columns that sequences share are left as they are. null: there is none.
  std::optional<Lowering> NextToLower(EvictionQueue* of = nullptr) ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls `f` under the lock if still nobody uses the column, and it is to be lowered. Whether it
  // did.
  bool IfUnused(const Lowering& lowering, absl::FunctionRef<void()> f) ABSL_LOCKS_EXCLUDED(mutex_);
  // It was not lowered after all.
  void TakeBack(const Lowering& lowering) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether columns of a namespace are lowered.
  void SetLowers(EvictionQueue& of, bool lowers) ABSL_LOCKS_EXCLUDED(mutex_);
  bool lowers(const EvictionQueue& of) const ABSL_LOCKS_EXCLUDED(mutex_);
  // How often a column was lowered.
  int RungOf(const EvictionNode& column) const ABSL_LOCKS_EXCLUDED(mutex_);

  // Evicts what was not used since `time`, if there is something, and is not pinned.
  std::optional<Victim> EvictUnused(absl::Time time) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using State = EvictionNode::State;

  void Keep(EvictionNode& node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Loosen(EvictionNode& node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddCandidate(EvictionNode& node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RemoveCandidate(EvictionNode& node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // In the order of those to be lowered, where it belongs there, or out of it.
  void ListToLower(EvictionNode& node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UnlistToLower(EvictionNode& node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The first column that only `candidate` keeps, itself or before it, for which f(column); null if
  // there is none.
  template <class F>
  EvictionNode* FindColumn(EvictionNode& candidate, F f) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(EvictionNode& node, bool evicted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Come(EvictionNode& node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // It no longer guards what it stands behind, which was used when it was.
  void LeaveColumn(EvictionNode& node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Victim EvictNode(EvictionNode& node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const bool for_room_;
  const bool for_idle_;
  const Clock& clock_;
  mutable Mutex mutex_;
  EvictionQueue all_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::uint64_t, EvictionNode*> candidates_ ABSL_GUARDED_BY(mutex_);  // by id
  absl::btree_set<std::pair<absl::Time, std::uint64_t>> by_access_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvtier::cachestore
