#pragma once

#include <array>
#include <string>
#include <vector>

#include "service/metrics/snapshot.h"

namespace kvtier::service {

enum class MetricType { kGauge, kCounter, kHistogram };

// A value with those of the metric's labels, in the row's order.
struct Sample {
  std::vector<std::string> labels;
  double value = 0;
};

// A metric that /metrics serves. The exporter, docs/metrics.md and the tests go by this table.
struct MetricRow {
  MetricType type;
  const char* name;
  std::vector<std::string> labels;
  const char* help;
  // Null for what is observed where it happens: histograms, and what was rejected.
  std::vector<Sample> (*read)(const Snapshot&);
};

// In the order of docs/metrics.md.
const std::vector<MetricRow>& Catalog();

// The rows without `read`.
inline constexpr char kAppendDuration[] = "kvtier_append_duration_seconds";
inline constexpr char kReadDuration[] = "kvtier_read_duration_seconds";
inline constexpr char kRejected[] = "kvtier_rejected_total";

const MetricRow& RowOf(const std::string& name);

// The values of the label `rpc`: the service's methods, in its order.
inline constexpr std::array kRpcs = {
    "RegisterModel",  "Append",        "AppendBatch", "Lookup",        "Acquire",
    "Renew",          "Release",       "Pin",         "Unpin",         "Fork",
    "Seal",           "Truncate",      "Abort",       "Read",          "Remove",
    "Describe",       "ListSequences", "Capacity",    "Scales",        "GetQuota",
    "SetQuota",       "SetPressure",   "Subscribe",   "OpenTransport", "GrantCredit",
    "CloseTransport", "Drain"};

// Seconds: from what a small chunk takes to what a large read over a slow network takes.
inline constexpr std::array kDurationBuckets = {50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3,
                                                5e-3,  10e-3,  20e-3,  50e-3,  0.1,  0.2,
                                                0.5,   1.0,    2.0,    5.0,    10.0};

}  // namespace kvtier::service
