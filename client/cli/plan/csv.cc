#include <fmt/format.h>

#include "client/cli/plan/figures.h"

namespace kvtier::client {
namespace {

// As RFC 4180 says it: what holds a comma, a quote or a line's end is quoted.
std::string Cell(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? "\"\"" : std::string(1, c);
  return quoted + "\"";
}

constexpr char kTitles[] =
    "model,kv_cache_dtype,page_tokens,retention,tokens,requests,source_bytes,stored_bytes,codes,"
    "scales,residual,header,slack,unpaged_bytes,bytes_per_token,compression_ratio,least_ratio,"
    "mean_ratio,most_ratio,refused\n";

std::string RowOf(const PlanFigures& plan, const FormatFigures& figures) {
  const cachestore::MemoryUse& use = figures.sealed.use;
  const cachestore::Phases& phases = figures.phases;
  return fmt::format(
      "{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},\n", Cell(plan.model->name),
      Cell(figures.format), figures.model->page_tokens, plan.flags->retention, figures.tokens,
      plan.flags->requests, figures.source, figures.sealed.allocated, use.codes, use.scales,
      use.residual, use.header, figures.sealed.slack(), figures.unpaged, figures.bytes_per_token,
      figures.compression_ratio, phases.least_ratio, phases.mean_ratio, phases.most_ratio);
}

}  // namespace

absl::StatusOr<std::string> PlanCsv(const PlanFigures& plan) {
  std::string csv = kTitles;
  for (const FormatFigures& format : plan.formats) {
    if (!format.refused.empty()) {
      csv += fmt::format("{},{},,{},,{},,,,,,,,,,,,,,{}\n", Cell(plan.model->name),
                         Cell(format.format), plan.flags->retention, plan.flags->requests,
                         Cell(format.refused));
      continue;
    }
    for (const std::int64_t tokens : ContextLengths(*plan.flags, plan.model->config, 1)) {
      const absl::StatusOr<FormatFigures> figures =
          FiguresOf(*plan.flags, *plan.model, format.format, tokens);
      if (!figures.ok()) return figures.status();
      csv += RowOf(plan, *figures);
    }
  }
  return csv;
}

}  // namespace kvtier::client
