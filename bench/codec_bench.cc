// How fast one thread encodes and decodes each format, beside the memcpy of the same 16-bit bytes
// in the same run: data much larger than the cache, in pages of [heads, tokens, dim].

#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "bench/machine.h"
#include "kernels/codec_table.h"
#include "kernels/host_codec.h"
#include "kernels/host_target.h"
#include "kvtier/version.h"

namespace kvtier::bench {
namespace {

using kernels::Codec;
using kernels::CodecId;
using kernels::ElementType;

constexpr int kHeads = 8, kTokens = 128, kDim = 128;
constexpr std::size_t kHeadBytes = std::size_t{kTokens} * kDim * 2;
constexpr std::size_t kPageBytes = kHeads * kHeadBytes;

struct Options {
  std::string target = kernels::HostTargets().front();
  std::size_t mib = 128;
  int runs = 3;
  bool fp16 = false;
  bool json = false;

  ElementType source() const { return fp16 ? ElementType::kFp16 : ElementType::kBf16; }
};

struct Format {
  std::string name;
  Codec codec;
};

std::vector<Format> Formats(ElementType source) {
  const auto cast = source == ElementType::kBf16 ? ElementType::kFp16 : ElementType::kBf16;
  std::vector<Format> formats = {
      {"auto", {.id = CodecId::kRaw, .element = source}},
      {std::string("cast to ") + kernels::ElementName(cast),
       {.id = CodecId::kRaw, .element = cast}},
      {"fp8_e4m3", {.id = CodecId::kFp8, .element = ElementType::kE4m3}},
      {"fp8_e5m2", {.id = CodecId::kFp8, .element = ElementType::kE5m2}},
      {"int8_per_token_head", {.id = CodecId::kInt8PerTokenHead}},
      {"fp8_per_token_head", {.id = CodecId::kFp8PerTokenHead}},
      {"q8_0", {.id = CodecId::kLlamaQ8}},
      {"q4_0", {.id = CodecId::kLlamaQ4}},
  };
  for (const int bits : {2, 4}) {
    const auto stored_bits = static_cast<std::uint8_t>(bits);
    const std::string name = "kivi" + std::to_string(bits);
    formats.push_back(
        {name + " K", {.id = CodecId::kKiviChannel, .bits = stored_bits, .group = 32}});
    formats.push_back({name + " V", {.id = CodecId::kKiviToken, .bits = stored_bits, .group = 32}});
  }
  return formats;
}

constexpr std::size_t kPattern = std::size_t{1} << 20;  // values; the data repeats them

// 16-bit values, room for what is stored of them, and for what is read back. All of it is touched,
// so that no page fault is timed.
class Data {
 public:
  Data(std::size_t pages, ElementType source)
      : pages_(pages),
        values_(Touched(bytes())),
        stored_(Touched(bytes())),
        read_(Touched(bytes())),
        source_(source) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> pattern(std::min(kPattern, bytes() / 2));
    for (std::uint16_t& bits : pattern) {
      const float x = normal(random);
      bits = source == ElementType::kBf16 ? kernels::FromFloat<kernels::Bf16>(x).bits
                                          : kernels::FromFloat<kernels::Fp16>(x).bits;
    }
    for (std::size_t at = 0; at < bytes(); at += 2 * pattern.size()) {
      std::memcpy(values_.get() + at, pattern.data(), std::min(2 * pattern.size(), bytes() - at));
    }
  }

  std::size_t bytes() const { return pages_ * kPageBytes; }

  void Copy() const { std::memcpy(read_.get(), values_.get(), bytes()); }
  void Encode(const Codec& codec) const {
    for (std::size_t head = 0; head < pages_ * kHeads; ++head) {
      kernels::EncodeOnHost({codec,
                             kDim,
                             1.0f,
                             {values_.get() + head * kHeadBytes, source_, kDim},
                             kTokens / kernels::UnitTokens(codec),
                             stored_.get() + head * StoredHeadBytes(codec)});
    }
  }
  void Decode(const Codec& codec) const {
    for (std::size_t head = 0; head < pages_ * kHeads; ++head) {
      kernels::DecodeOnHost({.codec = codec,
                             .dim = kDim,
                             .in = stored_.get() + head * StoredHeadBytes(codec),
                             .tokens = kTokens,
                             .out = {read_.get() + head * kHeadBytes, source_, kDim}});
    }
  }

 private:
  static std::unique_ptr<std::byte[]> Touched(std::size_t size) {
    auto memory = std::make_unique_for_overwrite<std::byte[]>(size);
    std::memset(memory.get(), 1, size);
    return memory;
  }
  static std::size_t StoredHeadBytes(const Codec& codec) {
    const std::int64_t units = kTokens / kernels::UnitTokens(codec);
    return static_cast<std::size_t>(units * kernels::UnitSizeOf(codec, kDim).total());
  }

  const std::size_t pages_;
  const std::unique_ptr<std::byte[]> values_, stored_, read_;
  const ElementType source_;
};

// Of this thread's CPU time: where others share the machine, their turns do not count.
double Seconds(const std::function<void()>& work) {
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const double start = now();
  work();
  return now() - start;
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

struct Row {
  std::string format;
  double bits;            // stored bits a value
  double encode, decode;  // GB of 16-bit data a second of CPU time
};
struct Result {
  double copy = 0;  // the same unit
  std::vector<Row> rows;
};

double StoredBits(const Codec& codec) {
  return static_cast<double>(8 * kernels::UnitSizeOf(codec, kDim).total()) /
         (kDim * kernels::UnitTokens(codec));
}

// memcpy is timed among the formats, so that it meets the same neighbours on the machine.
Result Measure(const Data& data, const Options& options) {
  Result result;
  const double gigabytes = static_cast<double>(data.bytes()) / 1e9;
  std::vector<double> copies;
  for (const Format& format : Formats(options.source())) {
    std::vector<double> encodes, decodes;
    for (int run = 0; run < options.runs; ++run) {
      copies.push_back(Seconds([&] { data.Copy(); }));
      encodes.push_back(Seconds([&] { data.Encode(format.codec); }));
      decodes.push_back(Seconds([&] { data.Decode(format.codec); }));
    }
    result.rows.push_back({format.name, StoredBits(format.codec), gigabytes / Median(encodes),
                           gigabytes / Median(decodes)});
  }
  result.copy = gigabytes / Median(copies);
  return result;
}

void PrintTable(const Result& result, const Options& options) {
  std::printf("%s, codecs for %s, commit %s\n", CpuModel().c_str(), options.target.c_str(),
              kRevision);
  std::printf("one thread, %zu MiB of %s in pages of [%d, %d, %d], median of %d runs\n\n",
              options.mib, kernels::ElementName(options.source()), kHeads, kTokens, kDim,
              options.runs);
  std::printf("%-20s %6s %13s %8s %13s %8s\n", "format", "bits", "encode GB/s", "/memcpy",
              "decode GB/s", "/memcpy");
  std::printf("%-20s %6.2f %13.2f %8.2f %13.2f %8.2f\n", "memcpy", 16.0, result.copy, 1.0,
              result.copy, 1.0);
  for (const Row& row : result.rows) {
    std::printf("%-20s %6.2f %13.2f %8.2f %13.2f %8.2f\n", row.format.c_str(), row.bits, row.encode,
                row.encode / result.copy, row.decode, row.decode / result.copy);
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
                            {"encode_gb_per_s", row.encode},
                            {"encode_of_memcpy", row.encode / result.copy},
                            {"decode_gb_per_s", row.decode},
                            {"decode_of_memcpy", row.decode / result.copy}});
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

  const kvtier::bench::Data data(options.mib * (1 << 20) / kvtier::bench::kPageBytes,
                                 options.source());
  const kvtier::bench::Result result = kvtier::bench::Measure(data, options);
  options.json ? kvtier::bench::PrintJson(result, options)
               : kvtier::bench::PrintTable(result, options);
}
