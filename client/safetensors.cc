#include "client/safetensors.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <system_error>
#include <utility>

#include "cachestore/base/status_macros.h"

namespace kvtier::client {
namespace {

constexpr std::uint64_t kLengthBytes = 8;
constexpr int kPartialNames = 100;  // left-overs of killed processes that are stepped around

absl::Status Annotate(const absl::Status& status, const std::string& path) {
  return absl::Status(status.code(), fmt::format("{}: {}", path, std::string(status.message())));
}

absl::StatusOr<std::uint64_t> ReadHeaderLength(const FileDescriptor& file, std::uint64_t size) {
  if (size < kLengthBytes) {
    return absl::InvalidArgumentError(fmt::format(
        "the file has {} bytes; a safetensors file has at least {}", size, kLengthBytes));
  }
  std::array<std::byte, kLengthBytes> raw = {};
  KVT_RETURN_IF_ERROR(file.ReadAt(0, raw));
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < raw.size(); ++i)
    length |= std::to_integer<std::uint64_t>(raw[i]) << (8 * i);
  if (length > size - kLengthBytes || length > kMaxSafetensorsHeader) {
    return absl::InvalidArgumentError(
        fmt::format("no safetensors file: the header's length is {}; at most {} bytes follow it, "
                    "and {} are allowed",
                    length, size - kLengthBytes, kMaxSafetensorsHeader));
  }
  return length;
}

}  // namespace

SafetensorsReader::SafetensorsReader(std::string path, FileDescriptor file)
    : path_(std::move(path)), file_(std::move(file)) {}

absl::StatusOr<SafetensorsReader> SafetensorsReader::Open(const std::string& path) {
  KVT_ASSIGN_OR_RETURN(FileDescriptor file, FileDescriptor::OpenToRead(path));
  KVT_ASSIGN_OR_RETURN(const std::uint64_t size, file.Size());
  absl::StatusOr<std::uint64_t> length = ReadHeaderLength(file, size);
  if (!length.ok()) return Annotate(length.status(), path);
  std::string text(*length, '\0');
  KVT_RETURN_IF_ERROR(file.ReadAt(kLengthBytes, std::as_writable_bytes(std::span(text))));
  SafetensorsReader reader(path, std::move(file));
  reader.data_start_ = kLengthBytes + *length;
  absl::StatusOr<SafetensorsHeader> header =
      ParseSafetensorsHeader(text, size - reader.data_start_);
  if (!header.ok()) return Annotate(header.status(), path);
  reader.header_ = *std::move(header);
  return reader;
}

const TensorInfo* SafetensorsReader::Find(const std::string& name) const {
  for (const TensorInfo& tensor : header_.tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

absl::Status SafetensorsReader::Read(const TensorInfo& tensor, std::uint64_t begin,
                                     std::span<std::byte> out) const {
  if (begin > tensor.size || out.size() > tensor.size - begin) {
    return absl::OutOfRangeError(
        fmt::format("bytes [{}, {}) of tensor {} were asked for; it has {}", begin,
                    begin + out.size(), tensor.name, tensor.size));
  }
  return file_.ReadAt(data_start_ + tensor.offset + begin, out);
}

SafetensorsWriter::SafetensorsWriter(std::string path, std::string partial_path,
                                     FileDescriptor file)
    : path_(std::move(path)), partial_path_(std::move(partial_path)), file_(std::move(file)) {}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&& other) noexcept
    : path_(std::move(other.path_)),
      partial_path_(std::exchange(other.partial_path_, {})),
      file_(std::move(other.file_)),
      data_start_(other.data_start_),
      header_(std::move(other.header_)),
      written_(std::move(other.written_)) {}

SafetensorsWriter::~SafetensorsWriter() {
  std::error_code ignored;
  if (!partial_path_.empty()) std::filesystem::remove(partial_path_, ignored);
}

absl::StatusOr<SafetensorsWriter> SafetensorsWriter::Create(const std::string& path,
                                                            SafetensorsHeader header) {
  KVT_ASSIGN_OR_RETURN(const std::string text, BuildSafetensorsHeader(header));
  std::error_code ignored;
  const std::filesystem::file_status there = std::filesystem::status(path, ignored);
  if (std::filesystem::exists(there) && !std::filesystem::is_regular_file(there)) {
    return absl::InvalidArgumentError(
        fmt::format("{} exists and is not a regular file; it won't be replaced", path));
  }
  // Beside the target, so that the rename at the end stays within one file system.
  for (int attempt = 0;; ++attempt) {
    std::string partial = fmt::format("{}.{}-{}.partial", path, ::getpid(), attempt);
    absl::StatusOr<FileDescriptor> file = FileDescriptor::Create(partial);
    if (absl::IsAlreadyExists(file.status()) && attempt < kPartialNames) continue;
    if (!file.ok()) return file.status();
    SafetensorsWriter writer(path, std::move(partial), *std::move(file));
    writer.data_start_ = text.size();
    writer.header_ = std::move(header);
    writer.written_.resize(writer.header_.tensors.size());
    std::uint64_t end = writer.data_start_;
    for (const TensorInfo& tensor : writer.header_.tensors) end += tensor.size;
    KVT_RETURN_IF_ERROR(writer.file_.Resize(end));
    KVT_RETURN_IF_ERROR(writer.file_.WriteAt(0, std::as_bytes(std::span(text))));
    return writer;
  }
}

absl::Status SafetensorsWriter::Write(std::size_t index, std::uint64_t begin,
                                      std::span<const std::byte> in) {
  if (index >= header_.tensors.size()) {
    return absl::InvalidArgumentError(
        fmt::format("tensor index {} was given; {} are declared", index, header_.tensors.size()));
  }
  const TensorInfo& tensor = header_.tensors[index];
  if (begin > tensor.size || in.size() > tensor.size - begin) {
    return absl::OutOfRangeError(fmt::format("bytes [{}, {}) of tensor {} were given; it has {}",
                                             begin, begin + in.size(), tensor.name, tensor.size));
  }
  KVT_RETURN_IF_ERROR(file_.WriteAt(data_start_ + tensor.offset + begin, in));
  written_[index] += in.size();
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Finish() {
  for (std::size_t i = 0; i < written_.size(); ++i) {
    if (written_[i] != header_.tensors[i].size) {
      return absl::FailedPreconditionError(fmt::format("tensor {} got {} of its {} bytes",
                                                       header_.tensors[i].name, written_[i],
                                                       header_.tensors[i].size));
    }
  }
  KVT_RETURN_IF_ERROR(file_.Close());
  std::error_code error;
  std::filesystem::rename(partial_path_, path_, error);
  if (error) {
    return absl::ErrnoToStatus(error.value(), fmt::format("{} cannot be put in place", path_));
  }
  partial_path_.clear();
  return absl::OkStatus();
}

}  // namespace kvtier::client
