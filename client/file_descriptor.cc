#include "client/file_descriptor.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace kvtier::client {
namespace {

absl::Status FromErrno(int error, const std::string& message) {
  return absl::ErrnoToStatus(error, message);
}

}  // namespace

FileDescriptor::FileDescriptor(int descriptor, std::string path)
    : descriptor_(descriptor), path_(std::move(path)) {}

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), path_(std::move(other.path_)) {}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(path_, other.path_);
  return *this;
}

FileDescriptor::~FileDescriptor() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

absl::StatusOr<FileDescriptor> FileDescriptor::OpenToRead(const std::string& path) {
  // O_NONBLOCK: opening a pipe nobody writes to must not wait; for a regular file it says nothing.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return FromErrno(errno, fmt::format("{} cannot be opened", path));
  FileDescriptor file(descriptor, path);
  struct stat facts = {};
  if (::fstat(descriptor, &facts) != 0) return FromErrno(errno, fmt::format("{}: fstat", path));
  if (!S_ISREG(facts.st_mode)) {
    return absl::InvalidArgumentError(fmt::format("{} is not a regular file", path));
  }
  return file;
}

absl::StatusOr<FileDescriptor> FileDescriptor::Create(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) return FromErrno(errno, fmt::format("{} cannot be created", path));
  return FileDescriptor(descriptor, path);
}

absl::StatusOr<std::uint64_t> FileDescriptor::Size() const {
  struct stat facts = {};
  if (::fstat(descriptor_, &facts) != 0) return FromErrno(errno, fmt::format("{}: fstat", path_));
  return static_cast<std::uint64_t>(facts.st_size);
}

absl::Status FileDescriptor::Resize(std::uint64_t size) {
  if (::ftruncate(descriptor_, static_cast<off_t>(size)) != 0) {
    return FromErrno(errno, fmt::format("{} cannot be made {} bytes long", path_, size));
  }
  return absl::OkStatus();
}

absl::Status FileDescriptor::ReadAt(std::uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t got = ::pread(descriptor_, out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FromErrno(errno, fmt::format("{} cannot be read at {}", path_, offset));
    if (got == 0) {
      return absl::DataLossError(
          fmt::format("{} ends at byte {}, {} bytes too early", path_, offset, out.size()));
    }
    offset += static_cast<std::uint64_t>(got);
    out = out.subspan(static_cast<std::size_t>(got));
  }
  return absl::OkStatus();
}

absl::Status FileDescriptor::WriteAt(std::uint64_t offset, std::span<const std::byte> in) {
  while (!in.empty()) {
    const ssize_t put = ::pwrite(descriptor_, in.data(), in.size(), static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return FromErrno(errno, fmt::format("{} cannot be written at {}", path_, offset));
    offset += static_cast<std::uint64_t>(put);
    in = in.subspan(static_cast<std::size_t>(put));
  }
  return absl::OkStatus();
}

absl::Status FileDescriptor::Close() {
  const int descriptor = std::exchange(descriptor_, -1);
  if (descriptor >= 0 && ::close(descriptor) != 0) {
    return FromErrno(errno, fmt::format("{} cannot be closed", path_));
  }
  return absl::OkStatus();
}

}  // namespace kvtier::client
