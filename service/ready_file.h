#pragma once

#include <cstdio>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvtier::service {

// The file that tells whoever started this process where it listens. Opened before anything is
// served, so that a path that can't be written stops the start; a reader finds all of it or
// nothing.
class ReadyFile {
 public:
  // Opens a draft beside `path`. INVALID_ARGUMENT where that can't be, or where something other
  // than a regular file stands at `path`.
  static absl::StatusOr<ReadyFile> Open(const std::string& path);

  // Writes the draft and renames it into place. Once.
  absl::Status Write(const std::string& text);

  ReadyFile(ReadyFile&&) = default;
  ReadyFile& operator=(ReadyFile&&) = delete;
  // Removes a draft that was not written.
  ~ReadyFile();

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  using File = std::unique_ptr<std::FILE, Close>;
  ReadyFile(std::string path, File draft);

  std::string draft_path() const { return path_ + ".new"; }
  absl::Status Failed(int error) const;

  std::string path_;
  File draft_;
};

}  // namespace kvtier::service
