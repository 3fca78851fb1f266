#include "service/metrics/catalog.h"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "cachestore/base/check.h"
#include "kvtier/version.h"

namespace kvtier::service {
namespace {

using Samples = std::vector<Sample>;

// A member of a struct of figures, or a function of it, as a metric without labels ...
template <auto field>
Samples One(const Snapshot& snapshot) {
  return {{{}, static_cast<double>(std::invoke(field, snapshot))}};
}

template <auto field>
Samples Process(const Snapshot& snapshot) {
  return {{{}, static_cast<double>(std::invoke(field, snapshot.process))}};
}

// ... or as one with a value per model and format.
template <auto field>
Samples PerModel(const Snapshot& snapshot) {
  Samples samples;
  for (const ModelFigures& model : snapshot.models) {
    samples.push_back(
        {{model.model, model.format}, static_cast<double>(std::invoke(field, model))});
  }
  return samples;
}

Samples BuildInfo(const Snapshot& snapshot) {
  return {{{kVersion, kRevision, snapshot.device}, 1.0}};
}

Samples MemoryByPart(const Snapshot& snapshot) {
  const cachestore::MemoryParts& memory = snapshot.memory;
  const std::pair<const char*, std::int64_t> parts[] = {{"codes", memory.use.codes},
                                                        {"scales", memory.use.scales},
                                                        {"residual", memory.use.residual},
                                                        {"header", memory.use.header},
                                                        {"slack", memory.slack},
                                                        {"staging", memory.staging},
                                                        {"free", memory.free}};
  Samples samples;
  for (const auto& [part, bytes] : parts) samples.push_back({{part}, static_cast<double>(bytes)});
  return samples;
}

Samples StillFit(const Snapshot& snapshot) {
  Samples samples;
  for (const ModelFigures& m : snapshot.models) {
    samples.push_back(
        {{m.model, m.format, "one_sequence"}, static_cast<double>(m.tokens_as_one_sequence)});
    samples.push_back(
        {{m.model, m.format, "mean_sequences"}, static_cast<double>(m.tokens_as_mean_sequences)});
  }
  return samples;
}

Samples Sequences(const Snapshot& snapshot) {
  Samples samples;
  for (const ModelFigures& m : snapshot.models) {
    samples.push_back({{m.model, m.format, "open"}, static_cast<double>(m.open_sequences)});
    samples.push_back({{m.model, m.format, "sealed"}, static_cast<double>(m.sealed_sequences)});
  }
  return samples;
}

template <std::int64_t cachestore::EvictionCount::*field>
Samples PerEvictionReason(const Snapshot& snapshot) {
  constexpr std::array kReasons = {"memory", "quota", "idle"};
  static_assert(kReasons.size() == cachestore::kEvictionReasons);
  Samples samples;
  for (std::size_t i = 0; i < kReasons.size(); ++i)
    samples.push_back({{kReasons[i]}, static_cast<double>(snapshot.evictions[i].*field)});
  return samples;
}

Samples Lowered(const Snapshot& snapshot) {
  Samples samples;
  for (const auto& [format, columns] : snapshot.lowered)
    samples.push_back({{format}, static_cast<double>(columns)});
  return samples;
}

Samples RangeUsed(const Snapshot& snapshot) {
  Samples samples;
  for (const ModelFigures& m : snapshot.models) {
    samples.push_back({{m.model, m.format, "k"}, m.k_range_used});
    samples.push_back({{m.model, m.format, "v"}, m.v_range_used});
  }
  return samples;
}

std::vector<MetricRow> MakeCatalog() {  // NOLINT(readability-function-size): a table
  constexpr MetricType kGauge = MetricType::kGauge;
  constexpr MetricType kCounter = MetricType::kCounter;
  constexpr MetricType kHistogram = MetricType::kHistogram;
  using Labels = std::vector<std::string>;
  const Labels none;
  const Labels part = {"part"};
  const Labels model = {"model", "format"};
  const Labels model_as = {"model", "format", "as"};
  const Labels model_side = {"model", "format", "side"};
  const Labels model_state = {"model", "format", "state"};
  const Labels reason = {"reason"};
  const Labels format = {"format"};
  const Labels refusal = {"rpc", "reason"};
  const Labels build = {"version", "revision", "device"};
  return {
      {kGauge, "kvtier_budget_bytes", none, "Memory that pages, residuals and staging may take.",
       One<&Snapshot::budget>},
      {kGauge, "kvtier_memory_bytes", part,
       "The budget by what it holds: codes, scales, residual, header, slack, staging, free. They "
       "sum to it.",
       MemoryByPart},
      {kGauge, "kvtier_tokens_held", model,
       "Committed tokens of all sequences, once where sequences share them. Models that share the "
       "labels are summed, here and below.",
       PerModel<&ModelFigures::tokens_held>},
      {kGauge, "kvtier_tokens_that_still_fit", model_as,
       "Further tokens for which the budget has room: as one_sequence, or as mean_sequences of the "
       "mean length now (of the model's max_tokens while no token is held). The least of models "
       "that share the labels.",
       StillFit},
      {kGauge, "kvtier_compression_ratio", model,
       "Source bytes over stored bytes; 0 while nothing is held.",
       PerModel<&ModelFigures::compression_ratio>},
      {kGauge, "kvtier_source_bytes", model, "What the tokens held take in the source dtype.",
       PerModel<&ModelFigures::source_bytes>},
      {kGauge, "kvtier_stored_bytes", model,
       "What the sequences take in memory: codes, scales, residual, headers and slack.",
       PerModel<&ModelFigures::stored_bytes>},
      {kGauge, "kvtier_sequences", model_state, "Sequences held: open or sealed.", Sequences},
      {kGauge, "kvtier_leases", none, "Leases that clients hold.", One<&Snapshot::leases>},
      {kGauge, "kvtier_pins", none, "Pins that clients hold.", One<&Snapshot::pins>},
      {kGauge, "kvtier_subscriptions", none, "Streams of KV events that clients read.",
       One<&Snapshot::subscriptions>},
      {kGauge, "kvtier_transports", none, "Ways beside gRPC that clients have opened for K and V.",
       One<&Snapshot::transports>},
      {kGauge, "kvtier_shm_bytes", none,
       "Memory of clients that is mapped here; theirs, outside the budget.",
       One<&Snapshot::shm_bytes>},
      {kGauge, "kvtier_layers", model, "Layers of the registered models, held or not.",
       PerModel<&ModelFigures::layers>},
      {kGauge, "kvtier_unit_scale_layers", model,
       "Layers whose format takes a scale, at 1.0: not calibrated.",
       PerModel<&ModelFigures::unit_scale_layers>},
      {kGauge, "kvtier_fp8_range_used_ratio", model_side,
       "The largest magnitude of K or V received over the largest that its FP8 scale reaches, of "
       "the KV head where that is most; above 1 values saturated. 0 without FP8 layers.",
       RangeUsed},

      {kCounter, "kvtier_append_bytes_total", model, "Source bytes of K and V taken in.",
       PerModel<&ModelFigures::append_bytes>},
      {kCounter, "kvtier_append_tokens_total", model, "Tokens that became committed.",
       PerModel<&ModelFigures::append_tokens>},
      {kCounter, "kvtier_read_bytes_total", model,
       "Bytes of K and V given out, as the readers asked for them.",
       PerModel<&ModelFigures::read_bytes>},
      {kCounter, "kvtier_read_tokens_total", model, "Tokens given out.",
       PerModel<&ModelFigures::read_tokens>},
      {kCounter, "kvtier_saturated_values_total", model,
       "Values that the stored format could not hold and that became its largest.",
       PerModel<&ModelFigures::saturated_values>},
      {kCounter, "kvtier_evictions_total", reason,
       "Page columns, and ends of sequences behind their last one, that were evicted: because the "
       "memory was full, a namespace's quota, or they were idle.",
       PerEvictionReason<&cachestore::EvictionCount::evictions>},
      {kCounter, "kvtier_evicted_tokens_total", reason,
       "Tokens that these held; once where sequences shared them.",
       PerEvictionReason<&cachestore::EvictionCount::tokens>},
      {kCounter, "kvtier_lowered_pages_total", format,
       "Page columns that were stored in fewer bits where a namespace prefers that to eviction, by "
       "the format that they got.",
       Lowered},
      {kHistogram, kAppendDuration, none,
       "A chunk of an append, from received to ready to be acknowledged.", nullptr},
      {kHistogram, kReadDuration, none,
       "A read, from asked to last byte handed over; none that follows.", nullptr},
      {kCounter, kRejected, refusal,
       "Calls and chunks refused, by the reason that the error carries.", nullptr},

      {kGauge, "kvtier_build_info", build, "1, with what runs and where pages live.", BuildInfo},
      {kGauge, "kvtier_draining", none, "1 once the server takes no new work, else 0.",
       One<&Snapshot::draining>},
      {kGauge, "process_resident_memory_bytes", none, "Resident memory size.",
       Process<&ProcessFigures::resident_bytes>},
      {kCounter, "process_cpu_seconds_total", none, "User and system CPU time.",
       Process<&ProcessFigures::cpu_seconds>},
      {kGauge, "process_start_time_seconds", none, "Start of the process, since the epoch.",
       Process<&ProcessFigures::start_time_seconds>},
      {kGauge, "process_open_fds", none, "Open file descriptors.",
       Process<&ProcessFigures::open_descriptors>},
      {kGauge, "process_max_fds", none, "The most file descriptors that may be open.",
       Process<&ProcessFigures::max_descriptors>},
  };
}

}  // namespace

const std::vector<MetricRow>& Catalog() {
  static const auto* const catalog = new std::vector<MetricRow>(MakeCatalog());
  return *catalog;
}

const MetricRow& RowOf(const std::string& name) {
  const std::vector<MetricRow>& rows = Catalog();
  const auto found = std::find_if(rows.begin(), rows.end(),
                                  [&](const MetricRow& row) { return row.name == name; });
  KVT_CHECK(found != rows.end());
  return *found;
}

}  // namespace kvtier::service
