#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>

#include "client/cli/command.h"
#include "client/cli/json.h"
#include "client/cli/table.h"

// capacity, drain: what is said and done of the server as a whole.
namespace kvtier::client {
namespace {

using Align = Table::Align;

struct CapacityFlags {
  std::string model_id;
  std::string kv_cache_dtype;
};

std::string ServerTable(const v1::CapacityResponse& reply) {
  const v1::MemoryParts& memory = reply.memory();
  Table table({{}, {"", Align::kRight}, {"", Align::kRight}});
  const auto add = [&](const std::string& name, std::uint64_t bytes) {
    const double share = reply.budget_bytes() == 0 ? 0
                                                   : 100.0 * static_cast<double>(bytes) /
                                                         static_cast<double>(reply.budget_bytes());
    table.AddRow({name, FormatBytes(bytes), fmt::format("{:.1f} %", share)});
  };
  add("budget", reply.budget_bytes());
  add("  codes", memory.codes());
  add("  scales", memory.scales());
  add("  residual", memory.residual());
  add("  header", memory.header());
  add("  slack", memory.slack());
  add("  staging", memory.staging());
  add("  free", memory.free());
  table.AddRow({"sequences", WithThousands(reply.sequences())});
  table.AddRow({"tokens held", WithThousands(reply.tokens_held())});
  table.AddRow({"compression", FormatRatio(reply.compression_ratio())});
  return table.ToString();
}

// Two lines of columns a model would be wide: what is held, then what still fits.
std::string ModelTables(const v1::CapacityResponse& reply) {
  Table held({{"MODEL"},
              {"NAME"},
              {"FORMAT"},
              {"SEQUENCES", Align::kRight},
              {"TOKENS HELD", Align::kRight},
              {"STORED", Align::kRight},
              {"RATIO", Align::kRight},
              {"LAYERS AT SCALE 1.0", Align::kRight}});
  Table fits({{"MODEL"},
              {"NAME"},
              {"FORMAT"},
              {"BYTES/TOKEN", Align::kRight},
              {"PLANNED RATIO", Align::kRight},
              {"MORE TOKENS", Align::kRight},
              {"MORE SEQUENCES", Align::kRight},
              {"EACH OF TOKENS", Align::kRight}});
  for (const v1::ModelCapacity& model : reply.models()) {
    held.AddRow({model.model_id(), model.name(), model.kv_cache_dtype(),
                 WithThousands(model.sequences()), WithThousands(model.tokens_held()),
                 FormatBytes(model.stored_bytes()), FormatRatio(model.compression_ratio()),
                 fmt::format("{} of {}", model.unit_scale_layers(), model.layers())});
    fits.AddRow({model.model_id(), model.name(), model.kv_cache_dtype(),
                 fmt::format("{:.1f}", model.bytes_per_token()),
                 FormatRatio(model.planned_compression_ratio()), WithThousands(model.more_tokens()),
                 WithThousands(model.more_sequences()), WithThousands(model.mean_tokens())});
  }
  if (held.empty()) return "no model is registered\n";
  return held.ToString() + "\n" + fits.ToString();
}

int Capacity(const Session& session, const CapacityFlags& flags) {
  const absl::StatusOr<std::unique_ptr<Client>> client = session.Connect();
  if (!client.ok()) return session.BadUsage(client.status());
  v1::CapacityRequest request;
  request.set_model_id(flags.model_id);
  request.set_kv_cache_dtype(flags.kv_cache_dtype);
  const absl::StatusOr<v1::CapacityResponse> reply = (*client)->Capacity(request);
  if (!reply.ok()) return session.Refused(reply.status());
  session.terminal().out << (session.flags().json
                                 ? JsonLine(ToJson(*reply))
                                 : ServerTable(*reply) + "\n" + ModelTables(*reply));
  return kExitOk;
}

int Drain(const Session& session) {
  const absl::StatusOr<std::unique_ptr<Client>> client = session.Connect();
  if (!client.ok()) return session.BadUsage(client.status());
  const absl::StatusOr<v1::DrainResponse> reply = (*client)->Drain();
  if (!reply.ok()) return session.Refused(reply.status());
  session.terminal().out << (session.flags().json
                                 ? JsonLine(ToJson(*reply))
                                 : fmt::format("{} takes no new work\n", session.flags().server));
  return kExitOk;
}

}  // namespace

Command AddCapacity(CLI::App& parent, Terminal& terminal) {
  const NewCommand command =
      AddCommand(parent, terminal, "capacity",
                 "Show what the budget holds and what still fits, of all namespaces");
  const auto flags = std::make_shared<CapacityFlags>();
  CLI::Option* model =
      command.app->add_option("--model-id", flags->model_id, "One model; all if not given");
  command.app
      ->add_option("--kv-cache-dtype", flags->kv_cache_dtype, "What if the model had this format")
      ->needs(model);
  return {command.app, [session = command.session, flags] { return Capacity(*session, *flags); }};
}

Command AddDrain(CLI::App& parent, Terminal& terminal) {
  const NewCommand command =
      AddCommand(parent, terminal, "drain", "Make the server take no new work; what runs may end");
  return {command.app, [session = command.session] { return Drain(*session); }};
}

}  // namespace kvtier::client
