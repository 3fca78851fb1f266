#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "cachestore/base/errors.h"
#include "cachestore/capacity.h"
#include "cachestore/device/host_device.h"
#include "cachestore/store.h"
#include "kvtier/v1/kv_tier.pb.h"
#include "kvtier/version.h"
#include "service/metrics/catalog.h"
#include "service/metrics/exporter.h"
#include "tests/support/kv_data.h"
#include "tests/support/manual_clock.h"
#include "tests/support/scrape.h"
#include "tests/support/status_matchers.h"

namespace kvtier::service {
namespace {

using cachestore::ModelEntry;
using cachestore::SequenceKey;
using cachestore::Store;
using kvtier::testing::HasCode;
using kvtier::testing::IsOk;
using kvtier::testing::Scrape;
using kvtier::testing::Series;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

constexpr std::int64_t kBudget = 4 << 20;

struct ModelOf {
  std::string name = "m";
  std::string revision;
  std::string kv_cache_dtype = "kivi2";
  int page_tokens = 0;
  int layers = 2;
};

class MetricsTest : public ::testing::Test {
 protected:
  MetricsTest() {
    auto store = Store::Create({.memory = kBudget}, device_, clock_);
    EXPECT_THAT(store, IsOk());
    store_ = *std::move(store);
    auto metrics =
        Metrics::Create(*store_, {.listen = "127.0.0.1:0", .device = "host", .draining = [this] {
                                    return draining_.load();
                                  }});
    EXPECT_THAT(metrics, IsOk());
    metrics_ = *std::move(metrics);
  }

  std::shared_ptr<ModelEntry> Register(const ModelOf& model) {
    cachestore::ModelRequest request;
    request.spec.name = model.name;
    request.spec.revision = model.revision;
    request.spec.layers.assign(static_cast<std::size_t>(model.layers),
                               {.kv_heads = 2, .k_head_dim = 32, .v_head_dim = 32});
    request.policy.kv_cache_dtype = model.kv_cache_dtype;
    request.page_tokens = model.page_tokens;
    request.max_tokens = 1000;
    auto entry = store_->RegisterModel(request);
    EXPECT_THAT(entry, IsOk());
    return *entry;
  }

  // Appends a sequence in one chunk. One value at least is more than e4m3 holds.
  void Append(const ModelEntry& entry, const std::string& id, std::int64_t tokens) {
    kvtier::testing::KvData data =
        MakeKvData(entry.model().request.spec, tokens, random_, /*largest=*/1000.0f);
    data.layers[0].k.Set(0, 0, 0, 1000.0f);
    auto writer = store_->OpenWriter({.key = {"default", id}, .model_id = entry.model().id});
    ASSERT_THAT(writer, IsOk());
    const auto source = [](const kvtier::testing::KvTensor& tensor) {
      return cachestore::SourceTensor{tensor.bytes.data(), tensor.type, tensor.tokens * tensor.dim,
                                      tensor.dim};
    };
    cachestore::Chunk chunk{.tokens = tokens};
    for (std::size_t layer = 0; layer < data.layers.size(); ++layer) {
      chunk.layers.push_back(
          {static_cast<int>(layer), source(data.layers[layer].k), source(data.layers[layer].v)});
    }
    ASSERT_THAT((*writer)->Append(chunk), IsOk());
  }

  Series ScrapeSeries() const { return Series(Scrape(metrics_->address())); }

  kvtier::testing::SeededRandom random_;
  cachestore::HostDevice device_;
  kvtier::testing::ManualClock clock_;
  std::atomic<bool> draining_ = false;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Metrics> metrics_;
};

// A refusal of a method that is none of the label's values would end the server.
TEST(MetricsRpcs, AreTheServicesMethods) {
  const auto* service = v1::AppendRequest::descriptor()->file()->FindServiceByName("KvTierService");
  std::vector<std::string> methods;
  for (int i = 0; i < service->method_count(); ++i) methods.push_back(service->method(i)->name());
  EXPECT_EQ(methods, std::vector<std::string>(kRpcs.begin(), kRpcs.end()));
}

TEST_F(MetricsTest, EveryRowOfTheCatalogIsServedAndNothingElse) {
  Append(*Register({}), "a", 300);
  const std::string scraped = ScrapeSeries().text;
  std::set<std::string> names;
  for (const MetricRow& row : Catalog()) {
    names.insert(row.name);
    const char* const type = row.type == MetricType::kGauge     ? "gauge"
                             : row.type == MetricType::kCounter ? "counter"
                                                                : "histogram";
    const std::string name = row.name;
    EXPECT_THAT(scraped, HasSubstr("# HELP " + name + " " + row.help + "\n# TYPE " + name + " " +
                                   type + "\n" + name));
  }
  std::istringstream lines(scraped);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("# TYPE ")) continue;
    const std::string name = line.substr(7, line.find(' ', 7) - 7);
    EXPECT_TRUE(names.contains(name) || name.starts_with("exposer_")) << name;
  }
}

TEST_F(MetricsTest, FiguresAreThoseOfTheStore) {
  const auto entry = Register({});
  Append(*entry, "a", 300);
  Append(*entry, "b", 101);
  ASSERT_THAT(store_->Seal({"default", "b"}, 101), IsOk());

  const Series series = ScrapeSeries();
  const std::string model = R"({model="m",format="kivi2"})";
  const auto with = [&](const std::string& label) {
    return R"({model="m",format="kivi2",)" + label + "}";
  };
  EXPECT_EQ(series["kvtier_budget_bytes"], kBudget);
  EXPECT_EQ(series["kvtier_tokens_held" + model], 401);
  EXPECT_EQ(series["kvtier_source_bytes" + model], 401 * 512);
  const auto stored = static_cast<double>(entry->totals().held.allocated);
  EXPECT_EQ(series["kvtier_stored_bytes" + model], stored);
  EXPECT_NEAR(series["kvtier_compression_ratio" + model], 401 * 512 / stored, 1e-4);
  EXPECT_EQ(series["kvtier_sequences" + with(R"(state="open")")], 1);
  EXPECT_EQ(series["kvtier_sequences" + with(R"(state="sealed")")], 1);
  EXPECT_EQ(series["kvtier_layers" + model], 2);
  EXPECT_EQ(series["kvtier_unit_scale_layers" + model], 0);
  EXPECT_EQ(series["kvtier_fp8_range_used_ratio" + with(R"(side="k")")], 0);
  EXPECT_EQ(series["kvtier_append_bytes_total" + model], 401 * 512);
  EXPECT_EQ(series["kvtier_append_tokens_total" + model], 401);

  const cachestore::MemoryParts memory = store_->memory();
  const auto part = [&](const std::string& name) {
    return series["kvtier_memory_bytes{part=\"" + name + "\"}"];
  };
  EXPECT_EQ(part("codes"), memory.use.codes);
  EXPECT_EQ(part("scales"), memory.use.scales);
  EXPECT_EQ(part("residual"), memory.use.residual);
  EXPECT_EQ(part("header"), memory.use.header);
  EXPECT_EQ(part("slack"), memory.slack);
  EXPECT_EQ(part("free"), memory.free);
  EXPECT_GT(part("codes"), 0);
  EXPECT_GT(part("residual"), 0);
  EXPECT_EQ(part("codes") + part("scales") + part("residual") + part("header") + part("slack") +
                part("staging") + part("free"),
            kBudget);

  const cachestore::ModelCapacity capacity =
      CapacityOf(entry->model(), entry->totals(), memory.free);
  EXPECT_EQ(capacity.mean_tokens, 200);
  EXPECT_EQ(series["kvtier_tokens_that_still_fit" + with(R"(as="one_sequence")")],
            capacity.more_tokens);
  EXPECT_EQ(series["kvtier_tokens_that_still_fit" + with(R"(as="mean_sequences")")],
            200 * capacity.more_sequences);
  EXPECT_GT(capacity.more_sequences, 1);
}

TEST_F(MetricsTest, CountersStayWhenSequencesGo) {
  const auto entry = Register({.kv_cache_dtype = "fp8_e4m3"});
  Append(*entry, "a", 50);
  entry->Add({.read_tokens = 7, .read_bytes = 9});
  ASSERT_THAT(store_->Remove({"default", "a"}), IsOk());
  const Series series = ScrapeSeries();
  const std::string model = R"({model="m",format="fp8_e4m3"})";
  EXPECT_EQ(series["kvtier_tokens_held" + model], 0);
  EXPECT_EQ(series["kvtier_compression_ratio" + model], 0);
  EXPECT_EQ(series["kvtier_memory_bytes{part=\"free\"}"], kBudget);
  EXPECT_EQ(series["kvtier_append_tokens_total" + model], 50);
  EXPECT_EQ(series["kvtier_read_tokens_total" + model], 7);
  EXPECT_EQ(series["kvtier_read_bytes_total" + model], 9);
  EXPECT_EQ(series["kvtier_unit_scale_layers" + model], 2);
  EXPECT_EQ(series["kvtier_saturated_values_total" + model], entry->totals().saturated_values);
  EXPECT_GE(entry->totals().saturated_values, 1);
  float k = 0, v = 0;
  for (const auto& layer : entry->observed()) {
    for (const cachestore::HeadMagnitudes& head : layer) {
      k = std::max(k, head.k);
      v = std::max(v, head.v);
    }
  }
  const auto range_used = [&](const std::string& side) {
    return series[R"(kvtier_fp8_range_used_ratio{model="m",format="fp8_e4m3",side=")" + side +
                  "\"}"];
  };
  EXPECT_FLOAT_EQ(static_cast<float>(range_used("k")), k / 448);
  EXPECT_FLOAT_EQ(static_cast<float>(range_used("v")), v / 448);
  EXPECT_GT(std::max(k, v), 448);
}

TEST_F(MetricsTest, ModelsOfOneNameAndFormatAreOneSeries) {
  const auto small = Register({.page_tokens = 128});
  const auto large = Register({.page_tokens = 1024, .layers = 3});
  Append(*small, "a", 100);
  Append(*large, "b", 200);
  Append(*Register({.revision = "r1"}), "c", 400);

  const Series series = ScrapeSeries();
  EXPECT_EQ(series[R"(kvtier_tokens_held{model="m",format="kivi2"})"], 300);
  EXPECT_EQ(series[R"(kvtier_source_bytes{model="m",format="kivi2"})"], 100 * 512 + 200 * 768);
  EXPECT_EQ(series[R"(kvtier_layers{model="m",format="kivi2"})"], 5);
  EXPECT_EQ(series[R"(kvtier_sequences{model="m",format="kivi2",state="open"})"], 2);
  EXPECT_EQ(series[R"(kvtier_tokens_held{model="m@r1",format="kivi2"})"], 400);

  // They share the budget: what fits is not the sum but the least.
  const std::int64_t free = store_->memory().free;
  const cachestore::ModelCapacity of_small = CapacityOf(small->model(), small->totals(), free);
  const cachestore::ModelCapacity of_large = CapacityOf(large->model(), large->totals(), free);
  ASSERT_LT(of_large.more_tokens, of_small.more_tokens);
  EXPECT_EQ(series[R"(kvtier_tokens_that_still_fit{model="m",format="kivi2",as="one_sequence"})"],
            of_large.more_tokens);
  EXPECT_EQ(
      series[R"(kvtier_tokens_that_still_fit{model="m",format="kivi2",as="mean_sequences"})"],
      std::min(of_small.more_tokens_as_mean_sequences(), of_large.more_tokens_as_mean_sequences()));
}

TEST_F(MetricsTest, BuildAndDraining) {
  const std::string build = std::string("kvtier_build_info{version=\"") + kVersion +
                            "\",revision=\"" + kRevision + "\",device=\"host\"}";
  EXPECT_EQ(ScrapeSeries()[build], 1);
  EXPECT_EQ(ScrapeSeries()["kvtier_draining"], 0);
  draining_ = true;
  EXPECT_EQ(ScrapeSeries()["kvtier_draining"], 1);
}

TEST_F(MetricsTest, DurationsFallIntoBuckets) {
  EXPECT_EQ(ScrapeSeries()["kvtier_append_duration_seconds_count"], 0);
  metrics_->ChunkAppended(absl::Microseconds(30));
  metrics_->ChunkAppended(absl::Milliseconds(3));
  metrics_->ReadServed(absl::Seconds(20));
  const Series series = ScrapeSeries();
  EXPECT_EQ(series["kvtier_append_duration_seconds_count"], 2);
  EXPECT_NEAR(series["kvtier_append_duration_seconds_sum"], 0.00303, 1e-9);
  EXPECT_EQ(series[R"(kvtier_append_duration_seconds_bucket{le="5e-05"})"], 1);
  EXPECT_EQ(series[R"(kvtier_append_duration_seconds_bucket{le="0.002"})"], 1);
  EXPECT_EQ(series[R"(kvtier_append_duration_seconds_bucket{le="0.005"})"], 2);
  EXPECT_EQ(series["kvtier_read_duration_seconds_count"], 1);
  EXPECT_EQ(series[R"(kvtier_read_duration_seconds_bucket{le="10"})"], 0);
  EXPECT_EQ(series[R"(kvtier_read_duration_seconds_bucket{le="+Inf"})"], 1);
}

TEST_F(MetricsTest, RefusalsAreThereBeforeTheFirst) {
  const Series before = ScrapeSeries();
  for (const char* rpc : kRpcs) {
    for (int i = 0; cachestore::ReasonNameAt(i) != nullptr; ++i) {
      EXPECT_EQ(before[std::string("kvtier_rejected_total{reason=\"") +
                       cachestore::ReasonNameAt(i) + "\",rpc=\"" + rpc + "\"}"],
                0);
    }
  }
  metrics_->Rejected("Append", "TOKEN_GAP");
  metrics_->Rejected("Append", "TOKEN_GAP");
  metrics_->Rejected("Read", "");
  const Series after = ScrapeSeries();
  EXPECT_EQ(after[R"(kvtier_rejected_total{reason="TOKEN_GAP",rpc="Append"})"], 2);
  EXPECT_EQ(after[R"(kvtier_rejected_total{reason="OTHER",rpc="Read"})"], 1);
  EXPECT_EQ(after.values.size(), before.values.size());
}

TEST_F(MetricsTest, ProcessFiguresAreOfThisProcess) {
  const Series before = ScrapeSeries();
  const double now = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
  EXPECT_LE(before["process_start_time_seconds"], now + 1);
  EXPECT_GT(before["process_start_time_seconds"], now - 3600);
  EXPECT_GT(before["process_resident_memory_bytes"], 1 << 20);
  EXPECT_EQ(before["process_max_fds"], sysconf(_SC_OPEN_MAX));
  EXPECT_GT(before["process_cpu_seconds_total"], 0);

  std::vector<int> opened;
  for (int i = 0; i < 20; ++i) opened.push_back(open("/dev/null", O_RDONLY));
  std::vector<char> touched(32 << 20, 'x');
  const Series after = ScrapeSeries();
  EXPECT_NEAR(after["process_open_fds"], before["process_open_fds"] + 20, 2);
  EXPECT_GE(after["process_resident_memory_bytes"],
            before["process_resident_memory_bytes"] + (16 << 20));
  EXPECT_GE(after["process_cpu_seconds_total"], before["process_cpu_seconds_total"]);
  for (const int descriptor : opened) close(descriptor);
}

TEST_F(MetricsTest, AnAddressInUseIsNamed) {
  EXPECT_THAT(metrics_->address(), MatchesRegex("127.0.0.1:[1-9][0-9]*"));
  const auto second = Metrics::Create(*store_, {.listen = metrics_->address()});
  EXPECT_THAT(second, HasCode(absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(second.status().message(),
            "metrics_listen is \"" + metrics_->address() +
                "\", which can't be listened on: Address already in use");
}

TEST_F(MetricsTest, WithoutAnAddressNothingIsServed) {
  const auto metrics = Metrics::Create(*store_, {});
  ASSERT_THAT(metrics, IsOk());
  EXPECT_EQ((*metrics)->address(), "");
  (*metrics)->ReadServed(absl::Seconds(1));
  (*metrics)->Rejected("Read", "BUDGET");
}

TEST_F(MetricsTest, LinterOfPrometheusHasNothingToSay) {
  if (std::system("command -v promtool > /dev/null") != 0)
    GTEST_SKIP() << "promtool is not installed";
  Append(*Register({}), "a", 300);
  const std::string path = ::testing::TempDir() + "metrics_exporter_test.prom";
  std::ofstream(path) << ScrapeSeries().text;
  FILE* const promtool = popen(("promtool check metrics < " + path + " 2>&1").c_str(), "r");
  std::string said;
  for (int c; (c = std::fgetc(promtool)) != EOF;) said += static_cast<char>(c);
  EXPECT_EQ(pclose(promtool), 0) << said;
  EXPECT_EQ(said, "");
}

}  // namespace
}  // namespace kvtier::service
