#include "service/config/field_type.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "cachestore/model/rungs.h"
#include "service/config/size.h"

namespace kvtier::service {
namespace {

template <class T>
FieldType IntegerOf(T Config::*field, IntegerBounds bounds) {
  FieldType type;
  type.parse = [=](const std::string& text, Config& config) {
    std::int64_t value = 0;
    if (!absl::SimpleAtoi(text, &value) || value < bounds.min || value > bounds.max ||
        value % bounds.multiple_of != 0) {
      return false;
    }
    config.*field = static_cast<T>(value);
    return true;
  };
  type.show = [=](const Config& config) { return std::to_string(config.*field); };
  type.allowed = bounds.multiple_of == 1
                     ? fmt::format("an integer from {} to {}", bounds.min, bounds.max)
                     : fmt::format("a multiple of {} from {} to {}", bounds.multiple_of, bounds.min,
                                   bounds.max);
  return type;
}

template <class T>
FieldType SizeOf(T Config::*field, SizeBounds bounds) {
  FieldType type;
  type.parse = [=](const std::string& text, Config& config) {
    const std::optional<std::int64_t> value = ParseSize(text);
    if (!value.has_value() || *value < bounds.min || *value > bounds.max) return false;
    config.*field = static_cast<T>(*value);
    return true;
  };
  type.show = [=](const Config& config) { return FormatSize(config.*field); };
  type.allowed =
      fmt::format("a size from {} to {}", FormatSize(bounds.min), FormatSize(bounds.max));
  return type;
}

template <class T>
FieldType OneOfWords(T Config::*field, Words<T> words) {
  std::vector<std::string> names;
  for (const auto& [name, value] : words) names.push_back(name);
  FieldType type;
  type.allowed =
      names.size() == 1
          ? names.back()
          : fmt::format("{} or {}", fmt::join(names.begin(), names.end() - 1, ", "), names.back());
  type.parse = [=](const std::string& text, Config& config) {
    const auto found =
        std::find_if(words.begin(), words.end(), [&](const auto& w) { return w.first == text; });
    if (found == words.end()) return false;
    config.*field = found->second;
    return true;
  };
  type.show = [=](const Config& config) {
    return std::find_if(words.begin(), words.end(),
                        [&](const auto& w) { return w.second == config.*field; })
        ->first;
  };
  return type;
}

FieldType TextOf(std::string Config::*field, bool (*allows)(const std::string&),
                 const char* allowed) {
  FieldType type;
  type.parse = [=](const std::string& text, Config& config) {
    if (!allows(text)) return false;
    config.*field = text;
    return true;
  };
  type.show = [=](const Config& config) { return config.*field; };
  type.allowed = allowed;
  return type;
}

bool IsIpv6(const std::string& host) { return host.find(':') != std::string::npos; }

}  // namespace

HostAndPort SplitAddress(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  if (colon == std::string::npos) return {};
  const std::string port = address.substr(colon + 1);
  int number = 0;
  const bool digits = !port.empty() && port.find_first_not_of("0123456789") == std::string::npos;
  if (!digits || !absl::SimpleAtoi(port, &number) || number > 65535) return {};

  std::string host = address.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  // What is between brackets is IPv6, and IPv6 is between brackets.
  if (bracketed != IsIpv6(host)) return {};
  const auto allowed = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-' || c == '_' ||
           c == ':' || c == '%';
  };
  if (!std::all_of(host.begin(), host.end(), allowed)) return {};
  return {host, number};
}

FieldType Integer(int Config::*field, IntegerBounds bounds) { return IntegerOf(field, bounds); }
FieldType Integer(std::int64_t Config::*field, IntegerBounds bounds) {
  return IntegerOf(field, bounds);
}

FieldType Size(int Config::*field, SizeBounds bounds) { return SizeOf(field, bounds); }
FieldType Size(std::int64_t Config::*field, SizeBounds bounds) { return SizeOf(field, bounds); }

FieldType Duration(absl::Duration Config::*field, DurationBounds bounds) {
  FieldType type;
  type.parse = [=](const std::string& text, Config& config) {
    absl::Duration value;
    if (!absl::ParseDuration(text, &value) || value < bounds.min || value > bounds.max)
      return false;
    config.*field = value;
    return true;
  };
  type.show = [=](const Config& config) { return absl::FormatDuration(config.*field); };
  type.allowed = fmt::format("a duration from {} to {}", absl::FormatDuration(bounds.min),
                             absl::FormatDuration(bounds.max));
  return type;
}

FieldType Address(std::string Config::*field) {
  return TextOf(
      field, [](const std::string& text) { return !SplitAddress(text).host.empty(); },
      "HOST:PORT, port 0 for any free one");
}

FieldType HttpAddressOrOff(std::string Config::*field) {
  return TextOf(
      field,
      [](const std::string& text) {
        const std::string host = SplitAddress(text).host;
        return text.empty() || (!host.empty() && !IsIpv6(host));
      },
      "HOST:PORT without IPv6, port 0 for any free one, or empty");
}

FieldType Device(std::string Config::*field) {
  return TextOf(
      field,
      [](const std::string& text) {
        if (text == "host" || text == "auto") return true;
        return absl::StartsWith(text, "cuda:") && text.size() > 5 && text.size() <= 8 &&
               text.find_first_not_of("0123456789", 5) == std::string::npos;
      },
      "host, auto or cuda:N");
}

FieldType PathOrNone(std::string Config::*field) {
  return TextOf(
      field, [](const std::string&) { return true; }, "a path, or empty");
}

FieldType SocketOrNone(std::string Config::*field) {
  constexpr std::size_t kLongest = 107;  // of sockaddr_un
  return TextOf(
      field,
      [](const std::string& text) {
        if (text.empty() || text == "auto") return true;
        return text.size() <= kLongest && text.size() > 1 && (text[0] == '/' || text[0] == '@');
      },
      "auto, an absolute path or @NAME of at most 107 bytes, or empty");
}

FieldType Ladder(std::vector<std::string> Config::*field) {
  FieldType type;
  type.allowed = "formats with \">\" between them";
  type.parse = [=](const std::string& text, Config& config) {
    auto ladder = cachestore::LadderFrom(text);
    if (!ladder.ok()) return false;
    config.*field = *std::move(ladder);
    return true;
  };
  type.show = [=](const Config& config) {
    return fmt::format("{}", fmt::join(config.*field, ">"));
  };
  return type;
}

FieldType OneOf(std::string Config::*field, const std::vector<std::string>& words) {
  Words<std::string> pairs;
  for (const std::string& word : words) pairs.emplace_back(word, word);
  return OneOfWords(field, std::move(pairs));
}
FieldType OneOf(LogLevel Config::*field, Words<LogLevel> words) {
  return OneOfWords(field, std::move(words));
}
FieldType OneOf(LogFormat Config::*field, Words<LogFormat> words) {
  return OneOfWords(field, std::move(words));
}

}  // namespace kvtier::service
