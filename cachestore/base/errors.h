#pragma once

#include <string>

#include "absl/status/status.h"

namespace kvtier::cachestore {

// Why a request was refused: the machine-readable half of an error. One row each in errors.cc gives
// the name on the wire (google.rpc.ErrorInfo.reason, the `reason` label of kvtier_rejected_total)
// and the status code.
enum class Reason {
  kInvalidField,
  kUnknownFormat,
  kFormatRefused,
  kNonFiniteValue,
  kValueOutOfRange,
  kTokenGap,
  kPastCommitted,
  kGroupBound,
  kTruncateTooShort,
  kSealed,
  kNotOpen,
  kIncomplete,
  kModelMismatch,
  kPromptMismatch,
  kWriterExists,
  kSequenceExists,
  kOldEpoch,
  kSequenceGone,
  kLeaseEnded,
  kUnknownModel,
  kUnknownSequence,
  kEvicted,
  kBehindWindow,
  kUnknownTransport,
  kTransportUnavailable,
  kTransportLost,
  kBudget,
  kQuota,
  kTooManySequences,
  kTooManyModels,
  kTooManyLeases,
  kTooManyPins,
  kTooManyQuotas,
  kTooManySubscriptions,
  kTooManyTransports,
  kMessageTooLarge,
  kOverloaded,
  kDraining,
  kDeviceLost,
  kChecksum,
};

// "TOKEN_GAP" and the like.
const char* ReasonName(Reason reason);

// An error with its reason attached. The message is one sentence: what, got, want, with the name of
// the field.
absl::Status Error(Reason reason, const std::string& message);

// The name of the reason that Error attached; empty where there is none.
std::string ReasonOf(const absl::Status& status);

// Every reason's name, for metrics that exist before their first count. `index` from 0; nullptr
// past the last.
const char* ReasonNameAt(int index);

}  // namespace kvtier::cachestore
