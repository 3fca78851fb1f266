#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cachestore/eviction_counts.h"
#include "cachestore/model/memory_parts.h"
#include "service/metrics/process.h"

namespace kvtier::cachestore {
class Store;
}

namespace kvtier::service {

// Registered models of one name, revision and format, as one: their counts are summed. Of what
// still fits it is the least of them, since they share the budget.
struct ModelFigures {
  std::string model;   // the name, "@" and the revision behind it where there is one
  std::string format;  // as resolved

  std::int64_t tokens_held = 0;
  std::int64_t source_bytes = 0;
  std::int64_t stored_bytes = 0;
  std::int64_t open_sequences = 0;
  std::int64_t sealed_sequences = 0;
  std::int64_t tokens_as_one_sequence = 0;
  std::int64_t tokens_as_mean_sequences = 0;
  std::int64_t layers = 0;
  std::int64_t unit_scale_layers = 0;

  std::int64_t append_bytes = 0;
  std::int64_t append_tokens = 0;
  std::int64_t read_bytes = 0;
  std::int64_t read_tokens = 0;
  std::int64_t saturated_values = 0;

  // The largest |x| received over the largest that the FP8 layers' scales reach: the worst head.
  double k_range_used = 0;
  double v_range_used = 0;

  double compression_ratio() const {
    return stored_bytes == 0
               ? 0.0
               : static_cast<double>(source_bytes) / static_cast<double>(stored_bytes);
  }
};

// Everything that one scrape tells, read once.
struct Snapshot {
  std::string device;
  bool draining = false;
  std::int64_t budget = 0;
  std::int64_t leases = 0;
  std::int64_t pins = 0;
  std::int64_t subscriptions = 0;
  std::int64_t transports = 0;
  std::int64_t shm_bytes = 0;
  std::map<std::string, std::int64_t> lowered;  // page columns, by the format that they got
  cachestore::EvictionCounts evictions;
  cachestore::MemoryParts memory;
  std::vector<ModelFigures> models;  // by model and format
  ProcessFigures process;
};

// All of it but what MetricsOptions brings.
Snapshot TakeSnapshot(const cachestore::Store& store);

}  // namespace kvtier::service
