#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cachestore/model/plan.h"
#include "cachestore/model/plan_curve.h"
#include "client/cli/plan/flags.h"

namespace kvtier::client {

// What fits into --memory.
struct Fits {
  std::int64_t tokens = 0;    // the longest context of each of --requests
  std::int64_t requests = 0;  // of --tokens each
  cachestore::CapacityFigures capacity;
};

// One format's figures at one length. Bytes are of all requests together.
struct FormatFigures {
  std::string format;
  std::string refused;  // why the model's shape is; nothing below holds then
  std::shared_ptr<const cachestore::Model> model;
  std::int64_t tokens = 0;  // of a request
  cachestore::MemoryHeld sealed;
  cachestore::MemoryHeld open;     // at the same length, while it can still grow
  std::int64_t nominal_codes = 0;  // if every token were codes
  std::int64_t source = 0;
  std::int64_t unpaged = 0;
  cachestore::Phases phases;
  cachestore::Asymptote asymptote;
  double compression_ratio = 0;
  double bytes_per_token = 0;
  double bits_per_element = 0;  // everything included
  Fits fits;                    // with --memory only
};

// INVALID_ARGUMENT where the flags ask for what can't be; a shape that the format does not take is
// `refused`.
absl::StatusOr<FormatFigures> FiguresOf(const PlanFlags& flags, const PlannedModel& model,
                                        const std::string& format, std::int64_t tokens);

// What the command prints or draws.
struct PlanFigures {
  const PlanFlags* flags = nullptr;
  const PlannedModel* model = nullptr;
  std::vector<FormatFigures> formats;
};

std::string PlanText(const PlanFigures& plan);
std::string PlanJson(const PlanFigures& plan);
// The formats of `plan`, each at each length.
absl::StatusOr<std::string> PlanCsv(const PlanFigures& plan);
// Draws them into flags->plot.
absl::Status DrawPlan(const PlanFigures& plan);

}  // namespace kvtier::client
