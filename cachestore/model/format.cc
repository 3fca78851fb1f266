#include "cachestore/model/format.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "kernels/codec_table.h"

namespace kvtier::cachestore {
namespace {

using kernels::Codec;
using kernels::CodecId;
using kernels::Rotation;
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
      {"int4_per_token_head", {.kind = Kind::kPlain, .codec = CodecId::kInt4PerTokenHead}},
      {"nvfp4", {.kind = Kind::kPlain, .codec = CodecId::kNvfp4}},
      {"nvfp4_4over6", {.kind = Kind::kPlain, .codec = CodecId::kNvfp4FourOverSix}},
      {"fp8_ds_mla", {.kind = Kind::kPlain, .codec = CodecId::kMlaFp8}},
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

// An option: its text, whether a format may have it, and what it sets.
struct Option {
  const char* text;
  bool (*taken_by)(const Format&);
  bool (*is_set)(const Format&);
  void (*set)(Format&);
};

// Scales that are known beforehand are those of keys that aren't rotated, int4_per_token_head has a
// rotation of its own, and engines know where fp8_ds_mla's rotary part lies.
bool MayRotate(const Format& f) {
  if (f.kind == Kind::kFp8) return f.page_scale;
  if (f.kind != Kind::kPlain) return f.kind == Kind::kKivi;
  return !kernels::RowOf(f.codec).takes_scale && f.codec != CodecId::kInt4PerTokenHead &&
         f.codec != CodecId::kMlaFp8;
}

constexpr Option kOptions[] = {
    {"scale=page",
     [](const Format& f) { return f.kind == Kind::kFp8 && f.element == ElementType::kE4m3; },
     [](const Format& f) { return f.page_scale; }, [](Format& f) { f.page_scale = true; }},
    {"scales=fp8_e4m3", [](const Format& f) { return f.kind == Kind::kKivi; },
     [](const Format& f) { return f.e4m3_scales; }, [](Format& f) { f.e4m3_scales = true; }},
    {"k_rotation=hadamard", MayRotate,
     [](const Format& f) { return f.k_rotation != Rotation::kNone; },
     [](Format& f) { f.k_rotation = Rotation::kHadamard; }},
};

std::optional<Format> FormatNamed(const std::string& name) {
  for (const Named& named : Names()) {
    if (name == named.name) return named.format;
  }
  return std::nullopt;
}

// The four numbers of "kivi(2,2,32,128)", which may have options behind them.
std::optional<Format> ParseKivi(const std::vector<std::string>& items) {
  Format format{.kind = Kind::kKivi};
  int* const into[] = {&format.k_bits, &format.v_bits, &format.group, &format.residual_tokens};
  if (items.size() < std::size(into)) return std::nullopt;
  for (std::size_t i = 0; i < std::size(into); ++i) {
    const bool plain = items[i].find_first_not_of("-0123456789") == std::string::npos;
    if (!plain || !absl::SimpleAtoi(items[i], into[i])) return std::nullopt;
  }
  return format;
}

// In whatever order they are written.
absl::Status SetOptions(const std::string& name, std::vector<std::string> items, Format& format) {
  std::vector<std::string> taken;
  for (const Option& option : kOptions) {
    if (!option.taken_by(format)) continue;
    taken.emplace_back(option.text);
    const auto item = std::find(items.begin(), items.end(), option.text);
    if (item == items.end()) continue;
    option.set(format);
    items.erase(item);
  }
  if (items.empty()) return absl::OkStatus();
  return Error(
      Reason::kUnknownFormat,
      fmt::format("kv_cache_dtype {:.64} has the option \"{:.64}\"; it takes {}", name, items[0],
                  taken.empty() ? "none" : fmt::format("{}", fmt::join(taken, ", "))));
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
          .element = format.e4m3_scales ? ElementType::kE4m3 : ElementType::kFp16,
          .bits = static_cast<std::uint8_t>(bits),
          .group = static_cast<std::uint16_t>(format.group)};
}

TensorFormat PlainFormat(const Format& format, ElementType source, int page_tokens) {
  switch (format.kind) {
    case Kind::kCast:
      return {{.id = CodecId::kRaw, .element = format.element}, {}};
    case Kind::kFp8:
      if (!format.page_scale) return {{.id = CodecId::kFp8, .element = format.element}, {}};
      return {{.id = CodecId::kFp8Page,
               .element = format.element,
               .group = static_cast<std::uint16_t>(page_tokens)},
              {.window = 0, .block = page_tokens}};
    case Kind::kPlain:
      return {{.id = format.codec}, {}};
    default:
      return {{.id = CodecId::kRaw, .element = source}, {}};
  }
}

}  // namespace

absl::StatusOr<Format> ParseFormat(const std::string& kv_cache_dtype) {
  if (kv_cache_dtype.empty()) return Format{};
  absl::string_view rest = kv_cache_dtype;
  const std::string name(rest.substr(0, rest.find('(')));
  rest.remove_prefix(name.size());
  std::vector<std::string> items;
  const bool in_parentheses = absl::ConsumePrefix(&rest, "(") && absl::ConsumeSuffix(&rest, ")");
  if (in_parentheses) items = absl::StrSplit(rest, ',');
  std::optional<Format> format = FormatNamed(name);
  if (name == "kivi") {
    format = ParseKivi(items);
    if (format.has_value()) items.erase(items.begin(), items.begin() + 4);
  }
  if (!format.has_value() || (!in_parentheses && !rest.empty())) {
    return Error(Reason::kUnknownFormat,
                 fmt::format("kv_cache_dtype is \"{:.64}\"; want one of {}, fp8 or "
                             "kivi(k_bits,v_bits,group_size,residual_tokens)",
                             kv_cache_dtype, fmt::join(FormatNames(), ", ")));
  }
  if (name == "kivi") {
    KVT_RETURN_IF_ERROR(CheckKivi(*format));
  }
  KVT_RETURN_IF_ERROR(SetOptions(name, std::move(items), *format));
  return *format;
}

std::vector<std::string> FormatNames() {
  std::vector<std::string> names;
  for (const Named& named : Names()) {
    if (FormatName(named.format) == named.name) names.emplace_back(named.name);
  }
  return names;
}

std::string FormatName(const Format& format) {
  Format plain = format;  // without options
  plain.page_scale = plain.e4m3_scales = false;
  plain.k_rotation = Rotation::kNone;
  std::string name;
  std::vector<std::string> items;
  for (const Named& named : Names()) {
    if (name.empty() && plain == named.format) name = named.name;
  }
  if (name.empty()) {
    name = "kivi";
    for (const int number : {plain.k_bits, plain.v_bits, plain.group, plain.residual_tokens})
      items.push_back(std::to_string(number));
  }
  for (const Option& option : kOptions) {
    if (option.is_set(format)) items.emplace_back(option.text);
  }
  return items.empty() ? name : fmt::format("{}({})", name, fmt::join(items, ","));
}

TensorFormat KFormat(const Format& format, ElementType source, int page_tokens) {
  TensorFormat k = PlainFormat(format, source, page_tokens);
  if (format.kind == Kind::kKivi) {
    const int block = format.residual_tokens > 0 ? format.residual_tokens : format.group;
    k = {KiviCodec(format, CodecId::kKiviChannel, format.k_bits), {.window = 0, .block = block}};
  }
  k.codec.rotation = format.k_rotation;
  return k;
}

TensorFormat VFormat(const Format& format, ElementType source, int page_tokens) {
  if (format.kind != Kind::kKivi) return PlainFormat(format, source, page_tokens);
  return {KiviCodec(format, CodecId::kKiviToken, format.v_bits),
          {.window = format.residual_tokens, .block = 1}};
}

}  // namespace kvtier::cachestore
