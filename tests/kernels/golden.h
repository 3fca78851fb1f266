#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "tests/kernels/codec_cases.h"

// The inputs of the golden vectors, and how their bytes are written down.
namespace kvtier::kernels::testing {

// ((37 i mod 101) - 50) / 16: exact in every source type.
inline float GoldenValue(int i) { return static_cast<float>(i * 37 % 101 - 50) / 16.0f; }

inline SourceRows GoldenRow(ElementType type) {
  return SourceRows(type, 128, 1).Fill([](std::int64_t, int c) { return GoldenValue(c); });
}

inline std::string Hex(std::uint32_t byte) {
  char text[3];
  std::snprintf(text, sizeof text, "%02x", byte & 0xffu);
  return text;
}
inline std::string Hex(const std::vector<std::uint8_t>& bytes) {
  std::string text;
  for (const std::uint8_t byte : bytes) text += Hex(byte);
  return text;
}
inline std::string Hex(const std::vector<std::byte>& bytes, std::size_t first, std::size_t count) {
  std::string text;
  for (std::size_t i = first; i < first + count; ++i) {
    text += Hex(static_cast<std::uint32_t>(bytes[i]));
  }
  return text;
}

inline int Sum(const std::vector<std::byte>& bytes, std::size_t first, std::size_t count) {
  int sum = 0;
  for (std::size_t i = first; i < first + count; ++i) sum += static_cast<int>(bytes[i]);
  return sum;
}

}  // namespace kvtier::kernels::testing
