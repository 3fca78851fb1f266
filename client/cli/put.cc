#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

#include "cachestore/base/status_macros.h"
#include "client/cli/command.h"
#include "client/cli/json.h"
#include "client/cli/progress.h"
#include "client/cli/table.h"
#include "client/kv_file.h"
#include "client/model_source.h"
#include "client/resolve_model.h"
#include "client/scales_file.h"
#include "client/upload.h"

namespace kvtier::client {
namespace {

// Only whole pages of a chunk travel as codes, so chunks are longer then.
constexpr std::uint32_t kStoredChunkTokens = 4096;

const std::map<std::string, v1::Retention> kRetentions = {{"all", v1::RETENTION_ALL},
                                                          {"window", v1::RETENTION_WINDOW}};

struct PutFlags {
  std::string file;
  std::string sequence;
  std::string model;
  std::string model_name;
  std::string kv_cache_dtype = "auto";
  std::vector<std::string> skip_layers;
  std::string retention = "all";
  std::uint32_t page_tokens = 0;
  std::uint64_t max_tokens = 0;
  std::uint32_t chunk_tokens = 0;
  std::string transfer = "values";
  std::vector<float> k_scale;
  std::vector<float> v_scale;
  std::string scales;
  bool saturate = false;
  bool no_seal = false;
  bool progress = false;
};

// The flags' scales, for every layer that is stored as FP8.
absl::Status AddScales(const PutFlags& flags, v1::RegisterModelRequest& request) {
  if (!flags.scales.empty()) {
    KVT_ASSIGN_OR_RETURN(const CheckpointScales scales, ReadScales(flags.scales, {}));
    return SetScales(scales, request);
  }
  if (flags.k_scale.empty() && flags.v_scale.empty()) return absl::OkStatus();
  request.set_scales_source("given");
  for (int i = 0; i < request.spec().layers_size(); ++i) {
    const v1::LayerSpec& layer = request.spec().layers(i);
    if (KeepsSourceDtype(request, i)) continue;
    if (flags.k_scale.empty() || (flags.v_scale.empty() && layer.v_head_dim() > 0)) {
      return absl::InvalidArgumentError(
          fmt::format("{} is missing: K and V are scaled together",
                      flags.k_scale.empty() ? "--k-scale" : "--v-scale"));
    }
    v1::LayerScales& scales = *request.add_scales();
    scales.set_layer(static_cast<std::uint32_t>(i));
    scales.mutable_k_scale()->Assign(flags.k_scale.begin(), flags.k_scale.end());
    if (layer.v_head_dim() == 0) continue;
    scales.mutable_v_scale()->Assign(flags.v_scale.begin(), flags.v_scale.end());
  }
  return absl::OkStatus();
}

struct ModelToPut {
  v1::RegisterModelRequest request;
  std::vector<std::string> notices;  // of its config.json
};

absl::StatusOr<ModelToPut> ModelOf(const PutFlags& flags, const KvFile& file) {
  ModelToPut model;
  v1::RegisterModelRequest& request = model.request;
  *request.mutable_spec() = SpecFromKvFile(file);
  request.mutable_policy()->set_kv_cache_dtype(flags.kv_cache_dtype);
  if (!flags.model.empty()) {
    KVT_ASSIGN_OR_RETURN(ModelConfig config, ReadModelConfig(flags.model));
    *request.mutable_spec() = config.spec;
    request.mutable_policy()->set_kv_cache_dtype(ResolveAuto(config, flags.kv_cache_dtype));
    model.notices = std::move(config.notices);
    if (const absl::Status match = MatchSpec(file, *request.mutable_spec()); !match.ok()) {
      return absl::InvalidArgumentError(fmt::format("{} does not hold the model of {}: {}",
                                                    flags.file, flags.model,
                                                    std::string(match.message())));
    }
  }
  if (!flags.model_name.empty()) request.mutable_spec()->set_name(flags.model_name);
  for (const std::string& skip : flags.skip_layers) {
    request.mutable_policy()->add_kv_cache_dtype_skip_layers(skip);
  }
  request.mutable_policy()->set_retention(kRetentions.at(flags.retention));
  request.set_page_tokens(flags.page_tokens);
  request.set_max_tokens(flags.max_tokens);
  KVT_RETURN_IF_ERROR(AddScales(flags, request));
  return model;
}

struct PutResult {
  v1::RegisterModelResponse model;
  UploadReport upload;
  v1::DescribeResponse stored;
  std::vector<std::string> notices;
};

absl::StatusOr<PutResult> Run(const Session& session, const PutFlags& flags, const KvFile& file,
                              const ModelToPut& model) {
  PutResult result;
  result.notices = model.notices;
  KVT_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, session.Connect());
  KVT_ASSIGN_OR_RETURN(result.model, client->RegisterModel(model.request));
  result.notices.insert(result.notices.end(), result.model.notices().begin(),
                        result.model.notices().end());
  UploadOptions options;
  v1::AppendOpen& open = options.append.open;
  open.set_namespace_(session.flags().name_space);
  open.set_sequence(flags.sequence);
  open.set_model_id(result.model.model_id());
  open.set_layout(v1::LAYOUT_NHD);
  if (flags.saturate) open.set_non_finite(v1::NON_FINITE_POLICY_SATURATE);
  if (kTransfers.at(flags.transfer) == Transfer::kStored) {
    KVT_ASSIGN_OR_RETURN(const auto resolved, ResolveRegistered(model.request, result.model));
    options.encoder = std::make_shared<StoredEncoder>(resolved, open);
    options.chunk_tokens = kStoredChunkTokens;
  }
  if (flags.chunk_tokens > 0) options.chunk_tokens = flags.chunk_tokens;
  options.max_message_bytes = result.model.max_message_bytes();
  options.seal = !flags.no_seal;
  {
    Progress progress(session.terminal(), "put", flags.progress);
    options.on_progress = [&](std::uint64_t bytes) { progress.Update(bytes, file.bytes()); };
    KVT_ASSIGN_OR_RETURN(result.upload, Upload(*client, file, options));
  }
  v1::DescribeRequest describe;
  describe.set_namespace_(session.flags().name_space);
  describe.set_sequence(flags.sequence);
  KVT_ASSIGN_OR_RETURN(result.stored, client->Describe(describe));
  return result;
}

struct Figures {
  std::uint64_t stored_bytes = 0;
  double bytes_per_token = 0;
  double compression_ratio = 0;
  double seconds = 0;
  double mb_per_s = 0;
};

Figures FiguresOf(const PutResult& result) {
  const v1::SequenceInfo& info = result.stored.info();
  Figures figures;
  figures.stored_bytes = StoredBytes(info.memory());
  const auto stored = static_cast<double>(figures.stored_bytes);
  if (info.committed_tokens() > 0) {
    figures.bytes_per_token = stored / static_cast<double>(info.committed_tokens());
  }
  if (stored > 0) figures.compression_ratio = static_cast<double>(info.source_bytes()) / stored;
  figures.seconds = absl::ToDoubleSeconds(result.upload.duration);
  if (figures.seconds > 0) {
    figures.mb_per_s = static_cast<double>(result.upload.sent_bytes) / 1e6 / figures.seconds;
  }
  return figures;
}

std::string ToJsonText(const PutResult& result, const KvFile& file) {
  const v1::SequenceInfo& info = result.stored.info();
  const Figures figures = FiguresOf(result);
  nlohmann::ordered_json json;
  json["model_id"] = result.model.model_id();
  json["sequence"] = info.sequence();
  json["state"] = EnumeratorName(*v1::SequenceState_descriptor()->FindValueByNumber(info.state()));
  json["kv_cache_dtype"] = result.model.kv_cache_dtype();
  json["page_tokens"] = result.model.page_tokens();
  json["tokens"] = info.committed_tokens();
  json["first_token_sent"] = result.upload.first_token;
  json["sent_bytes"] = result.upload.sent_bytes;
  json["transferred_bytes"] = result.upload.transferred_bytes;
  json["source_bytes"] = info.source_bytes();
  json["stored_bytes"] = figures.stored_bytes;
  json["memory"] = ToJson(info.memory());
  json["bytes_per_token"] = figures.bytes_per_token;
  json["compression_ratio"] = figures.compression_ratio;
  json["append_seconds"] = figures.seconds;
  json["append_mb_per_s"] = figures.mb_per_s;
  json["saturated_values"] = info.saturated_values();
  json["capacity_line"] = result.model.capacity_line();
  json["capacity_tokens"] = result.model.capacity_tokens();
  json["scales_line"] = result.model.scales_line();
  json["notices"] = result.notices;
  json["ignored_tensors"] = file.ignored_tensors();
  return JsonLine(json);
}

std::string ToText(const PutResult& result, const KvFile& file) {
  const v1::SequenceInfo& info = result.stored.info();
  const v1::MemoryParts& memory = info.memory();
  const Figures figures = FiguresOf(result);
  Table table({{}, {}});
  table.AddRow(
      {"sequence",
       fmt::format("{}, {} tokens, {}", info.sequence(), WithThousands(info.committed_tokens()),
                   info.state() == v1::SEQUENCE_STATE_SEALED ? "sealed" : "open")});
  table.AddRow({"model", result.model.model_id()});
  table.AddRow({"format", result.model.kv_cache_dtype()});
  table.AddRow(
      {"stored", fmt::format("{} of {} source: {}, {:.1f} bytes per token",
                             FormatBytes(figures.stored_bytes), FormatBytes(info.source_bytes()),
                             FormatRatio(figures.compression_ratio), figures.bytes_per_token)});
  table.AddRow({"parts", fmt::format("codes {}, scales {}, residual {}, header {}, slack {}",
                                     FormatBytes(memory.codes()), FormatBytes(memory.scales()),
                                     FormatBytes(memory.residual()), FormatBytes(memory.header()),
                                     FormatBytes(memory.slack()))});
  if (result.upload.first_token > 0) {
    table.AddRow({"resumed", fmt::format("at token {}", WithThousands(result.upload.first_token))});
  }
  table.AddRow(
      {"append", fmt::format("{} in {:.3f} s: {:.1f} MB/s", FormatBytes(result.upload.sent_bytes),
                             figures.seconds, figures.mb_per_s)});
  if (result.upload.transferred_bytes != result.upload.sent_bytes) {
    table.AddRow({"transferred", FormatBytes(result.upload.transferred_bytes)});
  }
  table.AddRow({"saturated", fmt::format("{} values", WithThousands(info.saturated_values()))});
  if (!file.ignored_tensors().empty()) {
    table.AddRow({"ignored", fmt::format("{}", fmt::join(file.ignored_tensors(), ", "))});
  }
  std::string text = table.ToString();
  for (const std::string& line : {result.model.capacity_line(), result.model.scales_line()}) {
    if (!line.empty()) text += line + "\n";
  }
  for (const std::string& notice : result.notices) text += "notice: " + notice + "\n";
  return text;
}

int Put(const Session& session, const PutFlags& flags) {
  const absl::StatusOr<KvFile> file = KvFile::Open(flags.file);
  if (!file.ok()) return session.BadUsage(file.status());
  const absl::StatusOr<ModelToPut> model = ModelOf(flags, *file);
  if (!model.ok()) return session.BadUsage(model.status());
  const absl::StatusOr<PutResult> result = Run(session, flags, *file, *model);
  if (!result.ok()) return session.Refused(result.status());
  session.terminal().out << (session.flags().json ? ToJsonText(*result, *file)
                                                  : ToText(*result, *file));
  return kExitOk;
}

}  // namespace

Command AddPut(CLI::App& parent, Terminal& terminal) {
  const NewCommand command = AddCommand(parent, terminal, "put",
                                        "Store the K and V of a safetensors file as one sequence");
  const auto flags = std::make_shared<PutFlags>();
  CLI::App& app = *command.app;
  app.add_option("file", flags->file,
                 "Holds layers.N.k and layers.N.v, [tokens, kv_heads, head_dim], BF16, F16 or F32")
      ->required();
  app.add_option("--sequence", flags->sequence, "Id of the sequence")->required();
  app.add_option("--model", flags->model,
                 "Hugging Face config.json of the model; without it the file's shapes say it");
  app.add_option("--model-name", flags->model_name, "Name of the model; the file's if not given");
  app.add_option("--kv-cache-dtype", flags->kv_cache_dtype, "Format to store in")
      ->capture_default_str();
  app.add_option("--kv-cache-dtype-skip-layers", flags->skip_layers,
                 "Layers kept in the source dtype: indices and/or sliding_window, by commas")
      ->delimiter(',')
      ->allow_extra_args(false);
  app.add_option("--retention", flags->retention,
                 "What sliding-window layers keep: all tokens, or the pages that their window sees")
      ->check(CLI::IsMember(kRetentions))
      ->capture_default_str();
  app.add_option("--page-tokens", flags->page_tokens, "Tokens of a page; 0: the server's default")
      ->capture_default_str();
  app.add_option("--max-tokens", flags->max_tokens,
                 "Tokens per request in the capacity line; 0: the server's default")
      ->capture_default_str();
  app.add_option("--chunk-tokens", flags->chunk_tokens,
                 "Tokens of one layer in a message; 256, of --transfer=stored 4096, if not given")
      ->check(CLI::Range(1U, 1U << 24U));
  AddTransport(app, command.session->flags());
  app.add_option("--transfer", flags->transfer,
                 "values, or stored: pages are encoded here and codes travel, for the same bytes "
                 "there")
      ->check(CLI::IsMember(kTransfers))
      ->capture_default_str();
  CLI::Option* k_scale = app.add_option("--k-scale", flags->k_scale,
                                        "FP8 scale of K: one, or one per KV head by commas")
                             ->delimiter(',')
                             ->allow_extra_args(false);
  CLI::Option* v_scale = app.add_option("--v-scale", flags->v_scale,
                                        "FP8 scale of V: one, or one per KV head by commas")
                             ->delimiter(',')
                             ->allow_extra_args(false);
  app.add_option("--scales", flags->scales,
                 "FP8 scales of a calibrated checkpoint: its directory, or what `kvtier scales "
                 "--out` wrote")
      ->excludes(k_scale)
      ->excludes(v_scale);
  RefuseCalculateKvScales(app);
  app.add_flag("--saturate", flags->saturate,
               "Store Inf and NaN saturated instead of refusing them");
  app.add_flag("--no-seal", flags->no_seal, "Leave the sequence open");
  app.add_flag("--progress", flags->progress, "Tell progress even where stderr is no terminal");
  return {command.app, [session = command.session, flags] { return Put(*session, *flags); }};
}

}  // namespace kvtier::client
