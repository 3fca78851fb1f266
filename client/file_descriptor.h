#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvtier::client {

// An open file: owns the descriptor, closes it. Reads and writes name their place and are whole or
// an error, so threads may share one.
class FileDescriptor {
 public:
  // Opens a regular file; anything else is INVALID_ARGUMENT, a missing one NOT_FOUND.
  static absl::StatusOr<FileDescriptor> OpenToRead(const std::string& path);
  // Makes a file that does not exist yet; ALREADY_EXISTS if it does.
  static absl::StatusOr<FileDescriptor> Create(const std::string& path);

  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor();

  absl::StatusOr<std::uint64_t> Size() const;
  absl::Status Resize(std::uint64_t size);
  // DATA_LOSS if the file ends before `out` is full.
  absl::Status ReadAt(std::uint64_t offset, std::span<std::byte> out) const;
  absl::Status WriteAt(std::uint64_t offset, std::span<const std::byte> in);
  // Closes now, so that what close() has to say (a full quota on NFS) is heard.
  absl::Status Close();

 private:
  FileDescriptor(int descriptor, std::string path);

  int descriptor_;
  std::string path_;
};

}  // namespace kvtier::client
