#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/shm_region.h"
#include "transport/unique_fd.h"

namespace kvtier::client {

// Memory that this process shares with a server on its host: what a worker keeps K and V in here,
// the server takes from it and puts into it itself (AppendChunk.k_offset, ReadRequest.target). The
// server has it until this goes. Thread-safe.
class SharedMemory {
 public:
  SharedMemory(std::shared_ptr<transport::ShmRegion> region, transport::UniqueFd connection,
               std::string transport_id)
      : region_(std::move(region)),
        connection_(std::move(connection)),
        transport_id_(std::move(transport_id)) {}

  const std::string& transport_id() const { return transport_id_; }
  std::byte* data() const { return region_->data(); }
  std::int64_t size() const { return region_->size(); }
  // The `bytes` at `offset`; null where not all of them are inside.
  std::byte* At(std::uint64_t offset, std::uint64_t bytes) const {
    return region_->At(offset, bytes);
  }
  std::uint64_t OffsetOf(const std::byte* place) const {
    return static_cast<std::uint64_t>(place - data());
  }

 private:
  const std::shared_ptr<transport::ShmRegion> region_;
  const transport::UniqueFd connection_;
  const std::string transport_id_;
};

// Lends pieces of shared memory to streams and reads. Thread-safe.
class SharedPool : public std::enable_shared_from_this<SharedPool> {
 public:
  // What was taken, until it goes.
  class Piece {
   public:
    Piece(std::shared_ptr<SharedPool> pool, std::int64_t begin, std::int64_t bytes)
        : pool_(std::move(pool)), begin_(begin), bytes_(bytes) {}
    Piece(Piece&& other) noexcept = default;
    Piece& operator=(Piece&& other) noexcept {
      std::swap(pool_, other.pool_);
      std::swap(begin_, other.begin_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Piece() {
      if (pool_ != nullptr) pool_->GiveBack(begin_);
    }
    // The server may still use it, nobody knows for how long: it never comes back, and who
    // finds its pool spoiled takes another.
    static void Abandon(Piece piece) {
      piece.pool_->spoiled_ = true;
      piece.pool_.reset();
    }
    std::byte* data() const { return pool_->memory().data() + begin_; }
    std::uint64_t offset() const { return static_cast<std::uint64_t>(begin_); }
    std::int64_t bytes() const { return bytes_; }

   private:
    std::shared_ptr<SharedPool> pool_;
    std::int64_t begin_;
    std::int64_t bytes_;
  };

  explicit SharedPool(std::shared_ptr<const SharedMemory> memory) : memory_(std::move(memory)) {}

  const SharedMemory& memory() const { return *memory_; }
  bool spoiled() const { return spoiled_; }
  // Nothing where there is no such piece now.
  std::optional<Piece> Take(std::int64_t bytes);

 private:
  friend class Piece;
  void GiveBack(std::int64_t begin);

  const std::shared_ptr<const SharedMemory> memory_;
  std::atomic<bool> spoiled_ = false;
  std::mutex mutex_;
  std::vector<std::pair<std::int64_t, std::int64_t>> taken_;  // begins and ends, ascending
};

}  // namespace kvtier::client
