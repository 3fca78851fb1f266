#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cachestore/model/plan.h"
#include "client/cli/command.h"
#include "client/cli/json.h"
#include "client/cli/progress.h"
#include "client/cli/table.h"
#include "kernels/codec_speed.h"
#include "kernels/codec_table.h"
#include "kernels/host_target.h"

// formats: the table of codecs, and what they come to on this machine.
namespace kvtier::client {
namespace {

using Align = Table::Align;
using kernels::Codec;

constexpr std::int64_t kLengths[] = {512, 4'096, 32'768};
constexpr int kPageTokens = 128;
constexpr int kKvHeads = 8;
constexpr std::size_t kBenchBytes = std::size_t{96} << 20;
constexpr int kBenchRuns = 3;

struct FormatsFlags {
  bool bench = false;
};

using Speed = kernels::CodecSpeed::Speed;

struct Row {
  std::string name;
  Codec k, v;
  int head_dim = 0;
  std::vector<double> bits;  // an element, everything included, at each of kLengths
  Speed k_speed, v_speed;

  bool one_codec() const { return k == v; }
};

// What a layer of 8 KV heads takes of a sequence, in bits an element.
std::vector<double> BitsPerElement(const std::string& name, const Codec& k, int head_dim) {
  cachestore::LayerSpec layer{.kv_heads = kKvHeads, .k_head_dim = head_dim, .v_head_dim = head_dim};
  if (k.id == kernels::CodecId::kMlaFp8)
    layer = {.kind = cachestore::LayerKind::kMla, .kv_heads = 1, .k_head_dim = head_dim};
  cachestore::ModelRequest request;
  request.spec = {.name = "formats", .revision = "", .layers = {layer}};
  request.policy.kv_cache_dtype = name;
  const auto model = cachestore::ResolveModel(request, kPageTokens).value();
  std::vector<double> bits;
  for (const std::int64_t tokens : kLengths)
    bits.push_back(16 / cachestore::CompressionRatio(*model, tokens));
  return bits;
}

std::vector<Row> Rows() {
  std::vector<std::string> names = cachestore::FormatNames();
  // Options that change what is stored.
  names.insert(std::find(names.begin(), names.end(), "fp8_e5m2"), "fp8_e4m3(scale=page)");
  names.emplace_back("kivi2(scales=fp8_e4m3)");
  std::vector<Row> rows;
  for (const std::string& name : names) {
    const cachestore::Format format = cachestore::ParseFormat(name).value();
    const auto source = cachestore::ElementType::kBf16;
    Row row{.name = name,
            .k = cachestore::KFormat(format, source, kPageTokens).codec,
            .v = cachestore::VFormat(format, source, kPageTokens).codec};
    row.head_dim = kernels::CodecSpeed::DimFor(row.k);
    row.bits = BitsPerElement(name, row.k, row.head_dim);
    rows.push_back(std::move(row));
  }
  return rows;
}

// Fills in the rows' speeds; returns memcpy's.
double Bench(Terminal& terminal, std::vector<Row>& rows) {
  kernels::CodecSpeed speed(kBenchBytes, kernels::ElementType::kBf16);
  std::vector<Codec> codecs;
  for (const Row& row : rows) {
    codecs.push_back(row.k);
    if (!row.one_codec()) codecs.push_back(row.v);
  }
  Progress progress(terminal, "measuring", false);
  const auto speeds = speed.Measure(codecs, kBenchRuns, [&](int done, int all) {
    progress.Update(static_cast<std::uint64_t>(done) * kBenchBytes,
                    static_cast<std::uint64_t>(all) * kBenchBytes);
  });
  auto next = speeds.begin();
  for (Row& row : rows) {
    row.k_speed = *next++;
    row.v_speed = row.one_codec() ? row.k_speed : *next++;
  }
  return speed.copy();
}

std::string BothSides(const Row& row, const std::string& k, const std::string& v) {
  return row.one_codec() || k == v ? k : fmt::format("K {}, V {}", k, v);
}

template <class F>
std::string OfCodecs(const Row& row, F text) {
  return BothSides(row, text(row.k), text(row.v));
}

nlohmann::ordered_json CodecJson(const Codec& codec, const Speed* speed) {
  const kernels::CodecRow& row = kernels::RowOf(codec.id);
  nlohmann::ordered_json json = {{"codec", row.name},
                                 {"group", row.group},
                                 {"scale", row.scale},
                                 {"takes_scale", row.takes_scale},
                                 {"head_dim_multiple", kernels::DimMultiple(codec)},
                                 {"error_budget", row.error_budget(codec)},
                                 {"largest_magnitude", row.largest_magnitude(codec)},
                                 {"equal_to", row.equal_to},
                                 {"read_by", row.read_by}};
  if (speed != nullptr) {
    json["encode_gb_per_s"] = speed->encode;
    json["decode_gb_per_s"] = speed->decode;
  }
  return json;
}

std::string ToJsonText(const std::vector<Row>& rows, bool bench, double copy) {
  nlohmann::ordered_json json;
  if (bench) json["memcpy_gb_per_s"] = copy;
  json["formats"] = nlohmann::ordered_json::array();
  for (const Row& row : rows) {
    nlohmann::ordered_json bits;
    for (std::size_t i = 0; i < row.bits.size(); ++i)
      bits[std::to_string(kLengths[i])] = row.bits[i];
    json["formats"].push_back({{"kv_cache_dtype", row.name},
                               {"head_dim", row.head_dim},
                               {"bits_per_element", bits},
                               {"k", CodecJson(row.k, bench ? &row.k_speed : nullptr)},
                               {"v", CodecJson(row.v, bench ? &row.v_speed : nullptr)}});
  }
  return JsonLine(json);
}

std::string SpeedTable(const std::vector<Row>& rows, double copy) {
  Table table({{"FORMAT"},
               {"ENCODE GB/s", Align::kRight},
               {"OF MEMCPY", Align::kRight},
               {"DECODE GB/s", Align::kRight},
               {"OF MEMCPY", Align::kRight}});
  const auto add = [&](const std::string& name, const Speed& speed) {
    table.AddRow({name, fmt::format("{:.2f}", speed.encode),
                  fmt::format("{:.2f}", speed.encode / copy), fmt::format("{:.2f}", speed.decode),
                  fmt::format("{:.2f}", speed.decode / copy)});
  };
  for (const Row& row : rows) {
    add(row.one_codec() ? row.name : row.name + ", K", row.k_speed);
    if (!row.one_codec()) add(row.name + ", V", row.v_speed);
  }
  return fmt::format(
      "\none thread, codecs for {}, GB of 16-bit data a second; memcpy of the same bytes "
      "{:.2f}\n{}",
      kernels::HostTargetInUse(), copy, table.ToString());
}

std::string ToText(const std::vector<Row>& rows) {
  Table bits({{"FORMAT"},
              {"BITS AT 512", Align::kRight},
              {"4,096", Align::kRight},
              {"32,768 TOKENS", Align::kRight},
              {"HEAD DIMS", Align::kRight},
              {"CODEC"}});
  Table codecs({{"CODEC"}, {"A SCALE FOR EACH"}, {"BYTES EQUAL TO"}, {"STORED BYTES READ BY"}});
  for (const kernels::CodecRow& codec : kernels::CodecRows())
    codecs.AddRow({codec.name, codec.group, codec.equal_to, codec.read_by});
  for (const Row& row : rows) {
    const auto column = [&](std::size_t i) { return fmt::format("{:.2f}", row.bits[i]); };
    bits.AddRow(
        {row.name, column(0), column(1), column(2),
         OfCodecs(row,
                  [](const Codec& codec) {
                    const int multiple = kernels::DimMultiple(codec);
                    return multiple == 1 ? std::string("any") : fmt::format("x {}", multiple);
                  }),
         OfCodecs(row, [](const Codec& c) { return std::string(kernels::RowOf(c.id).name); })});
  }
  return bits.ToString() +
         "\nbits an element of a bf16 cache with 8 KV heads of 128 channels (fp8_ds_mla: 576 "
         "latent), everything included\n\n" +
         codecs.ToString() +
         "\noptions: fp8_e4m3(scale=page), kivi2(scales=fp8_e4m3), and k_rotation=hadamard on "
         "most; kivi(k_bits,v_bits,group_size,residual_tokens)\n";
}

int RunFormats(const Session& session, const FormatsFlags& flags) {
  std::vector<Row> rows = Rows();
  const double copy = flags.bench ? Bench(session.terminal(), rows) : 0;
  if (session.flags().json) {
    session.terminal().out << ToJsonText(rows, flags.bench, copy);
  } else {
    session.terminal().out << ToText(rows) << (flags.bench ? SpeedTable(rows, copy) : "");
  }
  return kExitOk;
}

}  // namespace

Command AddFormats(CLI::App& parent, Terminal& terminal) {
  const NewCommand command =
      AddCommand(parent, terminal, "formats", "List the formats and what each costs; no server");
  const auto flags = std::make_shared<FormatsFlags>();
  command.app->add_flag("--bench", flags->bench, "Measure their speed on this machine, too");
  return {command.app, [session = command.session, flags] { return RunFormats(*session, *flags); }};
}

}  // namespace kvtier::client
