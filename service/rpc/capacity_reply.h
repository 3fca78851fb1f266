#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "cachestore/store.h"
#include "kvtier/v1/kv_tier.pb.h"

namespace kvtier::service {

// What a registration says of the model: its id, and what the budget holds of it.
// `max_tokens` is this registration's; 0 asks for the default.
void FillRegistration(const cachestore::Model& model, std::int64_t max_tokens, std::int64_t budget,
                      v1::RegisterModelResponse& response);

// Answers Capacity: now, and what-if for another format.
absl::Status FillCapacity(const cachestore::Store& store, const v1::CapacityRequest& request,
                          v1::CapacityResponse& response);

}  // namespace kvtier::service
