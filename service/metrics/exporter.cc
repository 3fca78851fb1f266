#include "service/metrics/exporter.h"

#include <fmt/format.h>
#include <prometheus/client_metric.h>
#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/histogram.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>

#include <cerrno>
#include <exception>
#include <system_error>
#include <utility>
#include <vector>

#include "cachestore/base/check.h"
#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "service/metrics/catalog.h"

namespace kvtier::service {
namespace {

// Where a caller has no reason of the table, so that the label's values stay a closed set.
constexpr char kOtherReason[] = "OTHER";

prometheus::ClientMetric MetricOf(const MetricRow& row, const Sample& sample) {
  prometheus::ClientMetric metric;
  for (std::size_t i = 0; i < row.labels.size(); ++i)
    metric.label.push_back({row.labels[i], sample.labels[i]});
  (row.type == MetricType::kCounter ? metric.counter.value : metric.gauge.value) = sample.value;
  return metric;
}

prometheus::Histogram& AddHistogram(const char* name, prometheus::Registry& registry) {
  const MetricRow& row = RowOf(name);
  return prometheus::BuildHistogram().Name(row.name).Help(row.help).Register(registry).Add(
      {},
      prometheus::Histogram::BucketBoundaries(kDurationBuckets.begin(), kDurationBuckets.end()));
}

}  // namespace

class Metrics::StoreCollector final : public prometheus::Collectable {
 public:
  StoreCollector(const cachestore::Store& store, MetricsOptions options)
      : store_(store), options_(std::move(options)) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
    Snapshot snapshot = TakeSnapshot(store_);
    snapshot.device = options_.device;
    snapshot.draining = options_.draining && options_.draining();
    if (options_.transports) snapshot.transports = options_.transports();
    if (options_.shm_bytes) snapshot.shm_bytes = options_.shm_bytes();

    std::vector<prometheus::MetricFamily> families;
    for (const MetricRow& row : Catalog()) {
      if (row.read == nullptr) continue;
      const auto type = row.type == MetricType::kCounter ? prometheus::MetricType::Counter
                                                         : prometheus::MetricType::Gauge;
      prometheus::MetricFamily family{row.name, row.help, type, {}};
      for (const Sample& sample : row.read(snapshot))
        family.metric.push_back(MetricOf(row, sample));
      families.push_back(std::move(family));
    }
    return families;
  }

 private:
  const cachestore::Store& store_;
  const MetricsOptions options_;
};

Metrics::Metrics(const cachestore::Store& store, MetricsOptions options)
    : observed_(std::make_shared<prometheus::Registry>()),
      held_(std::make_shared<StoreCollector>(store, std::move(options))),
      append_duration_(AddHistogram(kAppendDuration, *observed_)),
      read_duration_(AddHistogram(kReadDuration, *observed_)) {
  const MetricRow& row = RowOf(kRejected);
  auto& family = prometheus::BuildCounter().Name(row.name).Help(row.help).Register(*observed_);
  std::vector<std::string> reasons = {kOtherReason};
  for (int i = 0; cachestore::ReasonNameAt(i) != nullptr; ++i)
    reasons.emplace_back(cachestore::ReasonNameAt(i));
  for (const char* rpc : kRpcs) {
    for (const std::string& reason : reasons)
      rejected_[{rpc, reason}] = &family.Add({{row.labels[0], rpc}, {row.labels[1], reason}});
  }
}

Metrics::~Metrics() = default;

absl::StatusOr<std::unique_ptr<Metrics>> Metrics::Create(const cachestore::Store& store,
                                                         MetricsOptions options) {
  const std::string listen = options.listen;
  auto metrics = std::unique_ptr<Metrics>(new Metrics(store, std::move(options)));
  if (!listen.empty()) {
    KVT_RETURN_IF_ERROR(metrics->Serve(listen));
  }
  return metrics;
}

absl::Status Metrics::Serve(const std::string& listen) {
  errno = 0;
  try {
    exposer_ = std::make_unique<prometheus::Exposer>(listen);
  } catch (const std::exception& error) {
    // The library says that something failed, the system call beneath it what.
    return absl::InvalidArgumentError(
        fmt::format("metrics_listen is \"{}\", which can't be listened on: {}", listen,
                    errno != 0 ? std::generic_category().message(errno) : error.what()));
  }
  exposer_->RegisterCollectable(held_);
  exposer_->RegisterCollectable(observed_);
  address_ = fmt::format("{}:{}", listen.substr(0, listen.rfind(':')),
                         exposer_->GetListeningPorts().front());
  return absl::OkStatus();
}

void Metrics::ChunkAppended(absl::Duration took) {
  append_duration_.Observe(absl::ToDoubleSeconds(took));
}

void Metrics::ReadServed(absl::Duration took) {
  read_duration_.Observe(absl::ToDoubleSeconds(took));
}

void Metrics::Rejected(const std::string& rpc, const std::string& reason) {
  auto counter = rejected_.find({rpc, reason});
  if (counter == rejected_.end()) counter = rejected_.find({rpc, kOtherReason});
  KVT_CHECK(counter != rejected_.end());
  counter->second->Increment();
}

}  // namespace kvtier::service
