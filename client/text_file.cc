#include "client/text_file.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

namespace kvtier::client {
namespace {

constexpr std::uintmax_t kMaxBytes = 64 << 20;

}  // namespace

absl::StatusOr<std::string> ReadTextFile(const std::string& path) {
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  std::ifstream stream(path, std::ios::binary);
  if (error || !stream) {
    return absl::InvalidArgumentError(fmt::format("{} cannot be read as a file", path));
  }
  if (size > kMaxBytes) {
    return absl::InvalidArgumentError(
        fmt::format("{} has {} bytes; a configuration has at most {}", path, size, kMaxBytes));
  }
  return std::string(std::istreambuf_iterator<char>(stream), {});
}

absl::Status WriteTextFile(const std::string& path, const std::string& text) {
  std::ofstream stream(path, std::ios::binary | std::ios::trunc);
  stream << text;
  stream.close();
  if (stream) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format("{} cannot be written", path));
}

}  // namespace kvtier::client
