#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "service/config/config.h"

namespace kvtier::service {

// How a field of Config is written, read and bounded.
struct FieldType {
  // Takes the text over into its field. False, and the field stays as it was, where it is not
  // allowed.
  std::function<bool(const std::string& text, Config& config)> parse;
  std::function<std::string(const Config& config)> show;  // a text that parse takes
  std::string allowed;                                    // for people: "an integer from 1 to 9"
};

struct IntegerBounds {
  std::int64_t min = 0;
  std::int64_t max = 0;
  std::int64_t multiple_of = 1;
};
FieldType Integer(int Config::*field, IntegerBounds bounds);
FieldType Integer(std::int64_t Config::*field, IntegerBounds bounds);

// Bytes: an integer with or without a unit, "6GiB" or "500MB".
struct SizeBounds {
  std::int64_t min = 0;
  std::int64_t max = 0;
};
FieldType Size(int Config::*field, SizeBounds bounds);
FieldType Size(std::int64_t Config::*field, SizeBounds bounds);

// A length of time as abseil writes it, "90s" or "1h30m".
struct DurationBounds {
  absl::Duration min;
  absl::Duration max;
};
FieldType Duration(absl::Duration Config::*field, DurationBounds bounds);

// "127.0.0.1:7071", "[::1]:7071" or "name:7071"; port 0 is any free one.
FieldType Address(std::string Config::*field);
// The same, but without IPv6, which the distribution's HTTP server was built without; or empty.
FieldType HttpAddressOrOff(std::string Config::*field);

// "host", "auto" or "cuda:N".
FieldType Device(std::string Config::*field);

FieldType PathOrNone(std::string Config::*field);

// Of a Unix socket.
FieldType SocketOrNone(std::string Config::*field);

// Formats, ">" between them.
FieldType Ladder(std::vector<std::string> Config::*field);

// One of a few words.
FieldType OneOf(std::string Config::*field, const std::vector<std::string>& words);
template <class T>
using Words = std::vector<std::pair<std::string, T>>;
FieldType OneOf(LogLevel Config::*field, Words<LogLevel> words);
FieldType OneOf(LogFormat Config::*field, Words<LogFormat> words);

// Host and port of an address that Address takes; an empty host where it doesn't.
struct HostAndPort {
  std::string host;
  int port = 0;
};
HostAndPort SplitAddress(const std::string& address);

}  // namespace kvtier::service
