#include "cachestore/model/plan.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cachestore/base/status_macros.h"
#include "client/cli/command.h"
#include "client/cli/json.h"
#include "client/cli/table.h"
#include "client/model_source.h"

namespace kvtier::client {
namespace {

using Align = Table::Align;
using cachestore::ElementType;

// As kvtierd's --page-tokens.
constexpr int kDefaultPageTokens = 128;
// Keep every product of these within 63 bits for the largest model there may be.
constexpr std::int64_t kMaxTokens = 1 << 26;
constexpr std::int64_t kMaxRequests = 1 << 30;
constexpr std::int64_t kMaxMemory = std::int64_t{1} << 60;

const std::vector<std::string> kComparedFormats = {"auto", "fp8_e4m3", "int8_per_token_head",
                                                   "kivi4", "kivi2"};
const std::map<std::string, ElementType> kSources = {{"bfloat16", ElementType::kBf16},
                                                     {"float16", ElementType::kFp16},
                                                     {"float32", ElementType::kFp32}};

struct PlanFlags {
  int layers = 0;
  int kv_heads = 0;
  int head_dim = 0;
  std::string model;
  std::string dtype = "bfloat16";
  std::int64_t tokens = cachestore::kDefaultMaxTokens;
  std::int64_t requests = 1;
  std::int64_t memory = 0;
  int page_tokens = 0;
  std::vector<std::string> kv_cache_dtype;
  std::vector<std::string> skip_layers;
};

cachestore::LayerSpec LayerFrom(const v1::LayerSpec& layer) {
  cachestore::LayerSpec spec{.window = static_cast<int>(layer.window()),
                             .kv_heads = static_cast<int>(layer.kv_heads()),
                             .k_head_dim = static_cast<int>(layer.k_head_dim()),
                             .v_head_dim = static_cast<int>(layer.v_head_dim())};
  if (layer.kind() == v1::LAYER_KIND_SLIDING_WINDOW) {
    spec.kind = cachestore::LayerKind::kSlidingWindow;
  } else if (layer.kind() == v1::LAYER_KIND_MLA) {
    spec.kind = cachestore::LayerKind::kMla;
  }
  return spec;
}

absl::StatusOr<cachestore::ModelSpec> SpecOf(const PlanFlags& flags) {
  cachestore::ModelSpec spec;
  spec.name = "plan";
  spec.source = kSources.at(flags.dtype);
  if (!flags.model.empty()) {
    KVT_ASSIGN_OR_RETURN(const v1::ModelSpec config, SpecFromConfigFile(flags.model));
    for (const v1::LayerSpec& layer : config.layers()) spec.layers.push_back(LayerFrom(layer));
    return spec;
  }
  if (flags.layers < 1 || flags.kv_heads < 1 || flags.head_dim < 1) {
    return absl::InvalidArgumentError(
        "the model is missing: --layers, --kv-heads and --head-dim, or --model, are needed");
  }
  const cachestore::LayerSpec layer{
      .kv_heads = flags.kv_heads, .k_head_dim = flags.head_dim, .v_head_dim = flags.head_dim};
  spec.layers.assign(static_cast<std::size_t>(flags.layers), layer);
  return spec;
}

// One format's plan: bytes of all requests together.
struct Row {
  std::shared_ptr<const cachestore::Model> model;
  std::int64_t nominal_codes = 0;  // if every token were codes
  std::int64_t source = 0;
  std::int64_t stored = 0;
  cachestore::MemoryHeld one_request;
  // With --memory only.
  std::int64_t tokens_that_fit = 0;    // of one sequence
  std::int64_t requests_that_fit = 0;  // of --tokens each
  std::string capacity_line;
};

std::int64_t NominalCodes(const cachestore::TensorModel& tensor, std::int64_t tokens) {
  if (tensor.dim() == 0) return 0;
  return tokens * tensor.heads() * tensor.layout.unit.codes / tensor.layout.unit_tokens;
}

absl::StatusOr<Row> Plan(const PlanFlags& flags, const cachestore::ModelSpec& spec,
                         const std::string& format) {
  cachestore::ModelRequest request;
  request.spec = spec;
  request.policy = {.kv_cache_dtype = format, .skip_layers = flags.skip_layers};
  request.page_tokens = flags.page_tokens;
  request.max_tokens = flags.tokens;
  Row row;
  KVT_ASSIGN_OR_RETURN(row.model, cachestore::ResolveModel(std::move(request), kDefaultPageTokens));
  const cachestore::Model& model = *row.model;
  row.one_request = cachestore::PlanSealed(model, flags.tokens);
  for (const cachestore::LayerModel& layer : model.layers) {
    row.nominal_codes += NominalCodes(layer.k, flags.tokens) + NominalCodes(layer.v, flags.tokens);
  }
  row.source = flags.tokens * model.source_bytes_per_token;
  row.stored = row.one_request.allocated;
  for (std::int64_t* bytes : {&row.nominal_codes, &row.source, &row.stored}) {
    if (__builtin_mul_overflow(*bytes, flags.requests, bytes)) {
      return absl::InvalidArgumentError(
          fmt::format("--requests {} of {} tokens take more bytes than 63 bits can say",
                      flags.requests, flags.tokens));
    }
  }
  if (flags.memory > 0) {
    row.tokens_that_fit = cachestore::TokensThatFit(model, flags.memory);
    row.requests_that_fit = cachestore::SequencesThatFit(model, flags.tokens, flags.memory);
    row.capacity_line = cachestore::PlanCapacity(model, flags.memory).line;
  }
  return row;
}

double BytesPerToken(const Row& row, const PlanFlags& flags) {
  return static_cast<double>(row.one_request.allocated) / static_cast<double>(flags.tokens);
}

std::string ToJsonText(const PlanFlags& flags, const std::vector<Row>& rows) {
  nlohmann::ordered_json json;
  json["layers"] = rows.front().model->layers.size();
  json["source_dtype"] = flags.dtype;
  json["tokens"] = flags.tokens;
  json["requests"] = flags.requests;
  if (flags.memory > 0) json["memory_bytes"] = flags.memory;
  json["formats"] = nlohmann::ordered_json::array();
  for (const Row& row : rows) {
    const cachestore::MemoryUse& use = row.one_request.use;
    nlohmann::ordered_json format;
    format["kv_cache_dtype"] = row.model->format;
    format["page_tokens"] = row.model->page_tokens;
    format["nominal_code_bytes"] = row.nominal_codes;
    format["source_bytes"] = row.source;
    format["stored_bytes"] = row.stored;
    format["memory"] = {{"codes", use.codes * flags.requests},
                        {"scales", use.scales * flags.requests},
                        {"residual", use.residual * flags.requests},
                        {"header", use.header * flags.requests},
                        {"slack", row.one_request.slack() * flags.requests}};
    format["bytes_per_token"] = BytesPerToken(row, flags);
    format["compression_ratio"] = cachestore::CompressionRatio(*row.model, flags.tokens);
    if (flags.memory > 0) {
      format["tokens_that_fit"] = row.tokens_that_fit;
      format["requests_that_fit"] = row.requests_that_fit;
      format["capacity_line"] = row.capacity_line;
    }
    format["notices"] = row.model->notices;
    json["formats"].push_back(std::move(format));
  }
  return JsonLine(json);
}

std::string ToText(const PlanFlags& flags, const std::vector<Row>& rows) {
  const auto size = [&](std::int64_t one_request) {
    return FormatBytes(static_cast<std::uint64_t>(one_request * flags.requests));
  };
  const auto number = [](std::int64_t n) { return WithThousands(static_cast<std::uint64_t>(n)); };
  Table stored({{"FORMAT"},
                {"NOMINAL", Align::kRight},
                {"CODES", Align::kRight},
                {"SCALES", Align::kRight},
                {"RESIDUAL", Align::kRight},
                {"HEADER", Align::kRight},
                {"SLACK", Align::kRight},
                {"STORED", Align::kRight},
                {"BYTES/TOKEN", Align::kRight},
                {"RATIO", Align::kRight}});
  Table fits(
      {{"FORMAT"}, {"REQUESTS THAT FIT", Align::kRight}, {"TOKENS THAT FIT", Align::kRight}});
  std::string lines;
  for (const Row& row : rows) {
    const cachestore::MemoryUse& use = row.one_request.use;
    stored.AddRow({row.model->format, FormatBytes(static_cast<std::uint64_t>(row.nominal_codes)),
                   size(use.codes), size(use.scales), size(use.residual), size(use.header),
                   size(row.one_request.slack()), size(row.one_request.allocated),
                   fmt::format("{:.1f}", BytesPerToken(row, flags)),
                   FormatRatio(cachestore::CompressionRatio(*row.model, flags.tokens))});
    fits.AddRow({row.model->format, number(row.requests_that_fit), number(row.tokens_that_fit)});
    if (flags.memory > 0) lines += fmt::format("{}: {}\n", row.model->format, row.capacity_line);
    for (const std::string& notice : row.model->notices) {
      lines += fmt::format("{}: notice: {}\n", row.model->format, notice);
    }
  }
  std::string text =
      fmt::format("{} layers, {} source, {} tokens, {} {}\n\n{}", rows.front().model->layers.size(),
                  flags.dtype, number(flags.tokens), number(flags.requests),
                  flags.requests == 1 ? "request" : "requests", stored.ToString());
  if (flags.memory > 0) {
    text += fmt::format("\nin {}, requests of {} tokens or tokens of one sequence:\n{}",
                        FormatBytes(static_cast<std::uint64_t>(flags.memory)), number(flags.tokens),
                        fits.ToString());
  }
  text +=
      "\nnominal: every token as codes, and nothing else; ratio: source bytes to stored bytes\n";
  return lines.empty() ? text : text + "\n" + lines;
}

int RunPlan(const Session& session, const PlanFlags& flags) {
  const absl::StatusOr<cachestore::ModelSpec> spec = SpecOf(flags);
  if (!spec.ok()) return session.BadUsage(spec.status());
  std::vector<Row> rows;
  for (const std::string& format :
       flags.kv_cache_dtype.empty() ? kComparedFormats : flags.kv_cache_dtype) {
    absl::StatusOr<Row> row = Plan(flags, *spec, format);
    if (!row.ok()) return session.BadUsage(row.status());
    rows.push_back(*std::move(row));
  }
  session.terminal().out << (session.flags().json ? ToJsonText(flags, rows) : ToText(flags, rows));
  return kExitOk;
}

}  // namespace

Command AddPlan(CLI::App& parent, Terminal& terminal) {
  const NewCommand command = AddCommand(parent, terminal, "plan",
                                        "Compute what a cache takes, format by format; no server");
  const auto flags = std::make_shared<PlanFlags>();
  CLI::App& app = *command.app;
  CLI::Option* layers = app.add_option("--layers", flags->layers, "Layers of the model")
                            ->check(CLI::Range(1, cachestore::kMaxLayers));
  CLI::Option* heads = app.add_option("--kv-heads", flags->kv_heads, "KV heads of a layer");
  CLI::Option* dim = app.add_option("--head-dim", flags->head_dim, "Dim of a head, of K and of V");
  app.add_option("--model", flags->model, "Hugging Face config.json instead of the three above")
      ->excludes(layers)
      ->excludes(heads)
      ->excludes(dim);
  app.add_option("--dtype", flags->dtype, "Source dtype: bfloat16, float16, float32")
      ->check(CLI::IsMember(kSources))
      ->capture_default_str();
  app.add_option("--tokens", flags->tokens, "Tokens of a request")
      ->check(CLI::Range(std::int64_t{1}, kMaxTokens))
      ->capture_default_str();
  app.add_option("--requests", flags->requests, "Requests held at once")
      ->check(CLI::Range(std::int64_t{1}, kMaxRequests))
      ->capture_default_str();
  app.add_option("--memory", flags->memory, "Budget, 80GiB say: also tells what fits into it")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->check(CLI::Range(std::int64_t{1}, kMaxMemory));
  app.add_option("--page-tokens", flags->page_tokens, "Tokens of a page; 0: 128")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--kv-cache-dtype", flags->kv_cache_dtype,
                 "Format; the flag may be given again to compare; the usual ones if not given")
      ->take_all()
      ->allow_extra_args(false);
  app.add_option("--kv-cache-dtype-skip-layers", flags->skip_layers,
                 "Layers kept in the source dtype: indices and/or sliding_window, by commas")
      ->delimiter(',')
      ->allow_extra_args(false);
  return {command.app, [session = command.session, flags] { return RunPlan(*session, *flags); }};
}

}  // namespace kvtier::client
