#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "service/rpc/transports.h"

namespace kvtier::service {

// Memory of a reader that chunk after chunk goes into, and begins again when it's full: a chunk's
// room is used again once the reader has given it back. Not thread-safe, but for the credit.
class ReadRing {
 public:
  ReadRing(std::byte* data, std::int64_t size, std::shared_ptr<RingCredit> credit)
      : data_(data), size_(size), credit_(std::move(credit)) {}

  std::int64_t size() const { return size_; }

  // Room for the next chunk, of at most size() bytes; null while there is none.
  std::byte* Take(std::int64_t bytes);

 private:
  std::byte* data_;
  std::int64_t size_;
  std::shared_ptr<RingCredit> credit_;
  // Both count up for ever: what lies between them is the reader's.
  std::int64_t begin_ = 0;
  std::int64_t end_ = 0;
  std::deque<std::int64_t> ends_;  // of the chunks there
  std::uint64_t given_back_ = 0;   // chunks
};

}  // namespace kvtier::service
