// Appends from and reads into a worker's GPU memory over NCCL, beside what a plain channel of the
// same library moves between two processes and what the device copies, in the same run. Server and
// worker are two processes, on two GPUs or, as two hosts would, on one. And what a communicator
// takes of the GPU's memory, and how long a worker takes to notice a server that died.

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "bench/server_process.h"
#include "client/gpu_client.h"
#include "kvtier/version.h"

namespace kvtier::bench {
namespace {

using client::GpuClient;
using transport::NcclChannel;
using transport::NcclRuntime;
using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kHeads = 8;
constexpr std::uint32_t kDim = 128;
constexpr std::int64_t kTokenBytes = std::int64_t{kHeads} * kDim * 2;  // of K, or of V, in bf16
constexpr std::int64_t kPlainBytes = std::int64_t{4} << 20;            // of a plain transfer
constexpr absl::Duration kDeadline = absl::Seconds(30);

struct Options {
  int device = 0;         // the worker's
  int server_device = 0;  // two of one host need NCCL_HOSTID, which this sets, only where it's one
  std::string nccl = "libnccl.so.2";
  std::string kvtierd;
  std::string formats = "auto,fp8_e4m3,kivi2";
  std::uint32_t tokens = 16384;
  int layers = 4;
  int runs = 5;
  bool json = false;
  std::string json_file;
};

template <class T>
T Check(absl::StatusOr<T> value) {
  if (!value.ok()) throw std::runtime_error(value.status().ToString());
  return *std::move(value);
}
void Check(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}
void Check(cudaError_t error) { Check(client::CudaStatus(error, "CUDA")); }

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Waits for as many as are told.
class Count {
 public:
  void Done(const absl::Status& status) {
    const std::lock_guard lock(mutex_);
    ++done_;
    status_.Update(status);
    changed_.notify_all();
  }
  absl::Status Await(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= count; });  // bounded: channels have a deadline
    return status_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int done_ = 0;
  absl::Status status_;
};

// Posts `transfers` of kPlainBytes, and waits for the first `warm` and for all: the seconds
// between.
double Move(NcclChannel& channel, std::byte* memory, int warm, int transfers) {
  Count count;
  channel.Allow(static_cast<std::uint64_t>(transfers));
  for (int i = 0; i < transfers; ++i) {
    Check(channel.Post(static_cast<std::uint64_t>(i),
                       {.pieces = {{memory + i % 4 * kPlainBytes, kPlainBytes}},
                        .done = [&count](const absl::Status& how) { count.Done(how); }}));
  }
  Check(count.Await(warm));
  const auto start = Clock::now();
  Check(count.Await(transfers));
  return SecondsSince(start);
}

constexpr int kWarm = 8;
constexpr int kPlainTransfers = 64;

// The sending end of the plain channel: a process of its own.
int RunPeer(const Options& options, const std::string& id_file) {
  setenv("NCCL_HOSTID", "server", 1);  // NOLINT(concurrency-mt-unsafe): no thread runs yet
  Check(cudaSetDevice(options.server_device));
  const auto nccl = Check(NcclRuntime::Load(options.nccl, options.server_device));
  std::ostringstream id;
  id << std::ifstream(id_file).rdbuf();
  const std::shared_ptr<std::byte> memory = Check(client::AllocateOnGpu(4 * kPlainBytes));
  const auto channel = nccl->Open(
      {.id = id.str(), .server = true, .sends = true, .deadline = kDeadline, .memory = memory});
  Move(*channel, memory.get(), kWarm, kPlainTransfers);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the other end finishes, too
  return 0;
}

struct Plain {
  double gb_per_s = 0;
  double communicator_mib = 0;  // of both ends, where they are on one GPU
};

std::int64_t FreeMemory() {
  std::size_t free = 0, total = 0;
  Check(cudaMemGetInfo(&free, &total));
  return static_cast<std::int64_t>(free);
}

Plain MeasurePlain(const Options& options, NcclRuntime& nccl, const std::string& self) {
  const std::string file =
      std::filesystem::temp_directory_path() / fmt::format("kvtier-nccl-{}", getpid());
  const std::string id = Check(nccl.NewId());
  std::ofstream(file, std::ios::binary) << id;
  const std::shared_ptr<std::byte> memory = Check(client::AllocateOnGpu(4 * kPlainBytes));
  const std::int64_t before = FreeMemory();
  std::vector<std::string> command = {self, "--peer=" + file, "--nccl=" + options.nccl,
                                      fmt::format("--server-device={}", options.server_device)};
  std::vector<char*> argv;
  argv.reserve(command.size() + 1);
  for (std::string& argument : command) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_t peer = 0;
  if (posix_spawn(&peer, argv[0], nullptr, nullptr, argv.data(), environ) != 0)
    throw std::runtime_error("the peer can't be started");
  const auto channel = nccl.Open(
      {.id = id, .server = false, .sends = false, .deadline = kDeadline, .memory = memory});
  const double seconds = Move(*channel, memory.get(), kWarm, kPlainTransfers);
  const Plain plain{
      .gb_per_s = static_cast<double>((kPlainTransfers - kWarm) * kPlainBytes) / seconds / 1e9,
      .communicator_mib = static_cast<double>(before - FreeMemory()) / (1 << 20)};
  waitpid(peer, nullptr, 0);
  std::filesystem::remove(file);
  return plain;
}

double CopyRate(int runs) {
  constexpr std::int64_t kBytes = 64 << 20;
  const client::GpuMemory from = Check(client::AllocateOnGpu(kBytes));
  const client::GpuMemory to = Check(client::AllocateOnGpu(kBytes));
  const client::GpuStream stream = Check(client::MakeGpuStream());
  const client::GpuEvent event = Check(client::MakeGpuEvent());
  std::vector<double> seconds;
  for (int run = 0; run <= runs; ++run) {
    const auto start = Clock::now();
    Check(cudaMemcpyAsync(to.get(), from.get(), kBytes, cudaMemcpyDeviceToDevice, stream.get()));
    Check(client::Drain(stream, event, kDeadline));
    if (run > 0) seconds.push_back(SecondsSince(start));
  }
  return 1e-9 * kBytes / Median(seconds);
}

struct Row {
  std::string format;
  double append = 0;  // GB/s of bf16 values
  double read = 0;
};

// A model of some layers, and K and V of all its tokens on the worker's GPU.
class Worker {
 public:
  Worker(const Options& options, client::Client& client, GpuClient& gpu)
      : options_(options),
        client_(client),
        gpu_(gpu),
        layer_bytes_(std::int64_t{options.tokens} * kTokenBytes),
        memory_(Check(client::AllocateOnGpu(2 * options.layers * layer_bytes_))),
        stream_(Check(client::MakeGpuStream())) {
    Check(
        cudaMemsetAsync(memory_.get(), 0x3c, static_cast<std::size_t>(all_bytes()), stream_.get()));
  }

  std::int64_t all_bytes() const { return 2 * options_.layers * layer_bytes_; }

  std::string Register(const std::string& format) {
    v1::RegisterModelRequest request;
    request.mutable_spec()->set_name("nccl_bench");
    request.mutable_spec()->set_source_dtype(v1::DTYPE_BF16);
    for (int i = 0; i < options_.layers; ++i) {
      v1::LayerSpec& layer = *request.mutable_spec()->add_layers();
      layer.set_kind(v1::LAYER_KIND_FULL);
      layer.set_kv_heads(kHeads);
      layer.set_k_head_dim(kDim);
      layer.set_v_head_dim(kDim);
    }
    request.mutable_policy()->set_kv_cache_dtype(format);
    return Check(client_.RegisterModel(request)).model_id();
  }

  double Append(const std::string& model_id) {
    client::AppendOptions asked;
    asked.open.set_sequence("s");
    asked.open.set_model_id(model_id);
    constexpr std::uint32_t kStep = 1024;
    const auto start = Clock::now();
    const auto append = Check(gpu_.OpenAppend(asked));
    for (std::uint32_t first = 0; first < options_.tokens; first += kStep) {
      const std::uint32_t count = std::min(kStep, options_.tokens - first);
      for (int layer = 0; layer < options_.layers; ++layer) {
        client::GpuChunk chunk;
        chunk.place.set_first_layer(static_cast<std::uint32_t>(layer));
        chunk.place.set_first_token(first);
        chunk.place.set_num_tokens(count);
        chunk.k = {At(layer, 0) + first * kTokenBytes, count * kTokenBytes};
        chunk.v = {At(layer, 1) + first * kTokenBytes, count * kTokenBytes};
        Check(append->Send(chunk, stream_.get()));
      }
    }
    Check(append->Finish());
    return SecondsSince(start);
  }

  absl::StatusOr<double> Read() {
    v1::ReadRequest request;
    request.add_sequences()->set_sequence("s");
    const auto start = Clock::now();
    const auto read = gpu_.Read(request, [&](const v1::SequenceManifest&) {
      std::vector<client::GpuLayerTarget> targets;
      targets.reserve(static_cast<std::size_t>(options_.layers));
      for (int layer = 0; layer < options_.layers; ++layer)
        targets.push_back({.k = {.data = At(layer, 0)}, .v = {.data = At(layer, 1)}});
      return targets;
    });
    if (!read.ok()) return read.status();
    return SecondsSince(start);
  }

  void Remove() {
    v1::RemoveRequest request;
    request.set_sequence("s");
    Check(client_.Remove(request).status());
  }

 private:
  std::byte* At(int layer, int side) const {
    return memory_.get() + (2 * layer + side) * layer_bytes_;
  }

  const Options& options_;
  client::Client& client_;
  GpuClient& gpu_;
  const std::int64_t layer_bytes_;
  const client::GpuMemory memory_;
  const client::GpuStream stream_;
};

Row Measure(const Options& options, Worker& worker, const std::string& format) {
  const std::string model = worker.Register(format);
  std::vector<double> append, read;
  for (int run = 0; run <= options.runs; ++run) {  // the first warms up
    append.push_back(worker.Append(model));
    read.push_back(Check(worker.Read()));
    worker.Remove();
  }
  append.erase(append.begin());
  read.erase(read.begin());
  const double gb = static_cast<double>(worker.all_bytes()) / 1e9;
  return {format, gb / Median(append), gb / Median(read)};
}

// From a server's death, amid reads, until a read says so, and until nothing of it is left.
struct Death {
  double noticed_ms = 0;
  double ended_ms = 0;
};
Death MeasureDeath(std::optional<ServerProcess>& server, Worker& worker, const NcclRuntime& nccl) {
  worker.Append(worker.Register("auto"));
  Clock::time_point died;
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    died = Clock::now();
    server.reset();
  });
  absl::Status status;
  while (status.ok()) status = worker.Read().status();
  const auto noticed = Clock::now();
  while (nccl.ending() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const auto ended = Clock::now();
  killer.join();
  const auto ms = [&](Clock::time_point at) {
    return std::chrono::duration<double, std::milli>(at - died).count();
  };
  return {ms(noticed), ms(ended)};
}

struct Result {
  std::string gpu;
  int nccl = 0;
  bool one_gpu = false;
  Plain plain;
  double copy = 0;  // GB/s
  Death death;
  std::vector<Row> rows;
};

nlohmann::ordered_json JsonOf(const Result& of) {
  nlohmann::ordered_json json = {{"gpu", of.gpu},
                                 {"commit", kRevision},
                                 {"nccl", of.nccl},
                                 {"one_gpu", of.one_gpu},
                                 {"plain_gb_per_s", of.plain.gb_per_s},
                                 {"copy_gb_per_s", of.copy},
                                 {"communicator_mib", of.plain.communicator_mib},
                                 {"death_noticed_ms", of.death.noticed_ms},
                                 {"death_ended_ms", of.death.ended_ms}};
  for (const Row& row : of.rows) {
    json["rows"].push_back({{"format", row.format},
                            {"append_gb_per_s", row.append},
                            {"append_over_plain", row.append / of.plain.gb_per_s},
                            {"read_gb_per_s", row.read},
                            {"read_over_plain", row.read / of.plain.gb_per_s}});
  }
  return json;
}

void PrintTable(const Result& of) {
  fmt::print("{}, NCCL {}, {}, commit {}\n", of.gpu, of.nccl,
             of.one_gpu ? "both ends on one GPU" : "two GPUs", kRevision);
  fmt::print(
      "a plain channel moves {:.2f} GB/s; the device copies {:.2f} GB/s; a communicator takes "
      "{:.0f} "
      "MiB;\na server that dies is noticed after {:.0f} ms, and nothing is left after {:.0f} "
      "ms\n\n",
      of.plain.gb_per_s, of.copy, of.plain.communicator_mib, of.death.noticed_ms,
      of.death.ended_ms);
  fmt::print("{:<24} {:>12} {:>8} {:>12} {:>8}\n", "format, from bf16", "append GB/s", "/ plain",
             "read GB/s", "/ plain");
  for (const Row& row : of.rows) {
    fmt::print("{:<24} {:>12.2f} {:>8.2f} {:>12.2f} {:>8.2f}\n", row.format, row.append,
               row.append / of.plain.gb_per_s, row.read, row.read / of.plain.gb_per_s);
  }
}

int Run(const Options& options, const std::string& self) {
  std::vector<std::string> command = {options.kvtierd,
                                      "--listen=127.0.0.1:0",
                                      "--health-listen=127.0.0.1:0",
                                      "--metrics-listen=",
                                      fmt::format("--device=cuda:{}", options.server_device),
                                      "--memory=1GiB",
                                      "--nccl-library=" + options.nccl,
                                      "--nccl-memory=64MiB",
                                      "--max-nccl-transports=2",
                                      "--log-level=error",
                                      "--ready-file="};
  setenv("NCCL_HOSTID", "server", 1);  // NOLINT(concurrency-mt-unsafe): no thread runs yet
  std::optional<ServerProcess> server(std::in_place, command);
  setenv("NCCL_HOSTID", "worker", 1);  // NOLINT(concurrency-mt-unsafe)
  Check(cudaSetDevice(options.device));
  cudaDeviceProp properties{};
  Check(cudaGetDeviceProperties(&properties, options.device));
  const auto nccl = Check(NcclRuntime::Load(options.nccl, options.device));
  std::cerr << "measuring a plain channel...\n";
  const Plain plain = MeasurePlain(options, *nccl, self);
  const double copy = CopyRate(options.runs);
  const auto client = Check(client::Client::Connect(server->listen(), {}));
  const auto gpu = Check(GpuClient::Make(*client, {.device = options.device,
                                                   .path = client::GpuOptions::Path::kNccl,
                                                   .nccl_library = options.nccl,
                                                   .tell = {}}));
  Worker worker(options, *client, *gpu);
  std::vector<Row> rows;
  std::istringstream formats(options.formats);
  for (std::string format; std::getline(formats, format, ',');) {
    std::cerr << "measuring " << format << "...\n";
    rows.push_back(Measure(options, worker, format));
  }
  const Death death = MeasureDeath(server, worker, *nccl);
  const Result result{.gpu = properties.name,
                      .nccl = nccl->version(),
                      .one_gpu = options.device == options.server_device,
                      .plain = plain,
                      .copy = copy,
                      .death = death,
                      .rows = rows};
  const nlohmann::ordered_json json = JsonOf(result);
  if (!options.json_file.empty()) std::ofstream(options.json_file) << json.dump(2) << '\n';
  if (options.json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  PrintTable(result);
  return 0;
}

}  // namespace
}  // namespace kvtier::bench

int main(int argc, char** argv) try {
  kvtier::bench::Options options;
  const std::string self = std::filesystem::canonical("/proc/self/exe");
  options.kvtierd = std::filesystem::path(self).replace_filename("kvtierd");
  std::string peer;
  CLI::App app("Appends and reads between GPUs over NCCL, beside a plain channel in the same run");
  app.add_option("--device", options.device, "the worker's GPU")->capture_default_str();
  app.add_option("--server-device", options.server_device, "the server's GPU")
      ->capture_default_str();
  app.add_option("--nccl", options.nccl, "NCCL, of both")->capture_default_str();
  app.add_option("--kvtierd", options.kvtierd, "the server")->capture_default_str();
  app.add_option("--formats", options.formats, "comma-separated kv_cache_dtypes")
      ->capture_default_str();
  app.add_option("--tokens", options.tokens, "tokens of the sequence")
      ->check(CLI::Range(64, 1 << 20))
      ->capture_default_str();
  app.add_option("--layers", options.layers, "layers of the model")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--runs", options.runs, "runs of which the median counts")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  app.add_flag("--json", options.json, "print JSON");
  app.add_option("--json-file", options.json_file, "the same, beside the table");
  app.add_option("--peer", peer)->group("");  // for the program's own use
  CLI11_PARSE(app, argc, argv);
  if (!peer.empty()) return kvtier::bench::RunPeer(options, peer);
  return kvtier::bench::Run(options, self);
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
