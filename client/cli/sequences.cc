#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>

#include "cachestore/base/status_macros.h"
#include "client/cli/command.h"
#include "client/cli/json.h"
#include "client/cli/table.h"

// list, describe, remove: what is said and done of sequences as a whole.
namespace kvtier::client {
namespace {

using Align = Table::Align;

std::string StateName(const v1::SequenceInfo& info) {
  return EnumeratorName(*v1::SequenceState_descriptor()->FindValueByNumber(info.state()));
}

double Ratio(const v1::SequenceInfo& info) {
  const std::uint64_t stored = StoredBytes(info.memory());
  return stored == 0 ? 0 : static_cast<double>(info.source_bytes()) / static_cast<double>(stored);
}

absl::StatusOr<v1::ListSequencesResponse> ListAll(const Session& session) {
  KVT_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, session.Connect());
  v1::ListSequencesRequest request;
  request.set_namespace_(session.flags().name_space);
  v1::ListSequencesResponse all;
  do {
    KVT_ASSIGN_OR_RETURN(v1::ListSequencesResponse page, client->ListSequences(request));
    request.set_page_token(page.next_page_token());
    all.set_boot_id(page.boot_id());
    for (v1::SequenceInfo& info : *page.mutable_sequences()) *all.add_sequences() = std::move(info);
  } while (!request.page_token().empty());
  return all;
}

int List(const Session& session) {
  const absl::StatusOr<v1::ListSequencesResponse> all = ListAll(session);
  if (!all.ok()) return session.Refused(all.status());
  if (session.flags().json) {
    nlohmann::ordered_json json = ToJson(*all);
    json.erase("next_page_token");
    session.terminal().out << JsonLine(json);
    return kExitOk;
  }
  Table table({{"SEQUENCE"},
               {"STATE"},
               {"FORMAT"},
               {"TOKENS", Align::kRight},
               {"STORED", Align::kRight},
               {"RATIO", Align::kRight},
               {"SATURATED", Align::kRight},
               {"MODEL"}});
  for (const v1::SequenceInfo& info : all->sequences()) {
    table.AddRow({info.sequence(), StateName(info), info.kv_cache_dtype(),
                  WithThousands(info.committed_tokens()), FormatBytes(StoredBytes(info.memory())),
                  FormatRatio(Ratio(info)), WithThousands(info.saturated_values()),
                  info.model_id()});
  }
  session.terminal().out << table.ToString();
  return kExitOk;
}

std::string LayerShape(const v1::LayerSpec& layer) {
  switch (layer.kind()) {
    case v1::LAYER_KIND_SLIDING_WINDOW:
      return fmt::format("window {}", WithThousands(layer.window()));
    case v1::LAYER_KIND_MLA:
      return "mla";
    default:
      return "full";
  }
}

std::string DescribeText(const v1::DescribeResponse& reply) {
  const v1::SequenceInfo& info = reply.info();
  const v1::MemoryParts& memory = info.memory();
  Table facts({{}, {}});
  facts.AddRow({"sequence", info.sequence()});
  facts.AddRow({"state", StateName(info)});
  facts.AddRow({"tokens", WithThousands(info.committed_tokens())});
  facts.AddRow({"model", fmt::format("{} ({})", reply.spec().name(), info.model_id())});
  facts.AddRow({"format", info.kv_cache_dtype()});
  facts.AddRow({"page tokens", WithThousands(reply.page_tokens())});
  facts.AddRow({"stored", fmt::format("{} of {} source: {}", FormatBytes(StoredBytes(memory)),
                                      FormatBytes(info.source_bytes()), FormatRatio(Ratio(info)))});
  facts.AddRow({"parts", fmt::format("codes {}, scales {}, residual {}, header {}, slack {}",
                                     FormatBytes(memory.codes()), FormatBytes(memory.scales()),
                                     FormatBytes(memory.residual()), FormatBytes(memory.header()),
                                     FormatBytes(memory.slack()))});
  facts.AddRow({"saturated", fmt::format("{} values", WithThousands(info.saturated_values()))});
  Table layers({{"LAYER", Align::kRight},
                {"KIND"},
                {"HEADS", Align::kRight},
                {"K DIM", Align::kRight},
                {"V DIM", Align::kRight},
                {"FORMAT"},
                {"RECEIVED", Align::kRight},
                {"K CODES", Align::kRight},
                {"V CODES", Align::kRight},
                {"K SATURATED", Align::kRight},
                {"V SATURATED", Align::kRight}});
  for (const v1::LayerInfo& layer : reply.layers()) {
    const int index = static_cast<int>(layer.layer());
    const v1::LayerSpec& spec = index < reply.spec().layers_size()
                                    ? reply.spec().layers(index)
                                    : v1::LayerSpec::default_instance();
    layers.AddRow({WithThousands(layer.layer()), LayerShape(spec), WithThousands(spec.kv_heads()),
                   WithThousands(spec.k_head_dim()), WithThousands(spec.v_head_dim()),
                   layer.kv_cache_dtype(), WithThousands(layer.received_tokens()),
                   WithThousands(layer.k_code_tokens()), WithThousands(layer.v_code_tokens()),
                   WithThousands(layer.k_saturated_values()),
                   WithThousands(layer.v_saturated_values())});
  }
  return facts.ToString() + "\n" + layers.ToString();
}

int Describe(const Session& session, const std::string& sequence) {
  const absl::StatusOr<std::unique_ptr<Client>> client = session.Connect();
  if (!client.ok()) return session.BadUsage(client.status());
  v1::DescribeRequest request;
  request.set_namespace_(session.flags().name_space);
  request.set_sequence(sequence);
  const absl::StatusOr<v1::DescribeResponse> reply = (*client)->Describe(request);
  if (!reply.ok()) return session.Refused(reply.status());
  session.terminal().out << (session.flags().json ? JsonLine(ToJson(*reply))
                                                  : DescribeText(*reply));
  return kExitOk;
}

int Remove(const Session& session, const std::string& sequence) {
  const absl::StatusOr<std::unique_ptr<Client>> client = session.Connect();
  if (!client.ok()) return session.BadUsage(client.status());
  v1::RemoveRequest request;
  request.set_namespace_(session.flags().name_space);
  request.set_sequence(sequence);
  const absl::StatusOr<v1::RemoveResponse> reply = (*client)->Remove(request);
  if (!reply.ok()) return session.Refused(reply.status());
  if (session.flags().json) {
    nlohmann::ordered_json json = ToJson(*reply);
    json["removed"] = sequence;
    session.terminal().out << JsonLine(json);
  } else {
    session.terminal().out << fmt::format("removed {}\n", sequence);
  }
  return kExitOk;
}

using OneSequence = int (*)(const Session&, const std::string&);

Command AddOneSequence(const NewCommand& command, OneSequence run) {
  const auto sequence = std::make_shared<std::string>();
  command.app->add_option("--sequence", *sequence, "Id of the sequence")->required();
  return {command.app,
          [session = command.session, sequence, run] { return run(*session, *sequence); }};
}

}  // namespace

Command AddList(CLI::App& parent, Terminal& terminal) {
  const NewCommand command =
      AddCommand(parent, terminal, "list", "List the sequences of a namespace");
  return {command.app, [session = command.session] { return List(*session); }};
}

Command AddDescribe(CLI::App& parent, Terminal& terminal) {
  return AddOneSequence(
      AddCommand(parent, terminal, "describe", "Show what one sequence holds, layer by layer"),
      Describe);
}

Command AddRemove(CLI::App& parent, Terminal& terminal) {
  return AddOneSequence(AddCommand(parent, terminal, "remove", "Drop a sequence, open or sealed"),
                        Remove);
}

}  // namespace kvtier::client
