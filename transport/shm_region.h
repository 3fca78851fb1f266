#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "transport/region.h"
#include "transport/unique_fd.h"

namespace kvtier::transport {

// Memory that two processes of one host share: a memfd that neither can shrink or grow, so that
// what is mapped stays there whatever the other does; the other may write to it at any time, which
// is its own affair. Thread-safe.
class ShmRegion : public Region {
 public:
  // A new one of `bytes`, rounded up to whole pages, whose memory is all taken and paid for by this
  // process. RESOURCE_EXHAUSTED where it can't be had.
  static absl::StatusOr<std::shared_ptr<ShmRegion>> Make(std::int64_t bytes);
  // One that another process made. FAILED_PRECONDITION where touching it could end this process, or
  // make it pay: what is no memfd of ordinary pages, can shrink or grow, can't be written to, or
  // has holes; RESOURCE_EXHAUSTED where it can't be mapped, or is larger than `most_bytes`.
  static absl::StatusOr<std::shared_ptr<ShmRegion>> Map(UniqueFd fd, std::int64_t most_bytes);
  ~ShmRegion();

  // Of one that Make made, to be handed over.
  const UniqueFd& fd() const { return fd_; }

 private:
  using Region::Region;
  static absl::StatusOr<std::shared_ptr<ShmRegion>> MapAll(int fd, std::int64_t bytes);

  UniqueFd fd_;
};

}  // namespace kvtier::transport
