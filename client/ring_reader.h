#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/statusor.h"
#include "client/credits.h"
#include "client/shared_memory.h"
#include "kvtier/v1/kv_tier.grpc.pb.h"

namespace kvtier::client {

// The reader's end of a read into a ring of shared memory: finds each chunk's bytes, and gives
// their room back. One thread calls.
class RingReader {
 public:
  // `stub` must outlive what it has called, which Client's does.
  RingReader(v1::KvTierService::Stub& stub, std::shared_ptr<SharedPool> pool,
             SharedPool::Piece piece);
  RingReader(const RingReader&) = delete;
  RingReader& operator=(const RingReader&) = delete;
  // Unless the server has ended the read, it
  // may write to the ring still, which is abandoned then.
  ~RingReader();
  void ServerEnded() { server_ended_ = true; }

  const std::shared_ptr<SharedPool>& pool() const { return pool_; }
  // What the request says of it.
  v1::ReadTarget target() const;

  // `bytes` of the ring from `offset` on. DATA_LOSS where they are not inside.
  absl::StatusOr<std::span<const std::byte>> At(std::uint64_t offset, std::uint64_t bytes) const;
  // The next chunk is done with.
  void Done();

 private:
  std::shared_ptr<SharedPool> pool_;
  SharedPool::Piece piece_;
  std::uint64_t read_id_;
  Credits credits_;
  std::uint64_t chunks_ = 0;
  bool server_ended_ = false;
};

}  // namespace kvtier::client
