#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/float_bits.h"

namespace kvtier::kernels {

// The type of one K or V value, in a source, in a page or in a read. In page headers: append only,
// never renumber.
enum class ElementType : std::uint8_t {
  kBf16 = 1,
  kFp16 = 2,
  kFp32 = 3,
  kE4m3 = 4,
  kE5m2 = 5,
  // llama.cpp's blocks of 32 values, of a source that comes in them; an element is one of their
  // bytes.
  kQ8 = 6,
  kQ4 = 7,
};

inline constexpr int kLlamaBlock = 32;
inline constexpr int kLlamaQ8Bytes = 34;
inline constexpr int kLlamaQ4Bytes = 18;

constexpr int ElementBytes(ElementType type) {
  switch (type) {
    case ElementType::kFp32:
      return 4;
    case ElementType::kE4m3:
    case ElementType::kE5m2:
    case ElementType::kQ8:
    case ElementType::kQ4:
      return 1;
    default:
      return 2;
  }
}

// Elements of a row of `dim` values.
constexpr std::int64_t RowElements(ElementType type, std::int64_t dim) {
  if (type == ElementType::kQ8) return dim / kLlamaBlock * kLlamaQ8Bytes;
  if (type == ElementType::kQ4) return dim / kLlamaBlock * kLlamaQ4Bytes;
  return dim;
}
constexpr std::int64_t RowBytes(ElementType type, std::int64_t dim) {
  return RowElements(type, dim) * ElementBytes(type);
}

// Names as users write them.
constexpr const char* ElementName(ElementType type) {
  switch (type) {
    case ElementType::kBf16:
      return "bfloat16";
    case ElementType::kFp16:
      return "float16";
    case ElementType::kFp32:
      return "float32";
    case ElementType::kE4m3:
      return "fp8_e4m3";
    case ElementType::kE5m2:
      return "fp8_e5m2";
    case ElementType::kQ8:
      return "q8_0";
    case ElementType::kQ4:
      return "q4_0";
  }
  return "unknown";
}

constexpr bool IsFp8(ElementType type) {
  return type == ElementType::kE4m3 || type == ElementType::kE5m2;
}

// The largest finite value of an FP8 type.
constexpr float LargestFp8(ElementType type) {
  return type == ElementType::kE4m3 ? E4m3::kLargest : E5m2::kLargest;
}

constexpr bool IsBlocks(ElementType type) {
  return type == ElementType::kQ8 || type == ElementType::kQ4;
}

// Calls f with a value of the C++ type that holds one element, of types that aren't blocks; the
// value itself means nothing.
template <class F>
constexpr auto VisitElement(ElementType type, F&& f) {
  switch (type) {
    case ElementType::kBf16:
      return f(Bf16{});
    case ElementType::kFp16:
      return f(Fp16{});
    case ElementType::kE4m3:
      return f(E4m3{});
    case ElementType::kE5m2:
      return f(E5m2{});
    default:
      return f(float{});
  }
}

}  // namespace kvtier::kernels
