#include "client/ring_reader.h"

#include <fmt/format.h>

#include <atomic>

namespace kvtier::client {
namespace {

v1::GrantCreditRequest CreditOf(const SharedPool& pool, std::uint64_t read_id) {
  v1::GrantCreditRequest credit;
  credit.set_transport_id(pool.memory().transport_id());
  credit.set_read_id(read_id);
  return credit;
}

std::uint64_t NextReadId() {
  static std::atomic<std::uint64_t> next{1};
  return next++;
}

}  // namespace

RingReader::RingReader(v1::KvTierService::Stub& stub, std::shared_ptr<SharedPool> pool,
                       SharedPool::Piece piece)
    : pool_(std::move(pool)),
      piece_(std::move(piece)),
      read_id_(NextReadId()),
      credits_(stub, CreditOf(*pool_, read_id_), &v1::GrantCreditRequest::set_chunks) {}

RingReader::~RingReader() {
  if (!server_ended_) SharedPool::Piece::Abandon(std::move(piece_));
}

v1::ReadTarget RingReader::target() const {
  v1::ReadTarget target;
  target.set_transport_id(pool_->memory().transport_id());
  target.set_offset(piece_.offset());
  target.set_bytes(static_cast<std::uint64_t>(piece_.bytes()));
  target.set_ring(true);
  target.set_read_id(read_id_);
  return target;
}

absl::StatusOr<std::span<const std::byte>> RingReader::At(std::uint64_t offset,
                                                          std::uint64_t bytes) const {
  const auto size = static_cast<std::uint64_t>(piece_.bytes());
  const std::uint64_t inside = offset - piece_.offset();  // wraps around where it's before that
  if (inside <= size && bytes <= size - inside)
    return std::span<const std::byte>(piece_.data() + inside, bytes);
  return absl::DataLossError(
      fmt::format("a chunk of {} bytes is said to be at {} of the shared memory; the read's ring "
                  "has {} from {} on",
                  bytes, offset, size, piece_.offset()));
}

void RingReader::Done() { credits_.Tell(++chunks_); }

}  // namespace kvtier::client
