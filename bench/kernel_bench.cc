// How fast a GPU's kernels encode and decode each format, beside the rate at which it copies its
// own memory, in the same run: bytes read and written together, many pages a launch.

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/format_codecs.h"
#include "kernels/codec_table.h"
#include "kernels/cuda_jobs.h"
#include "kernels/cuda_tiles.h"
#include "kvtier/version.h"

namespace kvtier::bench {
namespace {

using kernels::Codec;
using kernels::ElementType;

constexpr int kPageTokens = 128;
constexpr int kHeads = 8;

struct Options {
  int device = 0;
  std::int64_t mib = 1024;
  int runs = 9;
  bool json = false;
  std::string json_file;
};

void Check(int error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(
      fmt::format("{}: {}", what, cudaGetErrorString(static_cast<cudaError_t>(error))));
}

std::byte* Allocate(std::int64_t bytes) {
  void* memory = nullptr;
  Check(cudaMalloc(&memory, static_cast<std::size_t>(bytes)), "cudaMalloc");
  return static_cast<std::byte*>(memory);
}

// Heads of dim 128 side by side, as engines have them; or what the codec needs.
int DimFor(const Codec& codec) {
  const int multiple = kernels::DimMultiple(codec);
  return (128 + multiple - 1) / multiple * multiple;
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : runs_(options.runs),
        bytes_(options.mib << 20),
        values_(Allocate(bytes_)),
        other_(Allocate(2 * bytes_)),
        tables_(Allocate(kTableBytes)) {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    void* staging = nullptr;
    Check(cudaHostAlloc(&staging, kTableBytes, cudaHostAllocDefault), "cudaHostAlloc");
    staging_ = static_cast<std::byte*>(staging);
    // bf16 of many binades and both signs, from a fixed seed.
    std::uint32_t random = 1;
    auto* bits = reinterpret_cast<std::uint16_t*>(staging_);
    for (std::size_t i = 0; i < kTableBytes / 2; ++i) {
      random = random * 1664525u + 1013904223u;
      bits[i] =
          static_cast<std::uint16_t>((random >> 16 & 0x807fu) | (120u + (random >> 8) % 8) << 7);
    }
    for (std::int64_t at = 0; at < bytes_; at += kTableBytes)
      Up(values_ + at, std::min(kTableBytes, bytes_ - at));
    Wait();
  }

  // Bytes read and written a second.
  double Copy() {
    return Rate(2 * bytes_, [&] {
      Check(cudaMemcpyAsync(other_, values_, static_cast<std::size_t>(bytes_),
                            cudaMemcpyDeviceToDevice, stream_),
            "cudaMemcpyAsync");
    });
  }

  struct Speed {
    double encode = 0, decode = 0;
  };
  Speed Measure(const Codec& codec) {
    const int dim = DimFor(codec);
    const int units = kPageTokens / kernels::UnitTokens(codec);
    const std::int64_t page_row = std::int64_t{kHeads} * dim;
    const std::int64_t page_bytes = kPageTokens * page_row * 2;
    const std::int64_t stored = (units * kernels::UnitSizeOf(codec, dim).total() + 15) / 16 * 16;
    const std::int64_t pages = bytes_ / page_bytes, heads = pages * kHeads;
    std::vector<kernels::DeviceEncode> encodes;
    std::vector<kernels::DeviceDecode> decodes;
    for (std::int64_t head = 0; head < heads; ++head) {
      std::byte* rows = values_ + head / kHeads * page_bytes + head % kHeads * dim * 2;
      std::byte* codes = other_ + head * stored;
      kernels::EncodeRun encode{.codec = codec,
                                .dim = dim,
                                .source = {rows, ElementType::kBf16, page_row},
                                .units = units,
                                .out = codes};
      encode.codec.rotation = kernels::Rotation::kNone;  // a pass of its own
      encodes.push_back({encode, nullptr});
      decodes.push_back({{.codec = codec,
                          .dim = dim,
                          .in = codes,
                          .tokens = kPageTokens,
                          .out = {rows, ElementType::kBf16, page_row}},
                         nullptr});
    }
    const std::int64_t moved = heads * (std::int64_t{kPageTokens} * dim * 2 + stored);
    const auto encode_kind = kernels::LaunchOf(encodes[0].run);
    const Tables encode = Put(
        encodes, [&](const auto& job) { return kernels::ItemsOf(job.run, encode_kind.kernel); });
    Speed speed;
    speed.encode = Rate(moved, [&] {
      Check(kernels::LaunchEncode(encode_kind, Jobs<kernels::DeviceEncode>(encode), encode.tiles,
                                  encode.count, stream_),
            "encode");
    });
    const Tables decode = Put(decodes, [](const auto& job) { return kernels::ItemsOf(job.run); });
    speed.decode = Rate(moved, [&] {
      Check(kernels::LaunchDecode(kernels::LaunchOf(decodes[0].run),
                                  Jobs<kernels::DeviceDecode>(decode), decode.tiles, decode.count,
                                  stream_),
            "decode");
    });
    return speed;
  }

 private:
  static constexpr std::int64_t kTableBytes = 64 << 20;

  struct Tables {
    const std::byte* jobs;
    const kernels::Tile* tiles;
    std::int64_t count;
  };
  template <class Job>
  static const Job* Jobs(const Tables& tables) {
    return reinterpret_cast<const Job*>(tables.jobs);
  }
  template <class Job, class F>
  Tables Put(const std::vector<Job>& jobs, F items_of) {
    std::vector<kernels::Tile> tiles;
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      for (std::int64_t tile = 0; tile < items_of(jobs[i]).tiles(); ++tile)
        tiles.push_back({static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(tile)});
    }
    const std::size_t job_bytes = (jobs.size() * sizeof(Job) + 255) / 256 * 256;
    const std::size_t tile_bytes = tiles.size() * sizeof(kernels::Tile);
    if (job_bytes + tile_bytes > kTableBytes) throw std::runtime_error("--mib is too large");
    std::memcpy(staging_, jobs.data(), jobs.size() * sizeof(Job));
    std::memcpy(staging_ + job_bytes, tiles.data(), tile_bytes);
    Up(tables_, static_cast<std::int64_t>(job_bytes + tile_bytes));
    Wait();
    return {tables_, reinterpret_cast<const kernels::Tile*>(tables_ + job_bytes),
            std::ssize(tiles)};
  }
  void Up(std::byte* to, std::int64_t bytes) {
    Check(cudaMemcpyAsync(to, staging_, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice,
                          stream_),
          "cudaMemcpyAsync");
  }
  void Wait() { Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

  // The median of runs of a few launches each, so that a launch's own microseconds don't count.
  double Rate(std::int64_t bytes, const std::function<void()>& launch) {
    constexpr int kLaunches = 5;
    launch();
    Wait();
    std::vector<double> rates;
    for (int run = 0; run < runs_; ++run) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < kLaunches; ++i) launch();
      Wait();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      rates.push_back(static_cast<double>(bytes) * kLaunches / took.count());
    }
    std::nth_element(rates.begin(), rates.begin() + rates.size() / 2, rates.end());
    return rates[rates.size() / 2];
  }

  const int runs_;
  const std::int64_t bytes_;
  std::byte* const values_;
  std::byte* const other_;
  std::byte* const tables_;
  std::byte* staging_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

int Run(const Options& options) {
  Check(cudaSetDevice(options.device), "cudaSetDevice");
  cudaDeviceProp properties{};
  Check(cudaGetDeviceProperties(&properties, options.device), "cudaGetDeviceProperties");
  Bench bench(options);
  const std::vector<NamedCodec> formats = FormatCodecs(ElementType::kBf16, kPageTokens);
  const double copy = bench.Copy();
  nlohmann::json out = {{"gpu", properties.name}, {"commit", kRevision},
                        {"source", "bfloat16"},   {"mib", options.mib},
                        {"copy", copy},           {"formats", nlohmann::json::array()}};
  std::size_t width = 0;
  for (const NamedCodec& format : formats) width = std::max(width, format.name.size());
  if (!options.json) {
    fmt::print("{}, {} MiB of bf16; copy {:.0f} GB/s read and written\n", properties.name,
               options.mib, copy * 1e-9);
    fmt::print("{:{}}  encode GB/s  of copy  decode GB/s  of copy\n", "format", width);
  }
  for (const NamedCodec& format : formats) {
    const Bench::Speed speed = bench.Measure(format.codec);
    out["formats"].push_back({{"name", format.name},
                              {"encode", speed.encode},
                              {"decode", speed.decode},
                              {"encode_of_copy", speed.encode / copy},
                              {"decode_of_copy", speed.decode / copy}});
    if (options.json) continue;
    fmt::print("{:{}}  {:11.1f}  {:7.2f}  {:11.1f}  {:7.2f}\n", format.name, width,
               speed.encode * 1e-9, speed.encode / copy, speed.decode * 1e-9, speed.decode / copy);
    std::fflush(stdout);
  }
  if (options.json) std::cout << out.dump(2) << "\n";
  if (!options.json_file.empty()) std::ofstream(options.json_file) << out.dump(2) << "\n";
  return 0;
}

}  // namespace
}  // namespace kvtier::bench

// NOLINTNEXTLINE(bugprone-exception-escape): it ends the program, with a trace
int main(int argc, char** argv) {
  kvtier::bench::Options options;
  CLI::App app{"How fast a GPU encodes and decodes each format, beside its own copy rate."};
  app.add_option("--device", options.device, "Which GPU, from 0.");
  app.add_option("--mib", options.mib, "MiB of 16-bit values.")->check(CLI::Range(2, 16384));
  app.add_option("--runs", options.runs, "Runs of each, of which the median counts.");
  app.add_flag("--json", options.json, "For scripts.");
  app.add_option("--json-file", options.json_file, "The same, beside the table.");
  CLI11_PARSE(app, argc, argv);
  try {
    return kvtier::bench::Run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kernel_bench: %s\n", error.what());
    return 1;
  }
}
