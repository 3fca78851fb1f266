#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/float_bits.h"

namespace kvtier::kernels {

// The type of one K or V value, in a source, in a page or in a read. In page headers: append only,
// never renumber.
enum class ElementType : std::uint8_t { kBf16 = 1, kFp16 = 2, kFp32 = 3, kE4m3 = 4, kE5m2 = 5 };

constexpr int ElementBytes(ElementType type) {
  switch (type) {
    case ElementType::kFp32:
      return 4;
    case ElementType::kE4m3:
    case ElementType::kE5m2:
      return 1;
    default:
      return 2;
  }
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
  }
  return "unknown";
}

constexpr bool IsFp8(ElementType type) {
  return type == ElementType::kE4m3 || type == ElementType::kE5m2;
}

// Calls f with a value of the C++ type that holds one element; the value itself means nothing.
template <class F>
auto VisitElement(ElementType type, F&& f) {
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
