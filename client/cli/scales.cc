#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cachestore/base/status_macros.h"
#include "client/cli/command.h"
#include "client/cli/json.h"
#include "client/cli/table.h"
#include "client/observed_scales.h"
#include "client/scales_file.h"
#include "client/text_file.h"

// scales: those of a calibrated checkpoint, or those that a server's traffic asks for.
namespace kvtier::client {
namespace {

using Align = Table::Align;

struct ScalesFlags {
  std::string checkpoint;
  CheckpointScalesOptions of_checkpoint;
  bool observed = false;
  std::string model_id;
  ObservedScalesOptions of_traffic;
  std::string out;
};

// "0.0125", or the least and the largest of several.
template <class Values>
std::string Range(const Values& values) {
  if (values.empty()) return "-";
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  if (values.size() == 1) return fmt::format("{:.6g}", *least);
  return fmt::format("{:.6g} to {:.6g} ({} heads)", *least, *most, values.size());
}

// The first name whole, of the others what is not the same.
std::string Origin(const LayerCalibration& layer) {
  std::vector<std::string> names;
  for (const SideScales* side : {&layer.k, &layer.v, &layer.q}) {
    if (side->tensor.empty() || (!names.empty() && side->tensor == layer.k.tensor)) continue;
    std::string name = side->tensor;
    if (!names.empty()) {
      const auto differs =
          std::mismatch(name.begin(), name.end(), names[0].begin(), names[0].end()).first;
      const auto same = static_cast<std::size_t>(differs - name.begin());
      const std::size_t dot = name.rfind('.', same == 0 ? 0 : same - 1);
      if (dot != std::string::npos) name = name.substr(dot + 1);
    }
    names.push_back(std::move(name));
  }
  return names.empty() ? "none: 1.0" : fmt::format("{}", fmt::join(names, ", "));
}

std::string CheckpointText(const CheckpointScales& scales) {
  Table table({{"LAYER", Align::kRight},
               {"K_SCALE", Align::kRight},
               {"V_SCALE", Align::kRight},
               {"Q_SCALE", Align::kRight},
               {"FROM"}});
  for (const LayerCalibration& layer : scales.layers) {
    table.AddRow({fmt::format("{}", layer.layer), Range(layer.k.values), Range(layer.v.values),
                  Range(layer.q.values), Origin(layer)});
  }
  std::string text = table.ToString();
  text += fmt::format("calibrated {} of {} layers ({})\n", scales.calibrated, scales.layers.size(),
                      scales.source);
  for (const std::string& warning : scales.warnings) text += "warning: " + warning + "\n";
  return text;
}

int OfCheckpoint(const Session& session, const ScalesFlags& flags) {
  const absl::StatusOr<CheckpointScales> scales =
      ReadCheckpointScales(flags.checkpoint, flags.of_checkpoint);
  if (!scales.ok()) return session.BadUsage(scales.status());
  const std::string json = ScalesToJson(*scales);
  if (!flags.out.empty()) {
    if (const absl::Status written = WriteTextFile(flags.out, json); !written.ok())
      return session.BadUsage(written);
  }
  session.terminal().out << (session.flags().json ? json : CheckpointText(*scales));
  return kExitOk;
}

std::string ObservedText(const v1::ScalesResponse& reply, const ScalesFlags& flags) {
  Table table({{"LAYER", Align::kRight},
               {"FORMAT"},
               {"TOKENS", Align::kRight},
               {"K AMAX", Align::kRight},
               {"V AMAX", Align::kRight},
               {"K_SCALE IN USE", Align::kRight},
               {"V_SCALE IN USE", Align::kRight},
               {"K_SCALE WANTED", Align::kRight},
               {"V_SCALE WANTED", Align::kRight}});
  const auto wanted = [&](const auto& amax) {
    return Range(ScalesFor(amax, flags.of_traffic).value_or(std::vector<float>()));
  };
  for (const v1::LayerObservation& layer : reply.layers()) {
    table.AddRow({fmt::format("{}", layer.layer()), layer.kv_cache_dtype(),
                  WithThousands(layer.tokens()), Range(layer.k_amax()), Range(layer.v_amax()),
                  Range(layer.k_scale()), Range(layer.v_scale()), wanted(layer.k_amax()),
                  wanted(layer.v_amax())});
  }
  std::string text = table.ToString();
  if (!flags.out.empty()) text += fmt::format("written to {}\n", flags.out);
  return text;
}

int OfTraffic(const Session& session, const ScalesFlags& flags) {
  const absl::StatusOr<std::unique_ptr<Client>> client = session.Connect();
  if (!client.ok()) return session.BadUsage(client.status());
  v1::ScalesRequest request;
  request.set_model_id(flags.model_id);
  const absl::StatusOr<v1::ScalesResponse> reply = (*client)->Scales(request);
  if (!reply.ok()) return session.Refused(reply.status());
  if (!flags.out.empty()) {
    const absl::Status written = WriteObservedScales(*reply, flags.of_traffic, flags.out);
    if (!written.ok()) return session.BadUsage(written);
  }
  session.terminal().out << (session.flags().json ? JsonLine(ToJson(*reply))
                                                  : ObservedText(*reply, flags));
  return kExitOk;
}

}  // namespace

Command AddScales(CLI::App& parent, Terminal& terminal) {
  const NewCommand command = AddCommand(
      parent, terminal, "scales",
      "Show the KV scales of a calibrated checkpoint, or those that a server's traffic asks for");
  const auto flags = std::make_shared<ScalesFlags>();
  CLI::App& app = *command.app;
  CLI::Option* checkpoint = app.add_option("checkpoint", flags->checkpoint,
                                           "Directory with config.json and safetensors files");
  app.add_option("--tp-size", flags->of_checkpoint.tp_size,
                 "Ranks that the KV heads are split over")
      ->needs(checkpoint)
      ->capture_default_str();
  app.add_option("--tp-rank", flags->of_checkpoint.tp_rank, "The rank to give the scales of")
      ->needs(checkpoint)
      ->capture_default_str();
  app.add_flag("--allow-partial", flags->of_checkpoint.allow_partial,
               "Take 1.0 for layers that the checkpoint has no scales of, instead of refusing it")
      ->needs(checkpoint);
  CLI::Option* observed =
      app.add_flag("--observed", flags->observed, "What the server's appends have had so far")
          ->excludes(checkpoint);
  CLI::Option* model =
      app.add_option("--model-id", flags->model_id, "The model observed")->needs(observed);
  observed->needs(model);
  app.add_option("--headroom", flags->of_traffic.headroom,
                 "Scales reach this far beyond the largest magnitude seen")
      ->needs(observed)
      ->check(CLI::Range(1.0, 1000.0))
      ->capture_default_str();
  app.add_flag("--per-head", flags->of_traffic.per_head, "A scale per KV head, not per tensor")
      ->needs(observed);
  app.add_option("--out", flags->out,
                 "JSON file for `kvtier put --scales`; with --observed a new directory with a "
                 "safetensors file and a config.json");
  RefuseCalculateKvScales(app);
  return {command.app, [session = command.session, flags] {
            if (flags->observed) return OfTraffic(*session, *flags);
            if (!flags->checkpoint.empty()) return OfCheckpoint(*session, *flags);
            return session->BadUsage(absl::InvalidArgumentError(
                "want a checkpoint's directory, or --observed with --model-id"));
          }};
}

}  // namespace kvtier::client
