// How fast one thread encodes and decodes each format, beside the memcpy of the same 16-bit bytes
// in the same run: data much larger than the cache.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/format_codecs.h"
#include "bench/machine.h"
#include "kernels/codec_speed.h"
#include "kernels/codec_table.h"
#include "kernels/host_target.h"
#include "kvtier/version.h"

namespace kvtier::bench {
namespace {

using kernels::Codec;
using kernels::ElementType;

constexpr int kPageTokens = 128;

struct Options {
  std::string target = kernels::HostTargets().front();
  std::size_t mib = 128;
  int runs = 3;
  bool fp16 = false;
  bool json = false;

  ElementType source() const { return fp16 ? ElementType::kFp16 : ElementType::kBf16; }
};

struct Row {
  std::string format;
  double bits;  // stored bits a value
  kernels::CodecSpeed::Speed speed;
};
struct Result {
  double copy = 0;  // the same unit
  std::vector<Row> rows;
};

double StoredBits(const Codec& codec) {
  const int dim = kernels::CodecSpeed::DimFor(codec);
  return static_cast<double>(8 * kernels::UnitSizeOf(codec, dim).total()) /
         (dim * kernels::UnitTokens(codec));
}

Result Measure(const Options& options) {
  kernels::CodecSpeed speed(options.mib << 20, options.source());
  const std::vector<NamedCodec> formats = FormatCodecs(options.source(), kPageTokens);
  std::vector<Codec> codecs;
  codecs.reserve(formats.size());
  for (const NamedCodec& format : formats) codecs.push_back(format.codec);
  const auto speeds = speed.Measure(codecs, options.runs, [](int done, int all) {
    std::fprintf(stderr, "\r%d of %d%s", done, all, done == all ? "\n" : "");
  });
  Result result{.copy = speed.copy(), .rows = {}};
  for (std::size_t i = 0; i < formats.size(); ++i)
    result.rows.push_back({formats[i].name, StoredBits(codecs[i]), speeds[i]});
  return result;
}

void PrintTable(const Result& result, const Options& options) {
  std::printf("%s, codecs for %s, commit %s\n", CpuModel().c_str(), options.target.c_str(),
              kRevision);
  std::printf("one thread, %zu MiB of %s in pages of %d tokens, median of %d runs\n\n", options.mib,
              kernels::ElementName(options.source()), kPageTokens, options.runs);
  std::printf("%-28s %6s %13s %8s %13s %8s\n", "format", "bits", "encode GB/s", "/memcpy",
              "decode GB/s", "/memcpy");
  std::printf("%-28s %6.2f %13.2f %8.2f %13.2f %8.2f\n", "memcpy", 16.0, result.copy, 1.0,
              result.copy, 1.0);
  for (const Row& row : result.rows) {
    std::printf("%-28s %6.2f %13.2f %8.2f %13.2f %8.2f\n", row.format.c_str(), row.bits,
                row.speed.encode, row.speed.encode / result.copy, row.speed.decode,
                row.speed.decode / result.copy);
  }
}

void PrintJson(const Result& result, const Options& options) {
  nlohmann::ordered_json json = {{"machine", CpuModel()},
                                 {"codecs", options.target},
                                 {"commit", kRevision},
                                 {"source", kernels::ElementName(options.source())},
                                 {"mib", options.mib},
                                 {"runs", options.runs},
                                 {"memcpy_gb_per_s", result.copy},
                                 {"rows", nlohmann::ordered_json::array()}};
  for (const Row& row : result.rows) {
    json["rows"].push_back({{"format", row.format},
                            {"bits", row.bits},
                            {"encode_gb_per_s", row.speed.encode},
                            {"encode_of_memcpy", row.speed.encode / result.copy},
                            {"decode_gb_per_s", row.speed.decode},
                            {"decode_of_memcpy", row.speed.decode / result.copy}});
  }
  std::cout << json.dump(2) << '\n';
}

}  // namespace
}  // namespace kvtier::bench

// NOLINTNEXTLINE(bugprone-exception-escape): it ends the program, with a trace
int main(int argc, char** argv) {
  kvtier::bench::Options options;
  CLI::App app("How fast one thread encodes and decodes each format, beside memcpy");
  app.add_option("--mib", options.mib, "16-bit data, in MiB")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  app.add_option("--runs", options.runs, "Runs; the median counts")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_flag("--fp16", options.fp16, "float16 data instead of bfloat16");
  app.add_option("--target", options.target, "Instruction set of the codecs")
      ->check(CLI::IsMember(kvtier::kernels::HostTargets()))
      ->capture_default_str();
  app.add_flag("--json", options.json, "JSON instead of a table");
  CLI11_PARSE(app, argc, argv);
  kvtier::kernels::UseHostTarget(options.target);

  const kvtier::bench::Result result = kvtier::bench::Measure(options);
  options.json ? kvtier::bench::PrintJson(result, options)
               : kvtier::bench::PrintTable(result, options);
}
