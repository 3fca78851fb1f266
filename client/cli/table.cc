#include "client/cli/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <locale>
#include <utility>

namespace kvtier::client {
namespace {

constexpr char kGap[] = "  ";

// Characters, not bytes: what continues a UTF-8 character takes no place of its own.
std::size_t Width(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

class Thousands final : public std::numpunct<char> {
 protected:
  char do_thousands_sep() const override { return ','; }
  std::string do_grouping() const override { return "\3"; }
};

}  // namespace

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

void Table::AddRow(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::ToString() const {
  std::vector<std::string> titles;
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    titles.push_back(columns_[c].title);
    widths.push_back(Width(titles.back()));
    for (const auto& row : rows_) widths.back() = std::max(widths.back(), Width(row[c]));
  }
  std::string text;
  const auto add_line = [&](const std::vector<std::string>& cells) {
    std::string line;
    for (std::size_t c = 0; c < cells.size(); ++c) {
      const std::string padding(widths[c] - Width(cells[c]), ' ');
      if (c > 0) line += kGap;
      line += columns_[c].align == Align::kRight ? padding + cells[c] : cells[c] + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  const bool titled = std::any_of(titles.begin(), titles.end(),
                                  [](const std::string& title) { return !title.empty(); });
  if (titled) add_line(titles);
  for (const auto& row : rows_) add_line(row);
  return text;
}

std::string WithThousands(std::uint64_t number) {
  static const std::locale grouping(std::locale::classic(), new Thousands);  // the locale owns it
  return fmt::format(grouping, "{:L}", number);
}

std::string FormatBytes(std::uint64_t bytes) {
  constexpr std::array kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  // 1023.995 would be printed as 1024.00.
  while (value >= 1023.995 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.2f} {}", value, kUnits[unit]);
}

std::string FormatRatio(double ratio) {
  return ratio > 0 ? fmt::format("{:.2f}x", ratio) : std::string("-");
}

}  // namespace kvtier::client
