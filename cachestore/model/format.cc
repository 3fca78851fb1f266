#include "cachestore/model/format.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <iterator>
#include <optional>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"

namespace kvtier::cachestore {
namespace {

using kernels::Codec;
using kernels::CodecId;
using Kind = Format::Kind;

constexpr int kDefaultGroup = 32;
constexpr int kDefaultResidual = 128;

struct Named {
  const char* name;
  Format format;
};

// The first name of a format is its short one.
const std::vector<Named>& Names() {
  static const std::vector<Named> names = {
      {"auto", {.kind = Kind::kSource}},
      {"float16", {.kind = Kind::kCast, .element = ElementType::kFp16}},
      {"bfloat16", {.kind = Kind::kCast, .element = ElementType::kBf16}},
      {"fp8_e4m3", {.kind = Kind::kFp8, .element = ElementType::kE4m3}},
      {"fp8", {.kind = Kind::kFp8, .element = ElementType::kE4m3}},
      {"fp8_e5m2", {.kind = Kind::kFp8, .element = ElementType::kE5m2}},
      {"int8_per_token_head", {.kind = Kind::kPlain, .codec = CodecId::kInt8PerTokenHead}},
      {"fp8_per_token_head", {.kind = Kind::kPlain, .codec = CodecId::kFp8PerTokenHead}},
      {"q8_0", {.kind = Kind::kPlain, .codec = CodecId::kLlamaQ8}},
      {"q4_0", {.kind = Kind::kPlain, .codec = CodecId::kLlamaQ4}},
      {"kivi2",
       {.kind = Kind::kKivi,
        .k_bits = 2,
        .v_bits = 2,
        .group = kDefaultGroup,
        .residual_tokens = kDefaultResidual}},
      {"kivi4",
       {.kind = Kind::kKivi,
        .k_bits = 4,
        .v_bits = 4,
        .group = kDefaultGroup,
        .residual_tokens = kDefaultResidual}},
      {"k4v2",
       {.kind = Kind::kKivi,
        .k_bits = 4,
        .v_bits = 2,
        .group = kDefaultGroup,
        .residual_tokens = kDefaultResidual}},
  };
  return names;
}

// "kivi(2,2,32,128)": four numbers without spaces.
std::optional<Format> ParseKivi(const std::string& text) {
  Format format{.kind = Kind::kKivi};
  absl::string_view rest = text;
  if (!absl::ConsumePrefix(&rest, "kivi(") || !absl::ConsumeSuffix(&rest, ")")) return std::nullopt;
  const std::vector<std::string> numbers = absl::StrSplit(rest, ',');
  int* const into[] = {&format.k_bits, &format.v_bits, &format.group, &format.residual_tokens};
  if (numbers.size() != std::size(into)) return std::nullopt;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const bool plain = numbers[i].find_first_not_of("-0123456789") == std::string::npos;
    if (!plain || !absl::SimpleAtoi(numbers[i], into[i])) return std::nullopt;
  }
  return format;
}

absl::Status CheckKivi(const Format& f) {
  const auto refuse = [](const std::string& what) { return Error(Reason::kInvalidField, what); };
  if (f.group < 1 || f.group > kernels::kMaxGroup) {
    return refuse(fmt::format("kivi group_size is {}; want 1 to {}", f.group, kernels::kMaxGroup));
  }
  for (const auto& [field, bits] : {std::pair{"k_bits", f.k_bits}, std::pair{"v_bits", f.v_bits}}) {
    if (bits != 2 && bits != 4 && bits != 8)
      return refuse(fmt::format("kivi {} is {}; want 2, 4 or 8", field, bits));
    if (f.group * bits % 8 != 0) {
      return refuse(fmt::format("kivi group_size is {}; {} codes of {} bits must fill whole bytes",
                                f.group, f.group, bits));
    }
  }
  if (f.residual_tokens < 0 || f.residual_tokens > 4096 || f.residual_tokens % f.group != 0) {
    return refuse(
        fmt::format("kivi residual_tokens is {}; want 0 to 4096, a multiple of group_size {}",
                    f.residual_tokens, f.group));
  }
  return absl::OkStatus();
}

Codec KiviCodec(const Format& format, CodecId id, int bits) {
  return {.id = id,
          .bits = static_cast<std::uint8_t>(bits),
          .group = static_cast<std::uint16_t>(format.group)};
}

Codec PlainCodec(const Format& format, ElementType source) {
  switch (format.kind) {
    case Kind::kCast:
      return {.id = CodecId::kRaw, .element = format.element};
    case Kind::kFp8:
      return {.id = CodecId::kFp8, .element = format.element};
    case Kind::kPlain:
      return {.id = format.codec};
    default:
      return {.id = CodecId::kRaw, .element = source};
  }
}

}  // namespace

absl::StatusOr<Format> ParseFormat(const std::string& kv_cache_dtype) {
  if (kv_cache_dtype.empty()) return Format{};
  std::vector<std::string> known;
  for (const Named& named : Names()) {
    if (kv_cache_dtype == named.name) return named.format;
    known.emplace_back(named.name);
  }
  if (const std::optional<Format> kivi = ParseKivi(kv_cache_dtype); kivi.has_value()) {
    KVT_RETURN_IF_ERROR(CheckKivi(*kivi));
    return *kivi;
  }
  return Error(Reason::kUnknownFormat,
               fmt::format("kv_cache_dtype is \"{:.64}\"; want one of {} or "
                           "kivi(k_bits,v_bits,group_size,residual_tokens)",
                           kv_cache_dtype, fmt::join(known, ", ")));
}

std::string FormatName(const Format& format) {
  for (const Named& named : Names()) {
    if (format == named.format) return named.name;
  }
  return fmt::format("kivi({},{},{},{})", format.k_bits, format.v_bits, format.group,
                     format.residual_tokens);
}

TensorFormat KFormat(const Format& format, ElementType source) {
  if (format.kind != Kind::kKivi) return {PlainCodec(format, source), {}};
  const int block = format.residual_tokens > 0 ? format.residual_tokens : format.group;
  return {KiviCodec(format, CodecId::kKiviChannel, format.k_bits), {.window = 0, .block = block}};
}

TensorFormat VFormat(const Format& format, ElementType source) {
  if (format.kind != Kind::kKivi) return {PlainCodec(format, source), {}};
  return {KiviCodec(format, CodecId::kKiviToken, format.v_bits),
          {.window = format.residual_tokens, .block = 1}};
}

}  // namespace kvtier::cachestore
