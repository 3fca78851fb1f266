#include "client/cli/json.h"

#include "client/cli/plan/figures.h"
#include "client/cli/plan/formula.h"

namespace kvtier::client {
namespace {

using nlohmann::ordered_json;

ordered_json PartsOf(const cachestore::MemoryHeld& held) {
  return {{"codes", held.use.codes},
          {"scales", held.use.scales},
          {"residual", held.use.residual},
          {"header", held.use.header},
          {"slack", held.slack()}};
}

ordered_json JsonOf(const LayerGroup& group) {
  return {{"layers", group.layers},
          {"window", group.layer.window},
          {"kv_heads", group.layer.kv_heads},
          {"k_head_dim", group.layer.k_head_dim},
          {"v_head_dim", group.layer.v_head_dim},
          {"tokens_kept", group.tokens}};
}

void AddFits(const Fits& fits, ordered_json& json) {
  json["tokens_that_fit"] =
      fits.tokens == cachestore::kAnyTokens ? ordered_json() : ordered_json(fits.tokens);
  json["requests_that_fit"] = fits.requests;
  json["capacity_tokens"] = fits.capacity.tokens;
  json["concurrency"] = fits.capacity.concurrency;
  json["capacity_line"] = fits.capacity.line;
}

ordered_json JsonOf(const FormatFigures& figures, const PlanFlags& flags) {
  ordered_json json;
  if (!figures.refused.empty()) {
    return {{"kv_cache_dtype", figures.format}, {"refused", figures.refused}};
  }
  json["kv_cache_dtype"] = figures.model->format;
  json["page_tokens"] = figures.model->page_tokens;
  json["nominal_code_bytes"] = figures.nominal_codes;
  json["source_bytes"] = figures.source;
  json["stored_bytes"] = figures.sealed.allocated;
  json["memory"] = PartsOf(figures.sealed);
  json["stored_bytes_while_open"] = figures.open.allocated;
  json["memory_while_open"] = PartsOf(figures.open);
  json["unpaged_bytes"] = figures.unpaged;
  json["bytes_per_request"] = figures.sealed.allocated / flags.requests;
  json["bytes_per_token"] = figures.bytes_per_token;
  json["bits_per_element"] = figures.bits_per_element;
  json["compression_ratio"] = figures.compression_ratio;
  json["phases"] = {{"tokens", figures.phases.period},
                    {"most_residual_bytes", figures.phases.most_residual},
                    {"least_ratio", figures.phases.least_ratio},
                    {"mean_ratio", figures.phases.mean_ratio},
                    {"most_ratio", figures.phases.most_ratio}};
  json["asymptotic"] = {{"bytes_per_token", figures.asymptote.bytes_per_token},
                        {"compression_ratio", figures.asymptote.compression_ratio},
                        {"unpaged_ratio", figures.asymptote.unpaged_ratio}};
  if (flags.memory > 0) AddFits(figures.fits, json);
  json["notices"] = figures.model->notices;
  return json;
}

}  // namespace

std::string PlanJson(const PlanFigures& plan) {
  const PlanFlags& flags = *plan.flags;
  const cachestore::ModelSpec& spec = plan.model->spec;
  const auto groups = GroupLayers(spec, flags.tokens, flags.kept());
  const KvFormula formula = FormulaOf(spec, groups, flags.requests);
  ordered_json json;
  json["model"] = plan.model->name;
  json["layers"] = spec.layers.size();
  json["layer_groups"] = ordered_json::array();
  for (const LayerGroup& group : groups) json["layer_groups"].push_back(JsonOf(group));
  json["source_dtype"] = kernels::ElementName(spec.source);
  json["tokens"] = flags.tokens;
  json["requests"] = flags.requests;
  json["retention"] = flags.retention;
  if (flags.memory > 0) json["memory_bytes"] = flags.memory;
  json["m_kv"] = {{"formula", formula.text}, {"bytes", formula.bytes}};
  json["notices"] = plan.model->config.notices;
  json["formats"] = ordered_json::array();
  for (const FormatFigures& format : plan.formats) json["formats"].push_back(JsonOf(format, flags));
  return JsonLine(json);
}

}  // namespace kvtier::client
