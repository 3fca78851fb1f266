#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/file_descriptor.h"
#include "client/safetensors_header.h"

namespace kvtier::client {

// A safetensors file, open to read. Opening reads and checks the header only; data is read when
// asked for. Thread-safe.
class SafetensorsReader {
 public:
  // INVALID_ARGUMENT with file, tensor and numbers if the file isn't what its header says.
  static absl::StatusOr<SafetensorsReader> Open(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }  // by offset
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  const TensorInfo* Find(const std::string& name) const;  // null if there is none

  // Fills `out` with the tensor's bytes from `begin` on. OUT_OF_RANGE past its end.
  absl::Status Read(const TensorInfo& tensor, std::uint64_t begin, std::span<std::byte> out) const;

 private:
  SafetensorsReader(std::string path, FileDescriptor file);

  std::string path_;
  FileDescriptor file_;
  std::uint64_t data_start_ = 0;
  SafetensorsHeader header_;
};

// A safetensors file being written: all tensors are declared first, then their bytes come in any
// order. The file appears under its name when Finish succeeds and not before; without Finish
// nothing stays. One thread at a time.
class SafetensorsWriter {
 public:
  // `tensors` need name, dtype and shape; the order is that of the data in the file. A path that
  // exists is replaced by Finish if it is a regular file, else refused.
  static absl::StatusOr<SafetensorsWriter> Create(const std::string& path,
                                                  SafetensorsHeader header);

  SafetensorsWriter(SafetensorsWriter&& other) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) = delete;
  ~SafetensorsWriter();

  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }

  // Writes bytes of the tensor `tensors()[index]` from `begin` on; each byte once.
  absl::Status Write(std::size_t index, std::uint64_t begin, std::span<const std::byte> in);
  // FAILED_PRECONDITION names a tensor that lacks bytes.
  absl::Status Finish();

 private:
  SafetensorsWriter(std::string path, std::string partial_path, FileDescriptor file);

  std::string path_;
  std::string partial_path_;  // empty once there is nothing to clean up
  FileDescriptor file_;
  std::uint64_t data_start_ = 0;
  SafetensorsHeader header_;
  std::vector<std::uint64_t> written_;  // bytes, by tensor
};

}  // namespace kvtier::client
