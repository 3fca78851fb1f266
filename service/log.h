#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <variant>

// The log of the process, on standard error: a line an event, with its fields.
namespace kvtier::service {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
enum class LogFormat { kText, kJson };

// A key and its value: `model_id=1f3a` in text, a member in JSON.
struct LogField {
  using Value = std::variant<std::string, std::int64_t, double, bool>;

  LogField(std::string field, std::string text) : key(std::move(field)), value(std::move(text)) {}
  LogField(std::string field, const char* text) : key(std::move(field)), value(std::string(text)) {}
  LogField(std::string field, bool truth) : key(std::move(field)), value(truth) {}
  LogField(std::string field, double number) : key(std::move(field)), value(number) {}
  template <std::integral T>
  LogField(std::string field, T number)
      : key(std::move(field)), value(static_cast<std::int64_t>(number)) {}

  std::string key;
  Value value;
};

// Until this is called the log is text from kInfo. Not to be called while others log.
void SetUpLogging(LogLevel level, LogFormat format);

// Writes a line, unless `level` is below the one set up. JSON lines begin with ts, level and msg;
// fields should have other keys. Thread-safe.
void Log(LogLevel level, const std::string& message, std::initializer_list<LogField> fields = {});

}  // namespace kvtier::service
