#pragma once

#include <gmock/gmock.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cachestore/base/errors.h"

namespace kvtier::testing {

inline const absl::Status& StatusOf(const absl::Status& status) { return status; }
template <class T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

// EXPECT_THAT(store.Abort(key), IsOk());
MATCHER(IsOk, "") {
  *result_listener << StatusOf(arg).ToString();
  return StatusOf(arg).ok();
}

// EXPECT_THAT(store.Seal(key, 3), Refuses(Reason::kIncomplete, HasSubstr("layer 0 head 1")));
// The reason fixes the status code too.
MATCHER_P2(Refuses, reason, message, "") {
  const absl::Status& status = StatusOf(arg);
  *result_listener << status.ToString() << ", reason \"" << cachestore::ReasonOf(status) << "\"";
  return cachestore::ReasonOf(status) == cachestore::ReasonName(reason) &&
         status.code() == cachestore::Error(reason, "").code() &&
         ::testing::ExplainMatchResult(message, std::string(status.message()), result_listener);
}

// EXPECT_THAT(client.Seal(seal), StatusIs(absl::StatusCode::kNotFound, HasSubstr("not held")));
MATCHER_P2(StatusIs, code, message, "") {
  const absl::Status& status = StatusOf(arg);
  *result_listener << status.ToString();
  return status.code() == code &&
         ::testing::ExplainMatchResult(message, std::string(status.message()), result_listener);
}

// EXPECT_THAT(status, HasCode(absl::StatusCode::kAborted));
MATCHER_P(HasCode, code, "") {
  *result_listener << StatusOf(arg).ToString();
  return StatusOf(arg).code() == code;
}

}  // namespace kvtier::testing
