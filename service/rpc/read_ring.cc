#include "service/rpc/read_ring.h"

#include <algorithm>

#include "cachestore/base/check.h"

namespace kvtier::service {
namespace {

constexpr std::int64_t kAlignment = 64;

}  // namespace

std::byte* ReadRing::Take(std::int64_t bytes) {
  KVT_CHECK(bytes <= size_);
  for (; given_back_ < credit_->chunks() && !ends_.empty(); ++given_back_) {
    begin_ = ends_.front();
    ends_.pop_front();
  }
  if (ends_.empty()) begin_ = end_ = 0;
  const std::int64_t at = end_ % size_;
  const std::int64_t skipped = at + bytes > size_ ? size_ - at : 0;  // a chunk lies together
  if (end_ + skipped + bytes - begin_ > size_) return nullptr;
  const std::int64_t taken = (at + skipped) % size_;
  const std::int64_t padded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  end_ += skipped + std::min(padded, size_ - taken);
  ends_.push_back(end_);
  return data_ + taken;
}

}  // namespace kvtier::service
