#pragma once

#include <memory>

#include "absl/container/flat_hash_set.h"

namespace kvtier::cachestore {

// Pointers, mostly one: it takes two words, and none of its steps grows with the number held.
template <class T>
class HolderSet {
 public:
  bool empty() const { return one_ == nullptr && more_ == nullptr; }

  // Must not be there.
  void Add(T* holder) {
    if (empty()) {
      one_ = holder;
      return;
    }
    if (more_ == nullptr) more_ = std::make_unique<absl::flat_hash_set<T*>>();
    more_->insert(holder);
  }

  // Whether it was there.
  bool Remove(T* holder) {
    if (one_ == holder) {
      one_ = nullptr;
      return true;
    }
    if (more_ == nullptr || more_->erase(holder) == 0) return false;
    if (more_->empty()) more_.reset();
    return true;
  }

  template <class F>
  void ForEach(F f) const {
    if (one_ != nullptr) f(one_);
    if (more_ == nullptr) return;
    for (T* holder : *more_) f(holder);
  }

  // The first for which `lock` gives something, as that; else null.
  template <class F>
  auto FirstOf(F lock) const {
    auto found = one_ == nullptr ? decltype(lock(one_))() : lock(one_);
    if (found != nullptr || more_ == nullptr) return found;
    for (T* holder : *more_) {
      found = lock(holder);
      if (found != nullptr) break;
    }
    return found;
  }

 private:
  T* one_ = nullptr;
  std::unique_ptr<absl::flat_hash_set<T*>> more_;
};

}  // namespace kvtier::cachestore
