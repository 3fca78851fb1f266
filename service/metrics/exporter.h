#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cachestore/store.h"
#include "service/observer.h"

namespace prometheus {
class Collectable;
class Counter;
class Exposer;
class Histogram;
class Registry;
}  // namespace prometheus

namespace kvtier::service {

struct MetricsOptions {
  std::string listen;  // HOST:PORT of Config::metrics_listen; empty: nothing is served
  std::string device = "host";
  // Called at each scrape, from any thread.
  std::function<bool()> draining;
  std::function<std::int64_t()> transports;
  std::function<std::int64_t()> shm_bytes;
};

// Serves /metrics and takes what the handlers observe. What the store holds is read at each scrape,
// so that no figure can drift from what it measures. Thread-safe; `store` must outlive it. Its
// destruction takes up to 2 s where it serves: so seldom the HTTP server looks whether to end.
class Metrics final : public Observer {
 public:
  // INVALID_ARGUMENT, naming metrics_listen, when the address can't be had.
  static absl::StatusOr<std::unique_ptr<Metrics>> Create(const cachestore::Store& store,
                                                         MetricsOptions options);
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;
  ~Metrics() override;

  // Where /metrics is served, with the real port; empty where it isn't.
  const std::string& address() const { return address_; }

  void ChunkAppended(absl::Duration took) override;
  void ReadServed(absl::Duration took) override;
  // `rpc` must be one of kRpcs. A reason that has no row in the table of errors counts as OTHER.
  void Rejected(const std::string& rpc, const std::string& reason) override;

 private:
  class StoreCollector;
  using RpcAndReason = std::pair<std::string, std::string>;

  Metrics(const cachestore::Store& store, MetricsOptions options);
  absl::Status Serve(const std::string& listen);

  // Constant after construction.
  std::string address_;
  const std::shared_ptr<prometheus::Registry> observed_;
  const std::shared_ptr<prometheus::Collectable> held_;
  prometheus::Histogram& append_duration_;
  prometheus::Histogram& read_duration_;
  // Every combination, made at the start: a rate needs the zero before the first.
  std::map<RpcAndReason, prometheus::Counter*> rejected_;

  // Last: it stops serving before the rest goes.
  std::unique_ptr<prometheus::Exposer> exposer_;
};

}  // namespace kvtier::service
