#include "cachestore/eviction/evictor.h"

#include <algorithm>
#include <utility>

#include "cachestore/base/check.h"
#include "cachestore/column.h"
#include "cachestore/sequence.h"

namespace kvtier::cachestore {

bool Evictor::AddEnd(EvictionNode& end, EvictionNode* column) {
  MutexLock lock(&mutex_);
  KVT_CHECK(end.state_ == State::kOut);
  Come(end);
  end.before_ = column;
  if (column != nullptr && column->state_ == State::kEvicted) {
    end.state_ = State::kEvicted;
    column->evicted_ends_.Add(&end);
    return false;
  }
  if (column != nullptr) Keep(*column);
  end.state_ = State::kKept;
  end.guards_ = 1;
  return true;
}

void Evictor::AddColumn(EvictionNode& column, EvictionNode& end) {
  MutexLock lock(&mutex_);
  KVT_CHECK(column.state_ == State::kOut && end.state_ == State::kKept && end.guards_ > 0);
  Come(column);
  column.state_ = State::kKept;
  column.before_ = std::exchange(end.before_, &column);  // it guards that, as the end did
  column.guards_ = 1;
}

void Evictor::Remove(EvictionNode& node) {
  MutexLock lock(&mutex_);
  KVT_CHECK(node.evicted_ends_.empty());
  if (node.state_ == State::kKept) {
    if (node.guards_ == 0) RemoveCandidate(node);
    Forget(node, false);
    // What was in use to the end leaves what it stood behind as fresh.
    if (node.guards_ > 0) node.candidate_.last_access = clock_.Now();
    LeaveColumn(node);
  } else if (node.state_ == State::kEvicted && node.sequence_ != nullptr) {
    if (node.before_ != nullptr) node.before_->evicted_ends_.Remove(&node);
  }
  node.state_ = State::kOut;
}

bool Evictor::Guard(EvictionNode& end) {
  MutexLock lock(&mutex_);
  KVT_CHECK(end.state_ != State::kOut);
  if (end.state_ == State::kKept) {
    Keep(end);
    return true;
  }
  if (end.before_ != nullptr) {
    if (end.before_->state_ == State::kEvicted) return false;
    end.before_->evicted_ends_.Remove(&end);
    Keep(*end.before_);
  }
  end.state_ = State::kKept;
  end.guards_ = 1;
  return true;
}

void Evictor::Unguard(EvictionNode& end, Use use) {
  MutexLock lock(&mutex_);
  KVT_CHECK(end.state_ == State::kKept);
  if (use != Use::kNone) end.candidate_.last_access = clock_.Now();
  if (use == Use::kRead) ++end.candidate_.accesses;
  Loosen(end);
}

void Evictor::SetPinned(EvictionNode& end, bool pinned) {
  MutexLock lock(&mutex_);
  const bool candidate = end.state_ == State::kKept && end.guards_ == 0;
  if (candidate) RemoveCandidate(end);
  end.pinned_ = pinned;
  if (candidate) AddCandidate(end);
}

bool Evictor::Evicted(const EvictionNode& end) const {
  MutexLock lock(&mutex_);
  return end.state_ == State::kEvicted;
}

bool Evictor::ColumnEvicted(const EvictionNode& end) const {
  MutexLock lock(&mutex_);
  return end.before_ != nullptr && end.before_->state_ == State::kEvicted;
}

void Evictor::StandBehind(EvictionNode& end, EvictionNode* column) {
  MutexLock lock(&mutex_);
  KVT_CHECK(end.state_ == State::kEvicted);
  if (end.before_ != nullptr) end.before_->evicted_ends_.Remove(&end);
  end.before_ = column;
  if (column != nullptr) column->evicted_ends_.Add(&end);
}

void Evictor::MoveBack(EvictionNode& end, EvictionNode* column) {
  MutexLock lock(&mutex_);
  KVT_CHECK(end.state_ == State::kKept);
  if (column != nullptr) Keep(*column);
  if (end.before_ != nullptr) Loosen(*end.before_);
  end.before_ = column;
}

std::optional<Evictor::Victim> Evictor::Evict(EvictionQueue* of) {
  MutexLock lock(&mutex_);
  const auto next = (of == nullptr ? all_ : *of).Next();
  if (!for_room_ || !next.has_value()) return std::nullopt;
  return EvictNode(*candidates_.at(next->id));
}

std::optional<Evictor::Victim> Evictor::EvictUnused(absl::Time time) {
  MutexLock lock(&mutex_);
  if (by_access_.empty() || by_access_.begin()->first > time) return std::nullopt;
  return EvictNode(*candidates_.at(by_access_.begin()->second));
}

Evictor::Victim Evictor::EvictNode(EvictionNode& node) {
  RemoveCandidate(node);
  Forget(node, true);
  node.state_ = State::kEvicted;
  Victim victim;
  // One that is going away by itself can't be locked any more.
  const auto add = [&](const EvictionNode& end) {
    if (auto sequence = end.sequence_->weak_from_this().lock())
      victim.push_back(std::move(sequence));
  };
  if (node.sequence_ == nullptr) {
    node.evicted_ends_.ForEach([&](const EvictionNode* end) { add(*end); });
  } else {
    add(node);
    if (node.before_ != nullptr) node.before_->evicted_ends_.Add(&node);
  }
  LeaveColumn(node);
  node.candidate_.accesses = 0;  // an end that is kept after all begins anew
  return victim;
}

void Evictor::LeaveColumn(EvictionNode& node) {
  EvictionNode* column = node.before_;
  if (column == nullptr) return;
  column->candidate_.last_access =
      std::max(column->candidate_.last_access, node.candidate_.last_access);
  column->candidate_.accesses += node.candidate_.accesses;
  Loosen(*column);
}

void Evictor::Come(EvictionNode& node) {
  node.candidate_.id = ++next_id_;
  node.candidate_.last_access = clock_.Now();
}

void Evictor::Keep(EvictionNode& node) {
  if (node.guards_++ == 0) RemoveCandidate(node);
}

void Evictor::Loosen(EvictionNode& node) {
  KVT_CHECK(node.guards_ > 0);
  if (--node.guards_ == 0) AddCandidate(node);
}

void Evictor::AddCandidate(EvictionNode& node) {
  const EvictionCandidate& candidate = node.candidate_;
  candidates_.emplace(candidate.id, &node);
  for (EvictionQueue* queue : {&all_, &node.queue_}) queue->tier(node.pinned_).Add(candidate);
  if (for_idle_ && !node.pinned_) by_access_.emplace(candidate.last_access, candidate.id);
  node.all_at_ = 0;
  ListToLower(node);
}

void Evictor::RemoveCandidate(EvictionNode& node) {
  const EvictionCandidate& candidate = node.candidate_;
  candidates_.erase(candidate.id);
  for (EvictionQueue* queue : {&all_, &node.queue_}) queue->tier(node.pinned_).Remove(candidate);
  if (for_idle_ && !node.pinned_) by_access_.erase({candidate.last_access, candidate.id});
  UnlistToLower(node);
}

void Evictor::ListToLower(EvictionNode& node) {
  if (!node.queue_.lowers() || node.pinned_ || node.all_at_ >= node.rungs_) return;
  for (EvictionQueue* queue : {&all_, &node.queue_})
    queue->to_lower().emplace(node.all_at_, node.candidate_.last_access, node.candidate_.id);
}

void Evictor::UnlistToLower(EvictionNode& node) {
  for (EvictionQueue* queue : {&all_, &node.queue_})
    queue->to_lower().erase({node.all_at_, node.candidate_.last_access, node.candidate_.id});
}

template <class F>
EvictionNode* Evictor::FindColumn(EvictionNode& candidate, F f) {
  for (EvictionNode* node = &candidate; node != nullptr; node = node->before_) {
    if (node != &candidate && node->guards_ > 1) return nullptr;
    if (node->column_ != nullptr && f(*node)) return node;
  }
  return nullptr;
}

std::optional<Evictor::Lowering> Evictor::NextToLower(EvictionQueue* of) {
  MutexLock lock(&mutex_);
  const EvictionQueue::ToLower& to_lower = (of == nullptr ? all_ : *of).to_lower();
  while (!to_lower.empty()) {
    const std::uint64_t id = std::get<std::uint64_t>(*to_lower.begin());
    EvictionNode& candidate = *candidates_.at(id);
    std::shared_ptr<const Column> column;
    EvictionNode* const found = FindColumn(candidate, [&](const EvictionNode& node) {
      if (node.rung_ <= candidate.all_at_) column = node.column_->weak_from_this().lock();
      return column != nullptr;
    });
    if (found != nullptr) {
      ++found->rung_;
      return Lowering{std::move(column), found->rung_, id};
    }
    UnlistToLower(candidate);
    ++candidate.all_at_;
    ListToLower(candidate);
  }
  return std::nullopt;
}

bool Evictor::IfUnused(const Lowering& lowering, absl::FunctionRef<void()> f) {
  MutexLock lock(&mutex_);
  const auto candidate = candidates_.find(lowering.candidate);
  if (candidate == candidates_.end()) return false;
  if (candidate->second->pinned_ || !candidate->second->queue_.lowers()) return false;
  const EvictionNode* const found = FindColumn(*candidate->second, [&](const EvictionNode& node) {
    return node.column_ == lowering.column.get();
  });
  if (found != nullptr) f();
  return found != nullptr;
}

void Evictor::TakeBack(const Lowering& lowering) {
  MutexLock lock(&mutex_);
  lowering.column->node().rung_ = lowering.rung - 1;
}

void Evictor::SetLowers(EvictionQueue& of, bool lowers) {
  MutexLock lock(&mutex_);
  if (of.lowers() == lowers) return;
  of.set_lowers(lowers);
  for (const auto& [id, node] : candidates_) {
    if (&node->queue_ != &of) continue;
    if (lowers) ListToLower(*node);
    if (!lowers) UnlistToLower(*node);
  }
}

bool Evictor::lowers(const EvictionQueue& of) const {
  MutexLock lock(&mutex_);
  return of.lowers();
}

int Evictor::RungOf(const EvictionNode& column) const {
  MutexLock lock(&mutex_);
  return column.rung_;
}

void Evictor::Forget(EvictionNode& node, bool evicted) {
  for (EvictionQueue* queue : {&all_, &node.queue_}) {
    for (const bool pinned : {false, true}) queue->tier(pinned).Forget(node.candidate_, evicted);
  }
}

}  // namespace kvtier::cachestore
