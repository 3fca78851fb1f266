#include "cachestore/arena.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "cachestore/base/check.h"
#include "cachestore/model/part_layout.h"

namespace kvtier::cachestore {

Allocation::~Allocation() {
  if (arena_ == nullptr) return;
  owner_.Add({-use_, -size_});
  arena_->Free(data_, size_, use_);
}

void Allocation::GiveTo(MemoryOwner owner) {
  KVT_CHECK(owner_.model == nullptr && owner_.name_space == nullptr);
  owner_ = std::move(owner);
  owner_.Add({use_, size_});
}

void Allocation::Hold(const MemoryUse& delta) {
  use_ += delta;
  KVT_CHECK(use_.total() >= 0 && use_.total() <= size_);
  arena_->Account(delta);
  owner_.Add({delta, 0});
}

Arena::Arena(std::byte* slab, std::int64_t bytes) : slab_(slab), bytes_(bytes) {
  MutexLock lock(&mutex_);
  InsertFree(0, bytes / kAlignment * kAlignment);
}

Allocation Arena::Allocate(std::int64_t bytes, const MemoryOwner& owner) {
  KVT_CHECK(bytes > 0);
  const Size size = AlignUp(bytes);
  MutexLock lock(&mutex_);
  const auto fit = free_by_size_.lower_bound({size, 0});
  if (fit == free_by_size_.end()) return {};
  if (owner.name_space != nullptr && !owner.name_space->Take(size)) return {};
  Allocation allocation = TakeFrom(free_by_offset_.find(fit->second), size);
  allocation.owner_ = owner;
  if (owner.model != nullptr) owner.model->Add({{}, size});
  return allocation;
}

Allocation Arena::AllocateLow(std::int64_t bytes) {
  KVT_CHECK(bytes > 0);
  const Size size = AlignUp(bytes);
  MutexLock lock(&mutex_);
  const auto fit = std::find_if(free_by_offset_.begin(), free_by_offset_.end(),
                                [size](const auto& free) { return free.second >= size; });
  return fit == free_by_offset_.end() ? Allocation() : TakeFrom(fit, size);
}

Allocation Arena::TakeFrom(std::map<Offset, Size>::iterator free, Size size) {
  const auto [offset, piece] = *free;
  EraseFree(free);
  if (piece > size) InsertFree(offset + size, piece - size);
  allocated_ += size;
  Allocation allocation;
  allocation.arena_ = this;
  allocation.data_ = slab_ + offset;
  allocation.size_ = size;
  return allocation;
}

MemoryParts Arena::Snapshot() const {
  MutexLock lock(&mutex_);
  return {
      .use = use_, .slack = allocated_ - use_.total(), .staging = 0, .free = bytes_ - allocated_};
}

void Arena::Account(const MemoryUse& delta) {
  MutexLock lock(&mutex_);
  use_ += delta;
}

void Arena::Free(std::byte* data, std::int64_t bytes, const MemoryUse& use) {
  MutexLock lock(&mutex_);
  use_ -= use;
  allocated_ -= bytes;
  Offset offset = data - slab_;
  Size size = bytes;
  auto next = free_by_offset_.lower_bound(offset);
  KVT_CHECK(next == free_by_offset_.end() || next->first >= offset + size);
  if (next != free_by_offset_.end() && next->first == offset + size) {
    size += next->second;
    EraseFree(next++);
  }
  if (next != free_by_offset_.begin()) {
    const auto before = std::prev(next);
    KVT_CHECK(before->first + before->second <= offset);
    if (before->first + before->second == offset) {
      offset = before->first;
      size += before->second;
      EraseFree(before);
    }
  }
  InsertFree(offset, size);
}

void Arena::InsertFree(Offset offset, Size size) {
  if (size == 0) return;
  free_by_offset_.emplace(offset, size);
  free_by_size_.emplace(size, offset);
}

void Arena::EraseFree(std::map<Offset, Size>::iterator piece) {
  free_by_size_.erase({piece->second, piece->first});
  free_by_offset_.erase(piece);
}

}  // namespace kvtier::cachestore
