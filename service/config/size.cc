#include "service/config/size.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <iterator>
#include <limits>

namespace kvtier::service {

std::optional<std::int64_t> ParseSize(const std::string& text) {
  if (text == "0") return 0;
  // CLI11 takes a unit alone for one of it, and what begins with 0 for octal or hexadecimal.
  if (text.empty() || text.front() < '1' || text.front() > '9') return std::nullopt;
  std::string bytes = text;
  std::uint64_t value = 0;
  try {
    CLI::AsSizeValue(/*kb_is_1000=*/true)(bytes);
  } catch (const CLI::ValidationError&) {
    return std::nullopt;
  }
  if (!CLI::detail::lexical_cast(bytes, value) ||
      value > std::numeric_limits<std::int64_t>::max()) {
    return std::nullopt;
  }
  return static_cast<std::int64_t>(value);
}

std::string FormatSize(std::int64_t bytes) {
  constexpr const char* kUnits[] = {"", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; bytes != 0 && bytes % 1024 == 0 && unit + 1 < std::size(kUnits); ++unit) bytes /= 1024;
  return fmt::format("{}{}", bytes, kUnits[unit]);
}

}  // namespace kvtier::service
