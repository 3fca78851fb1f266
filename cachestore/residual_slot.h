#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "cachestore/arena.h"
#include "cachestore/model/model.h"

namespace kvtier::cachestore {

// The residual of one K or V: [heads, capacity, dim] at source precision, token t at t mod
// capacity. A writer overwrites tokens in place, unless a reader holds the slot: then it goes on in
// a copy.
class ResidualSlot {
 public:
  ResidualSlot(Allocation memory, const TensorModel& model)
      : memory_(std::move(memory)),
        row_bytes_(model.source_row_bytes()),
        capacity_(model.residual.capacity()) {}

  std::byte* RowAt(int head, std::int64_t token) const {
    return memory_.data() + (std::int64_t{head} * capacity_ + token % capacity_) * row_bytes_;
  }
  int capacity() const { return capacity_; }
  Allocation& memory() { return memory_; }

  // Whether a reader holds it. Only meaningful under the sequence's lock, where readers come but
  // never go unseen.
  bool shared() const { return readers_.load(std::memory_order_acquire) > 0; }

 private:
  friend class ResidualPin;

  Allocation memory_;
  const std::int64_t row_bytes_;
  const int capacity_;
  std::atomic<int> readers_{0};
};

// A reader's hold on a slot: its bytes stay as they were when it was taken, under the sequence's
// lock. Move-only.
class [[nodiscard]] ResidualPin {
 public:
  ResidualPin() = default;
  explicit ResidualPin(std::shared_ptr<ResidualSlot> slot) : slot_(std::move(slot)) {
    if (slot_ != nullptr) slot_->readers_.fetch_add(1, std::memory_order_relaxed);
  }
  ResidualPin(ResidualPin&& other) noexcept = default;  // a moved-from shared_ptr is empty
  ResidualPin& operator=(ResidualPin&& other) noexcept {
    std::swap(slot_, other.slot_);
    return *this;
  }
  ~ResidualPin() {
    if (slot_ != nullptr) slot_->readers_.fetch_sub(1, std::memory_order_release);
  }

  const ResidualSlot* operator->() const { return slot_.get(); }

 private:
  std::shared_ptr<ResidualSlot> slot_;
};

}  // namespace kvtier::cachestore
