#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "client/cli/terminal.h"

namespace kvtier::client {

// One line on stderr while something takes longer than two seconds: on a terminal rewritten in
// place and wiped at the end, elsewhere (only if asked for) a line now and then.
class Progress {
 public:
  Progress(Terminal& terminal, std::string what, bool asked_for);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();

  // Cheap: prints rarely.
  void Update(std::uint64_t bytes, std::uint64_t total);

 private:
  Terminal& terminal_;
  const std::string what_;
  const bool shown_;
  const absl::Time start_;
  absl::Time next_;
  bool dirty_ = false;  // the terminal's line holds our text
};

}  // namespace kvtier::client
