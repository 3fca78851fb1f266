#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <string>

#include "cachestore/base/status_macros.h"
#include "client/cli/command.h"
#include "client/cli/json.h"
#include "client/cli/progress.h"
#include "client/cli/range.h"
#include "client/cli/table.h"
#include "client/download.h"
#include "client/kv_file.h"

namespace kvtier::client {
namespace {

const std::map<std::string, v1::ReadAs> kReadAs = {
    {"source", v1::READ_AS_SOURCE},     {"bf16", v1::READ_AS_BF16},
    {"fp16", v1::READ_AS_FP16},         {"fp32", v1::READ_AS_FP32},
    {"fp8_e4m3", v1::READ_AS_FP8_E4M3}, {"fp8_e5m2", v1::READ_AS_FP8_E5M2}};
const std::map<std::string, v1::Layout> kLayouts = {{"NHD", v1::LAYOUT_NHD},
                                                    {"HND", v1::LAYOUT_HND}};

struct GetFlags {
  std::string sequence;
  std::string out;
  std::string as = "source";
  std::string layout = "NHD";
  std::string transfer = "values";
  std::string layers;
  std::string heads;
  std::string tokens;
  std::optional<float> k_scale;
  std::optional<float> v_scale;
  bool measure_scales = false;
  bool within_windows = false;
  bool progress = false;
};

absl::StatusOr<Range> ParseFlag(const std::string& flag, const std::string& text,
                                std::uint64_t limit) {
  if (text.empty()) return Range();
  absl::StatusOr<Range> range = ParseRange(text, limit);
  if (range.ok()) return range;
  return absl::InvalidArgumentError(
      fmt::format("{}: {}", flag, std::string(range.status().message())));
}

absl::StatusOr<v1::ReadRequest> Request(const Session& session, const GetFlags& flags) {
  constexpr std::uint64_t kMost32 = std::numeric_limits<std::uint32_t>::max();
  constexpr std::uint64_t kMost64 = std::numeric_limits<std::int64_t>::max();
  KVT_ASSIGN_OR_RETURN(const Range layers, ParseFlag("--layers", flags.layers, kMost32));
  KVT_ASSIGN_OR_RETURN(const Range heads, ParseFlag("--heads", flags.heads, kMost32));
  KVT_ASSIGN_OR_RETURN(const Range tokens, ParseFlag("--tokens", flags.tokens, kMost64));
  v1::ReadRequest request;
  request.set_namespace_(session.flags().name_space);
  v1::SequenceRange& sequence = *request.add_sequences();
  sequence.set_sequence(flags.sequence);
  sequence.set_first_token(tokens.first);
  sequence.set_num_tokens(tokens.count);
  request.set_first_layer(static_cast<std::uint32_t>(layers.first));
  request.set_num_layers(static_cast<std::uint32_t>(layers.count));
  request.set_first_head(static_cast<std::uint32_t>(heads.first));
  request.set_num_heads(static_cast<std::uint32_t>(heads.count));
  request.set_as(kReadAs.at(flags.as));
  request.set_layout(kLayouts.at(flags.layout));
  if (flags.k_scale) request.set_k_scale(*flags.k_scale);
  if (flags.v_scale) request.set_v_scale(*flags.v_scale);
  request.set_measure_scales(flags.measure_scales);
  request.set_within_windows(flags.within_windows);
  return request;
}

// What can be known to go wrong with --out before anything is read.
absl::Status CheckOut(const std::string& out) {
  std::error_code ignored;
  const std::filesystem::path folder = std::filesystem::absolute(out, ignored).parent_path();
  if (!std::filesystem::is_directory(folder, ignored)) {
    return absl::InvalidArgumentError(
        fmt::format("--out: {} is not a folder that exists", folder.string()));
  }
  if (std::filesystem::exists(out, ignored) && !std::filesystem::is_regular_file(out, ignored)) {
    return absl::InvalidArgumentError(
        fmt::format("--out: {} exists and is not a regular file", out));
  }
  return absl::OkStatus();
}

// One name if the layers agree (they differ where some are kept in the source dtype).
std::string DtypeNames(const v1::SequenceManifest& sequence) {
  std::string names;
  for (const v1::LayerManifest& layer : sequence.layers()) {
    const std::string name = SafetensorsDtype(layer.dtype()).value_or("?");
    if (names.find(name) == std::string::npos) names += (names.empty() ? "" : ",") + name;
  }
  return names;
}

void Print(const Session& session, const GetFlags& flags, const DownloadReport& report) {
  const v1::SequenceManifest& sequence = report.read.manifest.sequences(0);
  const std::uint64_t bytes = report.read.manifest.total_bytes();
  const double seconds = absl::ToDoubleSeconds(report.duration);
  const double mb_per_s = seconds > 0 ? static_cast<double>(bytes) / 1e6 / seconds : 0;
  if (session.flags().json) {
    nlohmann::ordered_json json;
    json["sequence"] = sequence.sequence();
    json["model_id"] = sequence.model_id();
    json["first_token"] = sequence.first_token();
    json["tokens"] = sequence.num_tokens();
    json["layers"] = sequence.layers_size();
    json["bytes"] = bytes;
    json["transferred_bytes"] = report.read.transferred_bytes;
    json["read_seconds"] = seconds;
    json["read_mb_per_s"] = mb_per_s;
    json["saturated_values"] = report.read.summary.saturated_values();
    json["dtype"] = DtypeNames(sequence);
    json["layout"] = flags.layout;
    json["out"] = flags.out;
    session.terminal().out << JsonLine(json);
    return;
  }
  Table table({{}, {}});
  table.AddRow(
      {"sequence", fmt::format("{}, tokens {} to {}", sequence.sequence(),
                               WithThousands(sequence.first_token()),
                               WithThousands(sequence.first_token() + sequence.num_tokens()))});
  table.AddRow({"read", fmt::format("{} layers as {} {}: {} in {:.3f} s, {:.1f} MB/s",
                                    sequence.layers_size(), DtypeNames(sequence), flags.layout,
                                    FormatBytes(bytes), seconds, mb_per_s)});
  if (report.read.transferred_bytes != bytes) {
    table.AddRow({"transferred", FormatBytes(report.read.transferred_bytes)});
  }
  table.AddRow({"saturated",
                fmt::format("{} values", WithThousands(report.read.summary.saturated_values()))});
  table.AddRow({"out", flags.out});
  session.terminal().out << table.ToString();
}

int Get(const Session& session, const GetFlags& flags) {
  const absl::StatusOr<v1::ReadRequest> request = Request(session, flags);
  if (!request.ok()) return session.BadUsage(request.status());
  if (const absl::Status out = CheckOut(flags.out); !out.ok()) return session.BadUsage(out);
  const absl::StatusOr<std::unique_ptr<Client>> client = session.Connect();
  if (!client.ok()) return session.BadUsage(client.status());
  absl::StatusOr<DownloadReport> report;
  {
    Progress progress(session.terminal(), "get", flags.progress);
    report = Download(
        **client, *request, flags.out,
        [&](std::uint64_t bytes, std::uint64_t total) { progress.Update(bytes, total); },
        kTransfers.at(flags.transfer));
  }
  if (!report.ok()) return session.Refused(report.status());
  Print(session, flags, *report);
  return kExitOk;
}

}  // namespace

Command AddGet(CLI::App& parent, Terminal& terminal) {
  const NewCommand command =
      AddCommand(parent, terminal, "get", "Read a sequence into a safetensors file");
  const auto flags = std::make_shared<GetFlags>();
  CLI::App& app = *command.app;
  app.add_option("--sequence", flags->sequence, "Id of the sequence")->required();
  app.add_option("--out", flags->out, "File to write; it appears when it is whole")->required();
  app.add_option("--as", flags->as,
                 "Type of the values: source, bf16, fp16, fp32, fp8_e4m3, fp8_e5m2")
      ->check(CLI::IsMember(kReadAs))
      ->capture_default_str();
  app.add_option("--layout", flags->layout, "NHD: [tokens, heads, dim]; HND: [heads, tokens, dim]")
      ->check(CLI::IsMember(kLayouts))
      ->capture_default_str();
  AddTransport(app, command.session->flags());
  app.add_option("--transfer", flags->transfer,
                 "values, or stored: codes travel and are decoded here, to the same values")
      ->check(CLI::IsMember(kTransfers))
      ->capture_default_str();
  app.add_option("--layers", flags->layers, "Layers FIRST:END, END left out; all if not given");
  app.add_option("--heads", flags->heads, "KV heads FIRST:END; all if not given");
  app.add_option("--tokens", flags->tokens, "Tokens FIRST:END; all committed if not given");
  app.add_option("--k-scale", flags->k_scale,
                 "Scale of K for FP8; the stored one, else 1.0, if not given");
  app.add_option("--v-scale", flags->v_scale,
                 "Scale of V for FP8; the stored one, else 1.0, if not given");
  app.add_flag("--measure-scales", flags->measure_scales,
               "For FP8, measure the scales that are not given over what is read");
  app.add_flag("--within-windows", flags->within_windows,
               "Of sliding-window layers read only what their window sees at the end (with "
               "--transfer=stored from a page's begin on); their tensors are shorter then");
  app.add_flag("--progress", flags->progress, "Tell progress even where stderr is no terminal");
  return {command.app, [session = command.session, flags] { return Get(*session, *flags); }};
}

}  // namespace kvtier::client
