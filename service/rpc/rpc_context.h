#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "cachestore/store.h"
#include "service/observer.h"
#include "service/rpc/stream_watch.h"
#include "service/rpc/transports.h"
#include "service/rpc/work_queue.h"

namespace kvtier::service {

// What every handler needs. Outlives the server. Thread-safe.
struct RpcContext {
  cachestore::Store& store;
  WorkQueue& work;
  Observer& observer;
  Transports& transports;
  const cachestore::Clock& clock;
  const std::string boot_id;  // of this process: a new one means that the store is empty
  const std::string medium;   // where pages lie, as KV events call it
  const std::int64_t max_message_bytes;
  const std::int64_t read_chunk_bytes;
  std::atomic<bool>& draining;
  StreamWatch watch{};

  // UNAVAILABLE while draining.
  absl::Status CheckNotDraining() const;
};

// RESOURCE_EXHAUSTED: the work queue is full.
absl::Status Overloaded();

}  // namespace kvtier::service
