#include "cachestore/base/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

namespace kvtier::cachestore {
namespace {

using ::testing::HasSubstr;

// Every reason has a row of its own, in the order of the enum: the table is indexed by it.
TEST(Errors, EveryReasonHasItsNameAndCode) {
  struct Want {
    Reason reason;
    const char* name;
    absl::StatusCode code;
  };
  constexpr Want kWant[] = {
      {Reason::kInvalidField, "INVALID_FIELD", absl::StatusCode::kInvalidArgument},
      {Reason::kUnknownFormat, "UNKNOWN_FORMAT", absl::StatusCode::kInvalidArgument},
      {Reason::kFormatRefused, "FORMAT_REFUSED", absl::StatusCode::kInvalidArgument},
      {Reason::kNonFiniteValue, "NON_FINITE_VALUE", absl::StatusCode::kInvalidArgument},
      {Reason::kValueOutOfRange, "VALUE_OUT_OF_RANGE", absl::StatusCode::kInvalidArgument},
      {Reason::kTokenGap, "TOKEN_GAP", absl::StatusCode::kOutOfRange},
      {Reason::kPastCommitted, "PAST_COMMITTED", absl::StatusCode::kOutOfRange},
      {Reason::kGroupBound, "GROUP_BOUND", absl::StatusCode::kOutOfRange},
      {Reason::kTruncateTooShort, "TRUNCATE_TOO_SHORT", absl::StatusCode::kFailedPrecondition},
      {Reason::kSealed, "SEALED", absl::StatusCode::kFailedPrecondition},
      {Reason::kNotOpen, "NOT_OPEN", absl::StatusCode::kFailedPrecondition},
      {Reason::kIncomplete, "INCOMPLETE", absl::StatusCode::kFailedPrecondition},
      {Reason::kModelMismatch, "MODEL_MISMATCH", absl::StatusCode::kFailedPrecondition},
      {Reason::kPromptMismatch, "PROMPT_MISMATCH", absl::StatusCode::kFailedPrecondition},
      {Reason::kWriterExists, "WRITER_EXISTS", absl::StatusCode::kAlreadyExists},
      {Reason::kSequenceExists, "SEQUENCE_EXISTS", absl::StatusCode::kAlreadyExists},
      {Reason::kOldEpoch, "OLD_EPOCH", absl::StatusCode::kAborted},
      {Reason::kSequenceGone, "SEQUENCE_GONE", absl::StatusCode::kAborted},
      {Reason::kLeaseEnded, "LEASE_ENDED", absl::StatusCode::kAborted},
      {Reason::kUnknownModel, "UNKNOWN_MODEL", absl::StatusCode::kNotFound},
      {Reason::kUnknownSequence, "UNKNOWN_SEQUENCE", absl::StatusCode::kNotFound},
      {Reason::kEvicted, "EVICTED", absl::StatusCode::kNotFound},
      {Reason::kBehindWindow, "BEHIND_WINDOW", absl::StatusCode::kNotFound},
      {Reason::kUnknownTransport, "UNKNOWN_TRANSPORT", absl::StatusCode::kNotFound},
      {Reason::kTransportUnavailable, "TRANSPORT_UNAVAILABLE",
       absl::StatusCode::kFailedPrecondition},
      {Reason::kTransportLost, "TRANSPORT_LOST", absl::StatusCode::kUnavailable},
      {Reason::kBudget, "BUDGET", absl::StatusCode::kResourceExhausted},
      {Reason::kQuota, "QUOTA", absl::StatusCode::kResourceExhausted},
      {Reason::kTooManySequences, "TOO_MANY_SEQUENCES", absl::StatusCode::kResourceExhausted},
      {Reason::kTooManyModels, "TOO_MANY_MODELS", absl::StatusCode::kResourceExhausted},
      {Reason::kTooManyLeases, "TOO_MANY_LEASES", absl::StatusCode::kResourceExhausted},
      {Reason::kTooManyPins, "TOO_MANY_PINS", absl::StatusCode::kResourceExhausted},
      {Reason::kTooManyQuotas, "TOO_MANY_QUOTAS", absl::StatusCode::kResourceExhausted},
      {Reason::kTooManySubscriptions, "TOO_MANY_SUBSCRIPTIONS",
       absl::StatusCode::kResourceExhausted},
      {Reason::kTooManyTransports, "TOO_MANY_TRANSPORTS", absl::StatusCode::kResourceExhausted},
      {Reason::kMessageTooLarge, "MESSAGE_TOO_LARGE", absl::StatusCode::kResourceExhausted},
      {Reason::kOverloaded, "OVERLOADED", absl::StatusCode::kResourceExhausted},
      {Reason::kDraining, "DRAINING", absl::StatusCode::kUnavailable},
      {Reason::kDeviceLost, "DEVICE_LOST", absl::StatusCode::kUnavailable},
      {Reason::kChecksum, "CHECKSUM", absl::StatusCode::kDataLoss},
  };
  const std::ifstream file(KVTIER_TEST_DATA "/../../docs/errors.md");
  std::ostringstream document;
  document << file.rdbuf();
  int count = 0;
  for (const Want& want : kWant) {
    EXPECT_THAT(document.str(), HasSubstr("| `" + std::string(want.name) + "` | " +
                                          absl::StatusCodeToString(want.code) + " |"));
    const absl::Status error = Error(want.reason, "a message");
    EXPECT_EQ(error.code(), want.code) << want.name;
    EXPECT_EQ(ReasonOf(error), want.name);
    EXPECT_STREQ(ReasonName(want.reason), want.name);
    EXPECT_STREQ(ReasonNameAt(count++), want.name);
  }
  EXPECT_EQ(ReasonNameAt(count), nullptr);
}

TEST(Errors, OtherStatusesHaveNoReason) {
  EXPECT_EQ(ReasonOf(absl::OkStatus()), "");
  EXPECT_EQ(ReasonOf(absl::UnavailableError("gone")), "");
}

}  // namespace
}  // namespace kvtier::cachestore
