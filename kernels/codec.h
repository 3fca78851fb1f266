#pragma once

#include <cstdint>

#include "kernels/element.h"

namespace kvtier::kernels {

// How the values of one head are stored. In page headers: append only, never renumber.
enum class CodecId : std::uint8_t {
  kRaw = 1,               // values as they are, or cast
  kFp8 = 2,               // x / scale as E4M3 or E5M2, scale known beforehand
  kInt8PerTokenHead = 3,  // a scale per token and head, measured
  kFp8PerTokenHead = 4,
  kKiviChannel = 5,  // KIVI's K: groups of consecutive tokens of one channel
  kKiviToken = 6,    // KIVI's V: groups of consecutive channels of one token
  kLlamaQ8 = 7,      // llama.cpp's blocks of 32 channels
  kLlamaQ4 = 8,
  kNvfp4 = 9,  // E2M1 in blocks of 16 channels
  kNvfp4FourOverSix = 10,
  kInt4PerTokenHead = 11,
  kMlaFp8 = 12,   // DeepSeek's cell of 656 bytes
  kFp8Page = 13,  // E4M3, a scale per head and page, measured
};

// What is done to a row before it is encoded, and undone after it is decoded. In page headers, too.
enum class Rotation : std::uint8_t { kNone = 0, kHadamard = 1 };

inline constexpr int kMaxHeadDim = 1024;
inline constexpr int kMaxGroup = 1024;
// KIVI refuses larger magnitudes, so that a group's range always fits its fp16 scale.
inline constexpr float kKiviLimit = 32752.0f;
// The same where scale and minimum are E4M3.
inline constexpr float kKiviE4m3Limit = E4m3::kLargest;

// A codec with its parameters. A head's values are cut into *units* of UnitTokens consecutive
// tokens; a unit is encoded and decoded as a whole and takes the same bytes whatever it holds, so
// unit i of a head starts at i * UnitBytes.
struct Codec {
  CodecId id = CodecId::kRaw;
  ElementType element = ElementType::kBf16;  // kRaw, kFp8: the stored type; KIVI: of scales
  std::uint8_t bits = 0;                     // KIVI: 2, 4 or 8
  std::uint16_t group = 0;  // KIVI: elements that share a scale and a minimum; kFp8Page: tokens
  Rotation rotation = Rotation::kNone;

  friend constexpr bool operator==(const Codec&, const Codec&) = default;
};

// Bytes of one unit of one head. Scales include KIVI's minima.
struct UnitSize {
  std::int64_t codes = 0;
  std::int64_t scales = 0;
  constexpr std::int64_t total() const { return codes + scales; }
};

}  // namespace kvtier::kernels
