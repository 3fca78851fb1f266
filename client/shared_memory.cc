#include "client/shared_memory.h"

#include <algorithm>

namespace kvtier::client {
namespace {

constexpr std::int64_t kAlignment = 64;

}  // namespace

std::optional<SharedPool::Piece> SharedPool::Take(std::int64_t bytes) {
  if (bytes <= 0) return std::nullopt;
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::int64_t begin = 0;
  auto behind = taken_.begin();
  for (; behind != taken_.end() && behind->first - begin < bytes; ++behind) begin = behind->second;
  if (memory_->size() - begin < bytes) return std::nullopt;
  taken_.emplace(behind, begin, begin + bytes);
  return Piece(shared_from_this(), begin, bytes);
}

void SharedPool::GiveBack(std::int64_t begin) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(taken_, [&](const auto& piece) { return piece.first == begin; });
}

}  // namespace kvtier::client
