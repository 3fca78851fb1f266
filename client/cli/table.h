#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvtier::client {

// A table for people: columns as wide as their widest cell, two spaces between them.
class Table {
 public:
  enum class Align { kLeft, kRight };
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };
  explicit Table(std::vector<Column> columns);

  // As many cells as there are columns.
  void AddRow(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }
  // Title line and rows, each ended by a newline. Without titles if all are empty.
  std::string ToString() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// "1,234,567"
std::string WithThousands(std::uint64_t number);
// "512 B", "1.50 KiB", "3.00 GiB"
std::string FormatBytes(std::uint64_t bytes);
// "3.20x"; "-" for 0, which stands for "nothing held"
std::string FormatRatio(double ratio);

}  // namespace kvtier::client
