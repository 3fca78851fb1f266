#include "transport/shm_region.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>

#include "cachestore/base/status_macros.h"
#include "transport/last_error.h"

namespace kvtier::transport {
namespace {

constexpr unsigned kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
// st_blocks counts these, whatever the file system's blocks are.
constexpr std::int64_t kStatBlock = 512;
// As much of a region is in the page tables before the first transfer, not by its first touch.
constexpr std::int64_t kPopulated = std::int64_t{64} << 20;

absl::Status Unfit(const std::string& what) {
  return absl::FailedPreconditionError(
      fmt::format("the shared memory {}; want a memfd of ordinary pages, with all of its memory "
                  "taken, sealed against shrinking and growing, and open for writing",
                  what));
}

absl::Status CheckSeals(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) return Unfit("is no memfd");
  const auto set = static_cast<unsigned>(seals);
  if ((set & F_SEAL_SHRINK) == 0) return Unfit("is not sealed against shrinking");
  if ((set & F_SEAL_GROW) == 0) return Unfit("is not sealed against growing");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<ShmRegion>> ShmRegion::Make(std::int64_t bytes) {
  const std::int64_t page = sysconf(_SC_PAGESIZE);
  bytes = (bytes + page - 1) / page * page;
  UniqueFd fd(memfd_create("kvtier", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.ok() || ftruncate(fd.get(), bytes) != 0 || fallocate(fd.get(), 0, 0, bytes) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    return absl::ResourceExhaustedError(
        fmt::format("{} bytes of shared memory can't be had: {}", bytes, LastError()));
  }
  KVT_ASSIGN_OR_RETURN(std::shared_ptr<ShmRegion> region, MapAll(fd.get(), bytes));
  region->fd_ = std::move(fd);
  return region;
}

absl::StatusOr<std::shared_ptr<ShmRegion>> ShmRegion::Map(UniqueFd fd, std::int64_t most_bytes) {
  // Before its size is looked at: from here on that stays as it is.
  KVT_RETURN_IF_ERROR(CheckSeals(fd.get()));
  struct statfs file_system {};
  // One of huge pages has no more of them than are free when it's touched, and else sends SIGBUS.
  if (fstatfs(fd.get(), &file_system) != 0 || file_system.f_type != TMPFS_MAGIC)
    return Unfit("is not of ordinary pages");
  struct stat file {};
  if (fstat(fd.get(), &file) != 0) return Unfit("can't be looked at: " + LastError());
  if (file.st_size <= 0) return Unfit("is empty");
  if (file.st_size > most_bytes) {
    return absl::ResourceExhaustedError(
        fmt::format("the shared memory has {} bytes; there is room for {} more (--max-shm)",
                    file.st_size, most_bytes));
  }
  // Who touches a hole pays for it.
  if (file.st_blocks * kStatBlock < file.st_size) {
    return Unfit(fmt::format("has {} of its {} bytes", file.st_blocks * kStatBlock, file.st_size));
  }
  return MapAll(fd.get(), file.st_size);  // the mapping needs no descriptor
}

absl::StatusOr<std::shared_ptr<ShmRegion>> ShmRegion::MapAll(int fd, std::int64_t bytes) {
  void* const data =
      mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {  // NOLINT(cppcoreguidelines-pro-type-cstyle-cast): the macro's
    if (errno == EPERM || errno == EACCES) return Unfit("can't be written to");
    return absl::ResourceExhaustedError(
        fmt::format("{} bytes of shared memory can't be mapped: {}", bytes, LastError()));
  }
  // Older kernels than 5.14 can't: it's as well without.
  madvise(data, static_cast<std::size_t>(std::min(bytes, kPopulated)), MADV_POPULATE_WRITE);
  return std::shared_ptr<ShmRegion>(new ShmRegion(static_cast<std::byte*>(data), bytes));
}

ShmRegion::~ShmRegion() { munmap(data(), static_cast<std::size_t>(size())); }

}  // namespace kvtier::transport
