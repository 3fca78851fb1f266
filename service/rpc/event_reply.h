#pragma once

#include <string>

#include "cachestore/subscription.h"
#include "kvtier/v1/kv_events.pb.h"

namespace kvtier::service {

// Without the boot id. `medium`: where pages lie, as KV events call it.
v1::SubscribeResponse ToProto(const cachestore::EventBatch& batch, const std::string& medium);

}  // namespace kvtier::service
