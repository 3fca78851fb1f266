#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cachestore/model/model_spec.h"
#include "cachestore/model/plan.h"
#include "client/model_config.h"

namespace CLI {  // NOLINT(readability-identifier-naming): its own
class App;
}

namespace kvtier::client {

// As kvtierd's --page-tokens.
inline constexpr int kDefaultPageTokens = 128;
// Keeps every product of lengths and bytes within 63 bits for the largest model there may be.
inline constexpr std::int64_t kMaxPlannedTokens = 1 << 26;
// Where neither flag nor config says how long a context gets.
inline constexpr std::int64_t kDefaultLongestContext = 131072;

struct PlanFlags {
  std::string model;  // a config.json, or the shape in the flags up to full_every
  int layers = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int v_head_dim = -1;  // -1: head_dim; 0: MLA
  int window = 0;
  int full_every = 0;
  std::string dtype;  // empty: the config's where that is 16 bit, else bfloat16
  std::int64_t tokens = cachestore::kDefaultMaxTokens;
  std::int64_t requests = 1;
  std::int64_t memory = 0;  // 0: not asked
  int page_tokens = 0;
  std::vector<std::string> kv_cache_dtype;  // empty: all, and those that are refused are told
  std::vector<std::string> skip_layers;
  std::string retention = "all";
  std::vector<std::int64_t> context_lengths;  // empty: from 512 on
  bool csv = false;
  std::string plot;  // a file

  cachestore::Retention kept() const {
    return retention == "window" ? cachestore::Retention::kWindow : cachestore::Retention::kAll;
  }
};

void AddPlanFlags(CLI::App& app, PlanFlags& flags);

// What is planned for: the config's model, or the one in the flags.
struct PlannedModel {
  std::string name;
  cachestore::ModelSpec spec;
  ModelConfig config;  // of flags: only what they say
};
absl::StatusOr<PlannedModel> ModelOf(const PlanFlags& flags);

// The formats to plan: those asked for, or all that there are; `auto` resolved, none twice.
std::vector<std::string> FormatsOf(const PlanFlags& flags, const ModelConfig& config);

// The context lengths asked for, in order; else from 512 to the longest of the model, evenly spaced
// on a logarithmic scale, `per_doubling` of them to each doubling, and the longest.
std::vector<std::int64_t> ContextLengths(const PlanFlags& flags, const ModelConfig& config,
                                         int per_doubling);

}  // namespace kvtier::client
