#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "cachestore/base/mutex.h"
#include "cachestore/memory_account.h"
#include "cachestore/model/memory_parts.h"

namespace kvtier::cachestore {

class Arena;

// Memory of the budget; given back when this goes. Move-only; must not outlive its arena. Not
// thread-safe by itself.
class [[nodiscard]] Allocation {
 public:
  Allocation() = default;
  Allocation(Allocation&& other) noexcept { *this = std::move(other); }
  Allocation& operator=(Allocation&& other) noexcept {
    std::swap(arena_, other.arena_);
    std::swap(owner_, other.owner_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(use_, other.use_);
    return *this;
  }
  ~Allocation();

  explicit operator bool() const { return data_ != nullptr; }
  std::byte* data() const { return data_; }
  std::int64_t size() const { return size_; }
  MemoryHeld held() const { return {use_, size_}; }

  // Of nobody's: `owner` has it from now on, if need be past its quota.
  void GiveTo(MemoryOwner owner);
  // Says what `delta` more bytes of it now hold; what nobody claims is slack.
  void Hold(const MemoryUse& delta);

 private:
  friend class Arena;

  Arena* arena_ = nullptr;
  MemoryOwner owner_;
  std::byte* data_ = nullptr;
  std::int64_t size_ = 0;
  MemoryUse use_;
};

// Hands out pieces of one slab, of any size, and knows at every moment what each byte of the budget
// holds. Best fit, free neighbours merged. Thread-safe.
class Arena {
 public:
  Arena(std::byte* slab, std::int64_t bytes);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // An empty Allocation when no free piece is large enough, or the owner may not have so much.
  // `bytes` is rounded up to kAlignment.
  Allocation Allocate(std::int64_t bytes, const MemoryOwner& owner = {})
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The same, nobody's, as low as there is room: what is small lies there together, and does not
  // cut up what is large. Takes time in the number of free pieces.
  Allocation AllocateLow(std::int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  // Sums to budget() exactly.
  MemoryParts Snapshot() const ABSL_LOCKS_EXCLUDED(mutex_);
  std::int64_t budget() const { return bytes_; }

 private:
  friend class Allocation;
  using Offset = std::int64_t;
  using Size = std::int64_t;

  void Free(std::byte* data, std::int64_t bytes, const MemoryUse& use) ABSL_LOCKS_EXCLUDED(mutex_);
  void Account(const MemoryUse& delta) ABSL_LOCKS_EXCLUDED(mutex_);
  Allocation TakeFrom(std::map<Offset, Size>::iterator free, Size size)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void InsertFree(Offset offset, Size size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EraseFree(std::map<Offset, Size>::iterator piece) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::byte* const slab_;
  const std::int64_t bytes_;

  mutable Mutex mutex_;
  std::map<Offset, Size> free_by_offset_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<Size, Offset>> free_by_size_ ABSL_GUARDED_BY(mutex_);
  MemoryUse use_ ABSL_GUARDED_BY(mutex_);
  std::int64_t allocated_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvtier::cachestore
