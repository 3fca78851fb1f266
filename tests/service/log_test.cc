#include "service/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <string>

namespace kvtier::service {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The log is the process's own: left as it was found.
class LogTest : public ::testing::Test {
 protected:
  ~LogTest() override { SetUpLogging(LogLevel::kInfo, LogFormat::kText); }

  static std::string Written(LogLevel level, const std::string& message,
                             std::initializer_list<LogField> fields = {}) {
    ::testing::internal::CaptureStderr();
    Log(level, message, fields);
    return ::testing::internal::GetCapturedStderr();
  }
};

TEST_F(LogTest, TextHasTimeLevelMessageAndFields) {
  SetUpLogging(LogLevel::kInfo, LogFormat::kText);
  EXPECT_THAT(Written(LogLevel::kWarning, "model registered",
                      {{"model_id", "1f3a"}, {"tokens", 4096}, {"ratio", 6.5}, {"ready", true}}),
              ContainsRegex("^20[0-9-]+T[0-9:.]+Z warning model registered model_id=1f3a "
                            "tokens=4096 ratio=6.5 ready=true\n$"));
}

TEST_F(LogTest, TextOfAnotherCannotForgeALineOrAField) {
  SetUpLogging(LogLevel::kInfo, LogFormat::kText);
  const std::string line =
      Written(LogLevel::kInfo, "asked\nfor", {{"sequence", "a b=c\n\"d\""}, {"empty", ""}});
  EXPECT_THAT(line, HasSubstr(R"( "asked\nfor" sequence="a b=c\n\"d\"" empty="")"));
  EXPECT_EQ(line.find('\n'), line.size() - 1);
}

TEST_F(LogTest, JsonIsOneObjectALine) {
  SetUpLogging(LogLevel::kInfo, LogFormat::kJson);
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  const std::string line = Written(LogLevel::kError, "no \"room\"\n",
                                   {{"sequence", "a\xff"}, {"bytes", most}, {"open", false}});
  EXPECT_EQ(line.find('\n'), line.size() - 1);
  const auto json = nlohmann::json::parse(line);
  EXPECT_EQ(json.size(), 6);
  EXPECT_THAT(json["ts"].get<std::string>(), ContainsRegex("^20[0-9-]+T[0-9:.]+Z$"));
  EXPECT_EQ(json["level"], "error");
  EXPECT_EQ(json["msg"], "no \"room\"\n");
  EXPECT_EQ(json["sequence"], "a\xef\xbf\xbd");
  EXPECT_EQ(json["bytes"], most);
  EXPECT_EQ(json["open"], false);
}

TEST_F(LogTest, WhatIsBelowTheLevelIsNotWritten) {
  SetUpLogging(LogLevel::kWarning, LogFormat::kText);
  EXPECT_THAT(Written(LogLevel::kInfo, "quiet"), IsEmpty());
  EXPECT_THAT(Written(LogLevel::kWarning, "loud"), HasSubstr("loud"));
  SetUpLogging(LogLevel::kDebug, LogFormat::kText);
  EXPECT_THAT(Written(LogLevel::kDebug, "chatty"), HasSubstr("debug   chatty"));
}

}  // namespace
}  // namespace kvtier::service
