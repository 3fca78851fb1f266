// What the store's operations that move no bytes cost, as it holds more and more: an operation at
// 10^6 pages is to cost at most half as much again as at 10^3. Beside it stands what the machine
// itself takes for a cache line that it hasn't seen lately, in as much memory as the store's index
// takes: no operation that touches what it is about can grow less than by the lines that it
// touches.
#include <fmt/format.h>
#include <malloc.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/machine.h"
#include "cachestore/device/host_device.h"
#include "cachestore/model/plan.h"
#include "cachestore/store.h"
#include "kvtier/version.h"

namespace kvtier::bench {
namespace {

using cachestore::Prompt;
using cachestore::SequenceKey;
using cachestore::Store;

constexpr int kPageTokens = 16;
constexpr int kPagesASequence = 10;
constexpr int kTokens = kPageTokens * kPagesASequence;
constexpr char kSpace[] = "default";

struct Options {
  std::int64_t least_pages = 1000;
  std::int64_t most_pages = 1'000'000;
  std::string only;  // operations whose names have this
  int runs = 2000;
  bool json = false;
};

class RealClock final : public cachestore::Clock {
 public:
  absl::Time Now() const override {
    return absl::UnixEpoch() +
           absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
  }
};

void Check(const absl::Status& status) {
  if (status.ok()) return;
  fmt::print(stderr, "index_bench: {}\n", status.ToString());
  std::exit(1);  // NOLINT(concurrency-mt-unsafe): one thread
}
template <class T>
T Check(absl::StatusOr<T> value) {
  Check(value.status());
  return *std::move(value);
}

// A page is K and V of one layer: this model has one layer, so a sequence has kPagesASequence
// pages.
class FilledStore {
 public:
  explicit FilledStore(std::int64_t pages) {
    cachestore::ModelRequest request;
    request.spec = {.name = "index_bench", .revision = "", .layers = {}};
    request.spec.layers = {{.kv_heads = 1, .k_head_dim = 8, .v_head_dim = 8}};
    request.policy.kv_cache_dtype = "fp8";
    request.page_tokens = kPageTokens;
    const auto plan = Check(cachestore::ResolveModel(request, kPageTokens));
    const std::int64_t each = cachestore::PlanSequence(*plan, kTokens).allocated;
    store_ = Check(Store::Create({.memory = (pages / kPagesASequence + 10) * each,
                                  .page_tokens = kPageTokens,
                                  .max_sequences = pages},
                                 device_, clock_));
    model_ = Check(store_->RegisterModel(request));
    for (; sequences_ < pages / kPagesASequence; ++sequences_) Write(sequences_);
  }

  Store& store() { return *store_; }
  const std::string& model_id() const { return model_->model().id; }
  std::int64_t sequences() const { return sequences_; }
  static SequenceKey Key(std::int64_t index) { return {kSpace, fmt::format("request-{}", index)}; }

  static Prompt PromptOf(std::int64_t index) {
    Prompt prompt;
    prompt.token_ids.resize(kTokens);
    std::iota(prompt.token_ids.begin(), prompt.token_ids.end(),
              static_cast<std::uint32_t>(index) * kTokens);
    return prompt;
  }

  std::unique_ptr<cachestore::Writer> Open(std::int64_t index, Prompt prompt) {
    cachestore::WriterRequest request;
    request.key = Key(index);
    request.model_id = model_id();
    request.prompt = std::move(prompt);
    return Check(store_->OpenWriter(std::move(request)));
  }

 private:
  void Write(std::int64_t index) {
    static const std::vector<std::byte> zeros(kTokens * 8 * 2);
    const cachestore::SourceTensor tensor{
        .data = zeros.data(), .head_stride = 8, .token_stride = 8};
    cachestore::Chunk chunk{.tokens = kTokens, .layers = {{.k = tensor, .v = tensor}}};
    Check(Open(index, PromptOf(index))->Append(chunk).status());
    Check(store_->Seal(Key(index), kTokens));
  }

  RealClock clock_;
  cachestore::HostDevice device_;
  std::unique_ptr<Store> store_;
  std::shared_ptr<cachestore::ModelEntry> model_;
  std::int64_t sequences_ = 0;
};

std::int64_t HeapBytes() {
  const struct mallinfo2 info = mallinfo2();
  return static_cast<std::int64_t>(info.uordblks + info.hblkhd);
}

// What a read takes whose address is known only once the one before it is there, of lines in random
// order, all over `bytes` of memory; in microseconds.
double ColdLineMicroseconds(std::int64_t bytes) {
  struct alignas(64) Line {
    std::uint32_t next = 0;
  };
  std::vector<Line> lines(static_cast<std::size_t>(bytes / 64));
  std::vector<std::uint32_t> order(lines.size());
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(1));
  for (std::size_t i = 0; i < order.size(); ++i)
    lines[order[i]].next = order[(i + 1) % order.size()];
  constexpr int kReads = 200'000;
  std::uint32_t at = order[0];
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kReads; ++i) at = lines[at].next;
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  volatile std::uint32_t last = at;  // so that the reads are done
  static_cast<void>(last);
  return took.count() / kReads;
}

struct Operation {
  const char* name;
  void (*run)(FilledStore&, std::int64_t index);
};

const Operation kOperations[] = {
    {"lookup, hit",
     [](FilledStore& f, std::int64_t i) {
       Check(f.store().Lookup(kSpace, f.model_id(), {FilledStore::PromptOf(i)}).status());
     }},
    {"lookup, miss",
     [](FilledStore& f, std::int64_t i) {
       Check(f.store()
                 .Lookup(kSpace, f.model_id(), {FilledStore::PromptOf(f.sequences() + 1 + i)})
                 .status());
     }},
    {"acquire, release",
     [](FilledStore& f, std::int64_t i) {
       const auto lease =
           Check(f.store().Acquire(kSpace, f.model_id(), FilledStore::PromptOf(i), {}));
       f.store().Release(kSpace, lease.id);
     }},
    {"open shared, remove",
     [](FilledStore& f, std::int64_t i) {
       const std::int64_t fresh = f.sequences() + 1;
       { f.Open(fresh, FilledStore::PromptOf(i)); }
       Check(f.store().Remove(FilledStore::Key(fresh)));
     }},
    {"fork, remove",
     [](FilledStore& f, std::int64_t i) {
       const std::int64_t fresh = f.sequences() + 1;
       Check(f.store().Fork(FilledStore::Key(i), FilledStore::Key(fresh).id, -1).status());
       Check(f.store().Remove(FilledStore::Key(fresh)));
     }},
    {"open reader",
     [](FilledStore& f, std::int64_t i) {
       Check(f.store().OpenReader(FilledStore::Key(i), "", {}, {}).status());
     }},
    {"describe", [](FilledStore& f,
                    std::int64_t i) { Check(f.store().Describe(FilledStore::Key(i)).status()); }},
};

// Appends what `runs` single operations took, on sequences picked at random, in microseconds.
void Run(FilledStore& filled, const Operation& operation, int runs, std::mt19937_64& random,
         std::vector<double>& times) {
  std::uniform_int_distribution<std::int64_t> pick(0, filled.sequences() - 1);
  for (int run = 0; run < runs; ++run) {
    const std::int64_t index = pick(random);
    const auto start = std::chrono::steady_clock::now();
    operation.run(filled, index);
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    times.push_back(took.count());
  }
}

double Median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

struct Result {
  std::vector<std::int64_t> pages;
  std::vector<std::int64_t> index_bytes;          // on the heap, beside the pages
  std::vector<double> cold_line;                  // microseconds, in as much memory
  std::vector<std::vector<double>> microseconds;  // [operation][pages]
};

// All stores are there at once and take turns: the machine's speed may change meanwhile.
Result Measure(const Options& options) {
  constexpr int kRounds = 10;
  Result result;
  std::vector<std::unique_ptr<FilledStore>> stores;
  for (std::int64_t pages = options.least_pages; pages <= options.most_pages; pages *= 10) {
    fmt::print(stderr, "writing {} pages...\n", pages);
    const std::int64_t before = HeapBytes();
    stores.push_back(std::make_unique<FilledStore>(pages));
    result.pages.push_back(pages);
    result.index_bytes.push_back(HeapBytes() - before);
  }
  std::mt19937_64 random(1);
  const int runs = std::max(1, options.runs / kRounds);
  std::vector<std::vector<double>> lines(stores.size());
  result.microseconds.resize(std::size(kOperations));
  for (std::size_t i = 0; i < std::size(kOperations); ++i) {
    std::vector<std::vector<double>> times(stores.size());
    if (std::string(kOperations[i].name).find(options.only) == std::string::npos) {
      result.microseconds[i].assign(stores.size(), 0);
      continue;
    }
    for (int round = 0; round < kRounds; ++round) {
      for (std::size_t at = 0; at < stores.size(); ++at)
        Run(*stores[at], kOperations[i], runs, random, times[at]);
    }
    for (std::vector<double>& each : times) result.microseconds[i].push_back(Median(each));
    for (std::size_t at = 0; at < stores.size(); ++at)
      lines[at].push_back(ColdLineMicroseconds(result.index_bytes[at]));
  }
  for (std::vector<double>& each : lines) result.cold_line.push_back(Median(each));
  return result;
}

void PrintTable(const Result& result, const Options& options) {
  fmt::print("{}, commit {}\n", CpuModel(), kRevision);
  fmt::print(
      "sequences of {} pages of {} tokens, one layer; microseconds, median of {}, over those at {} "
      "pages, and what came on top of those in cold lines\n\n",
      kPagesASequence, kPageTokens, options.runs, result.pages.front());
  const auto row = [&](const char* name, const auto& cells, auto print) {
    fmt::print("{:<20}", name);
    for (std::size_t i = 0; i < cells.size(); ++i) print(cells[i], i);
    fmt::print("\n");
  };
  row("pages", result.pages, [](std::int64_t pages, std::size_t) { fmt::print("{:>21}", pages); });
  row("index, bytes a page", result.index_bytes,
      [&](std::int64_t bytes, std::size_t i) { fmt::print("{:>21}", bytes / result.pages[i]); });
  row("a cold line", result.cold_line,
      [](double time, std::size_t) { fmt::print("{:>9.3f}{:>12}", time, ""); });
  for (std::size_t i = 0; i < std::size(kOperations); ++i) {
    const std::vector<double>& times = result.microseconds[i];
    if (times.front() == 0) continue;
    row(kOperations[i].name, times, [&](double time, std::size_t at) {
      const double more = time - times.front();
      fmt::print("{:>9.2f} {:>5.2f} {:>5.0f}", time, time / times.front(),
                 more / result.cold_line[at]);
    });
  }
}

void PrintJson(const Result& result, const Options& options) {
  nlohmann::ordered_json json = {{"machine", CpuModel()},
                                 {"commit", kRevision},
                                 {"runs", options.runs},
                                 {"pages", result.pages},
                                 {"index_bytes", result.index_bytes},
                                 {"cold_line_microseconds", result.cold_line},
                                 {"microseconds", nlohmann::ordered_json::object()}};
  for (std::size_t i = 0; i < std::size(kOperations); ++i)
    json["microseconds"][kOperations[i].name] = result.microseconds[i];
  std::cout << json.dump(2) << '\n';
}

}  // namespace
}  // namespace kvtier::bench

// NOLINTNEXTLINE(bugprone-exception-escape): it ends the program, with a trace
int main(int argc, char** argv) {
  kvtier::bench::Options options;
  CLI::App app(
      "What lookups, leases and forks cost as the store fills, beside a store of 1,000 pages");
  app.add_option("--most-pages", options.most_pages, "pages of the fullest store")
      ->check(CLI::Range(1000, 10'000'000))
      ->capture_default_str();
  app.add_option("--least-pages", options.least_pages, "pages of the emptiest store")
      ->check(CLI::Range(1000, 10'000'000))
      ->capture_default_str();
  app.add_option("--only", options.only, "part of the operations' names");
  app.add_option("--runs", options.runs, "operations of which the median counts")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_flag("--json", options.json, "print JSON");
  CLI11_PARSE(app, argc, argv);
  const kvtier::bench::Result result = kvtier::bench::Measure(options);
  options.json ? kvtier::bench::PrintJson(result, options)
               : kvtier::bench::PrintTable(result, options);
}
