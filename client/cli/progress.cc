#include "client/cli/progress.h"

#include <fmt/format.h>

#include <utility>

#include "client/cli/table.h"

namespace kvtier::client {
namespace {

constexpr absl::Duration kSilence = absl::Seconds(2);
constexpr absl::Duration kRedraw = absl::Milliseconds(200);
constexpr absl::Duration kNextLine = absl::Seconds(5);
constexpr char kWipe[] = "\r\x1b[K";

}  // namespace

Progress::Progress(Terminal& terminal, std::string what, bool asked_for)
    : terminal_(terminal),
      what_(std::move(what)),
      shown_(terminal.err_is_tty || asked_for),
      start_(terminal.now()),
      next_(start_ + kSilence) {}

Progress::~Progress() {
  if (dirty_) terminal_.err << kWipe << std::flush;
}

void Progress::Update(std::uint64_t bytes, std::uint64_t total) {
  if (!shown_) return;
  const absl::Time now = terminal_.now();
  if (now < next_) return;
  next_ = now + (terminal_.err_is_tty ? kRedraw : kNextLine);
  const double seconds = absl::ToDoubleSeconds(now - start_);
  const double share = total == 0 ? 0 : static_cast<double>(bytes) / static_cast<double>(total);
  const std::string line =
      fmt::format("{}: {} of {} ({:.0f} %), {:.0f} MB/s", what_, FormatBytes(bytes),
                  FormatBytes(total), 100 * share, static_cast<double>(bytes) / 1e6 / seconds);
  if (terminal_.err_is_tty) {
    terminal_.err << kWipe << line << std::flush;
    dirty_ = true;
  } else {
    terminal_.err << line << '\n' << std::flush;
  }
}

}  // namespace kvtier::client
