#include "service/log.h"

#include <fmt/format.h>
#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>

namespace kvtier::service {
namespace {

using Json = nlohmann::ordered_json;

// Whatever comes is a valid line: bytes that are no UTF-8 are replaced.
std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

spdlog::level::level_enum SpdlogLevel(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

struct Logging {
  explicit Logging(LogLevel level, LogFormat as)
      : format(as), logger("kvtierd", std::make_shared<spdlog::sinks::stderr_sink_mt>()) {
    const char* const pattern = format == LogFormat::kJson
                                    ? R"({"ts":"%Y-%m-%dT%H:%M:%S.%eZ","level":"%l",%v})"
                                    : "%Y-%m-%dT%H:%M:%S.%eZ %-7l %v";
    logger.set_formatter(
        std::make_unique<spdlog::pattern_formatter>(pattern, spdlog::pattern_time_type::utc));
    logger.set_level(SpdlogLevel(level));
    logger.flush_on(spdlog::level::trace);
  }

  LogFormat format;
  spdlog::logger logger;
};

std::unique_ptr<Logging>& Current() {
  static auto* const logging =
      new std::unique_ptr<Logging>(new Logging(LogLevel::kInfo, LogFormat::kText));
  return *logging;
}

// Text as it is where it is one plain word; otherwise as a JSON string, so that a value is told
// from the next key and a line stays a line.
std::string Word(const std::string& text) {
  const bool plain = !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return c > ' ' && c < 127 && c != '"' && c != '=' && c != '\\';
  });
  return plain ? text : Dump(text);
}

std::string MessageText(const std::string& message) {
  const bool one_line = std::none_of(message.begin(), message.end(), [](char c) {
    return static_cast<unsigned char>(c) < ' ' || c == 127;
  });
  return one_line ? message : Dump(message);
}

std::string TextLine(const std::string& message, std::initializer_list<LogField> fields) {
  std::string line = MessageText(message);
  for (const LogField& field : fields) {
    const auto* const text = std::get_if<std::string>(&field.value);
    const std::string value =
        text != nullptr ? Word(*text)
                        : std::visit([](const auto& v) { return Dump(Json(v)); }, field.value);
    line += fmt::format(" {}={}", field.key, value);
  }
  return line;
}

// The members behind those that the pattern writes, without braces.
std::string JsonMembers(const std::string& message, std::initializer_list<LogField> fields) {
  Json members;
  members["msg"] = message;
  for (const LogField& field : fields) {
    std::visit([&](const auto& value) { members[field.key] = value; }, field.value);
  }
  const std::string object = Dump(members);
  return object.substr(1, object.size() - 2);
}

}  // namespace

void SetUpLogging(LogLevel level, LogFormat format) {
  Current() = std::make_unique<Logging>(level, format);
}

void Log(LogLevel level, const std::string& message, std::initializer_list<LogField> fields) {
  Logging& logging = *Current();
  const spdlog::level::level_enum as = SpdlogLevel(level);
  if (!logging.logger.should_log(as)) return;
  logging.logger.log(as, logging.format == LogFormat::kJson ? JsonMembers(message, fields)
                                                            : TextLine(message, fields));
}

}  // namespace kvtier::service
