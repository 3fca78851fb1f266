#include "client/cli/range.h"

#include <fmt/format.h>

#include <charconv>

namespace kvtier::client {
namespace {

// Leaves `number` as it is for an empty text.
bool ParseNumber(const std::string& text, std::uint64_t& number) {
  if (text.empty()) return true;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && rest == end;
}

}  // namespace

absl::StatusOr<Range> ParseRange(const std::string& text, std::uint64_t limit) {
  Range range;
  std::uint64_t end = limit;
  const std::size_t colon = text.find(':');
  const bool parsed = colon != std::string::npos &&
                      ParseNumber(text.substr(0, colon), range.first) &&
                      ParseNumber(text.substr(colon + 1), end);
  if (!parsed || range.first >= end || end > limit) {
    return absl::InvalidArgumentError(fmt::format(
        "\"{}\" is no range; FIRST:END with FIRST below END and END at most {} is needed", text,
        limit));
  }
  const bool to_the_end = colon + 1 == text.size();
  range.count = to_the_end ? 0 : end - range.first;
  return range;
}

}  // namespace kvtier::client
