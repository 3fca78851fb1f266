#include "service/ready_file.h"

#include <fmt/format.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "cachestore/base/errors.h"

namespace kvtier::service {
namespace {

absl::Status Refuse(const std::string& path, const std::string& why) {
  return cachestore::Error(cachestore::Reason::kInvalidField,
                           fmt::format("ready_file is {}; {}", path, why));
}

}  // namespace

absl::StatusOr<ReadyFile> ReadyFile::Open(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::file_status found = std::filesystem::symlink_status(path, ignored);
  if (std::filesystem::exists(found) && !std::filesystem::is_regular_file(found))
    return Refuse(path, "something other than a regular file is there");
  ReadyFile file(path, nullptr);
  std::filesystem::remove(file.draft_path(), ignored);  // of a process that was killed
  file.draft_.reset(std::fopen(file.draft_path().c_str(), "wxe"));
  if (file.draft_ == nullptr) return file.Failed(errno);
  return file;
}

absl::Status ReadyFile::Write(const std::string& text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), draft_.get()) == text.size();
  if (std::fflush(draft_.get()) != 0 || !written) return Failed(errno);
  if (std::rename(draft_path().c_str(), path_.c_str()) != 0) return Failed(errno);
  draft_.reset();
  return absl::OkStatus();
}

ReadyFile::ReadyFile(std::string path, File draft)
    : path_(std::move(path)), draft_(std::move(draft)) {}

ReadyFile::~ReadyFile() {
  std::error_code ignored;
  if (draft_ != nullptr) std::filesystem::remove(draft_path(), ignored);
}

absl::Status ReadyFile::Failed(int error) const {
  return Refuse(path_,
                fmt::format("can't write there: {}", std::generic_category().message(error)));
}

}  // namespace kvtier::service
