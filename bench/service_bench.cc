// Append and Read over loopback gRPC, beside a plain gRPC stream of the same messages in the same
// run. Both servers are processes of their own, driven by the same client; what kvtierd takes
// longer is what it does with the bytes. Through shared memory, beside what one thread takes to
// copy the same bytes and to encode or decode them: what a worker and the server do at least.
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/machine.h"
#include "bench/plain_server.h"
#include "bench/server_process.h"
#include "cachestore/model/format.h"
#include "client/client.h"
#include "kernels/codec_speed.h"
#include "kvtier/version.h"

namespace kvtier::bench {
namespace {

constexpr int kLayers = 4, kHeads = 8, kDim = 128;
constexpr std::uint32_t kChunkTokens = 256;  // 1 MiB of K and V of one layer

struct Options {
  int tokens = 4096;
  int runs = 5;
  std::string formats =
      "auto,fp8,int8_per_token_head,kivi4,kivi2,kivi2+stored,auto+shm,fp8+shm,int8_per_token_head+"
      "shm,kivi4+shm,kivi2+shm";
  bool json = false;
  double gigabytes() const {
    return static_cast<double>(tokens) * kLayers * kHeads * kDim * 4 / 1e9;
  }
};

struct Cost {
  double gb_per_s = 0;
  double server_cpu_s_per_gb = 0;
};
struct Row {
  std::string name;
  Cost append;
  Cost read;
  double append_limit = 0;  // GB/s
  double read_limit = 0;
};

// Thrown, so that the servers are stopped on the way out.
[[noreturn]] void Die(const absl::Status& status) { throw std::runtime_error(status.ToString()); }

// Values as a cache holds them, close enough: bf16 of N(0, 1).
std::string RandomBf16(std::size_t count) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::string bytes(count * 2, '\0');
  for (std::size_t i = 0; i < count; ++i) {
    const float value = normal(random);
    std::memcpy(bytes.data() + 2 * i, reinterpret_cast<const char*>(&value) + 2, 2);
  }
  return bytes;
}

v1::RegisterModelRequest ModelAs(const std::string& kv_cache_dtype) {
  v1::RegisterModelRequest request;
  request.mutable_spec()->set_name("bench");
  request.mutable_spec()->set_source_dtype(v1::DTYPE_BF16);
  for (int i = 0; i < kLayers; ++i) {
    v1::LayerSpec& layer = *request.mutable_spec()->add_layers();
    layer.set_kv_heads(kHeads);
    layer.set_k_head_dim(kDim);
    layer.set_v_head_dim(kDim);
  }
  request.mutable_policy()->set_kv_cache_dtype(kv_cache_dtype);
  return request;
}

double Seconds(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

// The median over runs of one server's append or read.
class Meter {
 public:
  Meter(const ServerProcess& server, const Options& options) : server_(server), options_(options) {}

  template <class F>
  void Run(F work) {
    const double cpu = server_.CpuSeconds();
    const auto begin = std::chrono::steady_clock::now();
    work();
    rates_.push_back(options_.gigabytes() / Seconds(begin));
    cpu_ += server_.CpuSeconds() - cpu;
  }
  Cost cost() {
    std::sort(rates_.begin(), rates_.end());
    return {rates_[rates_.size() / 2],
            cpu_ / (options_.gigabytes() * static_cast<double>(rates_.size()))};
  }

 private:
  const ServerProcess& server_;
  const Options& options_;
  std::vector<double> rates_;
  double cpu_ = 0;
};

void Append(client::Client& client, const std::string& model_id, const std::string& sequence,
            const Options& options, const std::string& values) {
  client::AppendOptions append;
  append.open.set_sequence(sequence);
  append.open.set_model_id(model_id);
  auto stream = client.OpenAppend(append);
  if (!stream.ok()) Die(stream.status());
  for (std::uint32_t token = 0; token < static_cast<std::uint32_t>(options.tokens);
       token += kChunkTokens) {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      v1::AppendChunk chunk;
      chunk.set_first_layer(layer);
      chunk.set_first_token(token);
      chunk.set_num_tokens(kChunkTokens);
      chunk.set_k(values);
      chunk.set_v(values);
      if (absl::Status sent = (*stream)->Send(std::move(chunk)); !sent.ok()) Die(sent);
    }
  }
  if (auto done = (*stream)->Finish(); !done.ok()) Die(done.status());
}

constexpr std::uint64_t kSlotBytes = 1 << 20, kSlots = 9;

// A worker that shares memory with the server.
struct SharingWorker {
  std::vector<std::byte> kept;  // what it appends, and has read
  std::shared_ptr<const client::SharedMemory> memory;
};

// As a worker does whose K and V become ready elsewhere: it puts them into shared memory, a slot
// for each chunk under way.
void AppendShared(client::Client& client, const std::string& model_id, const std::string& sequence,
                  const Options& options, const SharingWorker& worker) {
  constexpr std::uint64_t kTokenBytes = kHeads * kDim * 2;  // of K, and of V
  constexpr std::uint32_t kTokens = kSlotBytes / kTokenBytes / 2;
  client::AppendOptions append;
  append.open.set_sequence(sequence);
  append.open.set_model_id(model_id);
  append.open.set_transport_id(worker.memory->transport_id());
  append.max_unacked_chunks = kSlots - 1;
  auto stream = client.OpenAppend(append);
  if (!stream.ok()) Die(stream.status());
  const auto tokens = static_cast<std::uint32_t>(options.tokens);
  std::uint64_t from = 0, slot = 0;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    for (std::uint32_t token = 0; token < tokens; token += kTokens) {
      const std::uint32_t count = std::min(kTokens, tokens - token);
      const std::uint64_t at = slot++ % kSlots * kSlotBytes;
      std::memcpy(worker.memory->data() + at, worker.kept.data() + from, 2 * count * kTokenBytes);
      from += 2 * count * kTokenBytes;
      v1::AppendChunk chunk;
      chunk.set_first_layer(layer);
      chunk.set_first_token(token);
      chunk.set_num_tokens(count);
      chunk.set_k_offset(at);
      chunk.set_v_offset(at + count * kTokenBytes);
      if (absl::Status sent = (*stream)->Send(std::move(chunk)); !sent.ok()) Die(sent);
    }
  }
  if (auto done = (*stream)->Finish(); !done.ok()) Die(done.status());
}

// To where the worker keeps it.
void ReadShared(client::Client& client, const std::string& sequence, std::vector<std::byte>& to) {
  v1::ReadRequest read;
  read.add_sequences()->set_sequence(sequence);
  const auto place = [&](const v1::SequenceManifest& manifest) {
    std::vector<client::LayerTarget> targets;
    const std::size_t bytes = to.size() / kLayers / 2;
    for (int i = 0; i < manifest.layers_size(); ++i) {
      const auto at = std::span(to).subspan(static_cast<std::size_t>(i) * 2 * bytes);
      targets.push_back({.k = at.first(bytes), .v = at.subspan(bytes, bytes)});
    }
    return absl::StatusOr<std::vector<client::LayerTarget>>(std::move(targets));
  };
  if (auto done = client.ReadInto(read, place); !done.ok()) Die(done.status());
}

// GB/s of one thread that copies 16-bit values, and encodes or decodes them.
void SetSharedLimits(const std::string& kv_cache_dtype, Row& row) {
  const auto format = cachestore::ParseFormat(kv_cache_dtype);
  if (!format.ok()) Die(format.status());
  constexpr auto kBf16 = kernels::ElementType::kBf16;
  const std::vector<kernels::Codec> codecs = {cachestore::KFormat(*format, kBf16, 128).codec,
                                              cachestore::VFormat(*format, kBf16, 128).codec};
  kernels::CodecSpeed speed(std::size_t{64} << 20, kBf16);
  const auto k_and_v = speed.Measure(codecs, 5, [](int, int) {});
  const auto both = [](double k, double v) { return 2 / (1 / k + 1 / v); };
  const auto after_copy = [&](double codec) { return 1 / (1 / speed.copy() + 1 / codec); };
  row.append_limit = after_copy(both(k_and_v[0].encode, k_and_v[1].encode));
  row.read_limit = after_copy(both(k_and_v[0].decode, k_and_v[1].decode));
}

void Read(client::Client& client, const std::string& sequence, client::Transfer transfer) {
  v1::ReadRequest read;
  read.add_sequences()->set_sequence(sequence);
  if (auto done = client.Read(read, {}, transfer); !done.ok()) Die(done.status());
}

// One name serves both: the plain server reads the shape out of it.
std::string SequenceName(const Options& options) {
  return std::to_string(kLayers) + " " + std::to_string(kHeads) + " " + std::to_string(kDim) + " " +
         std::to_string(options.tokens);
}

// One row, in turns that others may come between. "+stored" behind a format: read as codes, which
// the client decodes; "+shm": through shared memory.
class Subject {
 public:
  Subject(const ServerProcess& server, const std::string& row, const Options& options,
          const std::string& values)
      : row_(row),
        options_(options),
        values_(values),
        shared_(row.ends_with("+shm")),
        transfer_(row.ends_with("+stored") ? client::Transfer::kStored : client::Transfer::kValues),
        append_(server, options),
        read_(server, options) {
    auto client = client::Client::Connect(
        server.listen(),
        {.transport = shared_ ? client::Transport::kShm : client::Transport::kInline});
    if (!client.ok()) Die(client.status());
    client_ = *std::move(client);
    if (row != kPlain) {
      const auto registered = client_->RegisterModel(ModelAs(format()));
      if (!registered.ok()) Die(registered.status());
      model_id_ = registered->model_id();
    }
    if (!shared_) return;
    std::vector<std::byte>& kept = worker_.kept;
    kept.resize(static_cast<std::size_t>(options.gigabytes() * 1e9));
    for (std::size_t at = 0; at + values.size() <= kept.size(); at += values.size())
      std::memcpy(kept.data() + at, values.data(), values.size());
    auto memory = client_->Share(kSlots * kSlotBytes);
    if (!memory.ok()) Die(memory.status());
    worker_.memory = *std::move(memory);
  }

  static constexpr char kPlain[] = "plain stream";
  bool shared() const { return shared_; }
  std::string format() const { return row_.substr(0, row_.find('+')); }

  // The first only warms both ends up.
  void Turn(bool counts) {
    const std::string name = SequenceName(options_);
    const auto write = [&] {
      shared_ ? AppendShared(*client_, model_id_, name, options_, worker_)
              : Append(*client_, model_id_, name, options_, values_);
    };
    const auto fetch = [&] {
      shared_ ? ReadShared(*client_, name, worker_.kept) : Read(*client_, name, transfer_);
    };
    counts ? append_.Run(write) : write();
    counts ? read_.Run(fetch) : fetch();
    if (row_ == kPlain) return;
    v1::RemoveRequest remove;
    remove.set_sequence(name);
    if (auto removed = client_->Remove(remove); !removed.ok()) Die(removed.status());
  }

  Row result() { return {.name = row_, .append = append_.cost(), .read = read_.cost()}; }

 private:
  const std::string row_;
  const Options& options_;
  const std::string& values_;
  const bool shared_;
  const client::Transfer transfer_;
  Meter append_, read_;
  std::unique_ptr<client::Client> client_;
  std::string model_id_;
  SharingWorker worker_;
};

// A row and its limit take turns: the machine's speed may change meanwhile.
Row Measure(const ServerProcess& server, const ServerProcess& plain_server, const std::string& row,
            const Options& options, const std::string& values) {
  Subject subject(server, row, options, values);
  Subject plain(plain_server, Subject::kPlain, options, values);
  for (int run = 0; run <= options.runs; ++run) {
    if (!subject.shared()) plain.Turn(run > 0);
    subject.Turn(run > 0);
  }
  Row result = subject.result();
  if (subject.shared()) {
    SetSharedLimits(subject.format(), result);
  } else {
    const Row limit = plain.result();
    result.append_limit = limit.append.gb_per_s;
    result.read_limit = limit.read.gb_per_s;
  }
  return result;
}

void PrintTable(const std::vector<Row>& rows, const Options& options) {
  std::printf("%s, commit %s\n", CpuModel().c_str(), kRevision);
  std::printf(
      "%d tokens of %d layers x %d heads x %d, bf16, one stream, median of %d; the limit is a "
      "plain "
      "gRPC stream of 1 MiB messages, which takes turns; of +shm, memcpy and the codec on one "
      "thread\n\n",
      options.tokens, kLayers, kHeads, kDim, options.runs);
  std::printf("%-22s %12s %8s %10s %12s %8s %10s\n", "", "append GB/s", "/ limit", "CPU s/GB",
              "read GB/s", "/ limit", "CPU s/GB");
  for (const Row& row : rows) {
    std::printf("%-22s %12.2f %8.2f %10.2f %12.2f %8.2f %10.2f\n", row.name.c_str(),
                row.append.gb_per_s, row.append.gb_per_s / row.append_limit,
                row.append.server_cpu_s_per_gb, row.read.gb_per_s,
                row.read.gb_per_s / row.read_limit, row.read.server_cpu_s_per_gb);
  }
  std::printf("\nGB are of 16-bit source bytes; CPU is the server's.\n");
}

void PrintJson(const std::vector<Row>& rows, const Options& options) {
  nlohmann::json out = {{"machine", CpuModel()}, {"commit", kRevision}, {"tokens", options.tokens}};
  for (const Row& row : rows) {
    out["rows"].push_back({{"format", row.name},
                           {"append_gb_per_s", row.append.gb_per_s},
                           {"append_over_limit", row.append.gb_per_s / row.append_limit},
                           {"append_server_cpu_s_per_gb", row.append.server_cpu_s_per_gb},
                           {"read_gb_per_s", row.read.gb_per_s},
                           {"read_over_limit", row.read.gb_per_s / row.read_limit},
                           {"read_server_cpu_s_per_gb", row.read.server_cpu_s_per_gb}});
  }
  std::cout << out.dump(2) << '\n';
}

int Run(const Options& options, const std::string& self) {
  const std::string values = RandomBf16(std::size_t{kChunkTokens} * kHeads * kDim);
  std::vector<Row> rows;
  const auto progress = [](const std::string& name) {
    std::cerr << "measuring " << name << "...\n";
  };
  const ServerProcess plain({self, "--plain-server="});
  const std::string kvtierd = std::filesystem::path(self).replace_filename("kvtierd");
  const ServerProcess server({kvtierd, "--listen=127.0.0.1:0", "--health-listen=127.0.0.1:0",
                              "--metrics-listen=", "--memory=512MiB", "--log-level=error",
                              "--ready-file="});
  std::istringstream formats(options.formats);
  for (std::string format; std::getline(formats, format, ',');) {
    progress(format);
    rows.push_back(Measure(server, plain, format, options, values));
  }
  if (options.json) {
    PrintJson(rows, options);
  } else {
    PrintTable(rows, options);
  }
  return 0;
}

}  // namespace
}  // namespace kvtier::bench

int main(int argc, char** argv) try {
  kvtier::bench::Options options;
  std::string plain_ready_file;
  CLI::App app("Append and Read over loopback gRPC, beside a plain gRPC stream in the same run");
  app.add_option("--tokens", options.tokens, "tokens of the sequence")
      ->check(CLI::Range(256, 8192))
      ->capture_default_str();
  app.add_option("--runs", options.runs, "runs of which the median counts")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  app.add_option(
         "--formats", options.formats,
         "comma-separated kv_cache_dtypes; +stored behind one reads its codes and decodes them")
      ->capture_default_str();
  app.add_flag("--json", options.json, "print JSON");
  app.add_option("--plain-server", plain_ready_file)->group("");  // for the program's own use
  CLI11_PARSE(app, argc, argv);
  if (!plain_ready_file.empty()) return kvtier::bench::RunPlainServer(plain_ready_file.c_str());
  options.tokens = options.tokens / 256 * 256;  // whole chunks
  return kvtier::bench::Run(options, std::filesystem::canonical("/proc/self/exe"));
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
