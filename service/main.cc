#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <thread>

#include "absl/time/time.h"
#include "cachestore/base/errors.h"
#include "cachestore/store.h"
#include "kernels/host_target.h"
#include "kvtier/version.h"
#include "service/config/config.h"
#include "service/device.h"
#include "service/log.h"
#include "service/metrics/exporter.h"
#include "service/nccl.h"
#include "service/ready_file.h"
#include "service/rpc/server.h"
#include "service/rpc/shm_server.h"

namespace kvtier::service {
namespace {

constexpr std::size_t kMaxPendingTasks = 16'384;
constexpr absl::Duration kStallDeadline = absl::Seconds(30);

// Time that never steps: deadlines must not pass because somebody set the clock.
class SteadyClock final : public cachestore::Clock {
 public:
  absl::Time Now() const override {
    return absl::UnixEpoch() +
           absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
  }
};

std::string NewBootId() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
}

// Never 0, and another in each process: a lease or pin of before a restart is none of this one's.
std::uint64_t FirstGrantId() {
  std::random_device random;
  return (std::uint64_t{random()} << 32 | 1) & std::numeric_limits<std::int64_t>::max();
}

cachestore::EvictionPolicyName EvictionOf(const std::string& name) {
  if (name == "none") return cachestore::EvictionPolicyName::kNone;
  return name == "lru" ? cachestore::EvictionPolicyName::kLru
                       : cachestore::EvictionPolicyName::kS3Fifo;
}

absl::Duration OrNever(absl::Duration ttl) {
  return ttl == absl::ZeroDuration() ? absl::InfiniteDuration() : ttl;
}

std::int64_t OrNone(std::int64_t quota) { return quota == 0 ? cachestore::kNoQuota : quota; }

int Fail(const absl::Status& status) {
  Log(LogLevel::kError, std::string(status.message()));
  return 1;
}

std::string AddressesText(const Server& server, const std::string& metrics) {
  const nlohmann::json addresses = {{"listen", server.listen()},
                                    {"health", server.health_listen()},
                                    {"metrics", metrics},
                                    {"pid", getpid()}};
  return addresses.dump() + "\n";
}

// Waits for SIGTERM or SIGINT, which every thread has blocked, and does what is due once a second
// meanwhile. 0: the device was lost.
int WaitForSignal(cachestore::Store& store, const cachestore::Device& device,
                  const transport::NcclRuntime* nccl, RpcContext& context) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  const timespec second = {.tv_sec = 1, .tv_nsec = 0};
  while (true) {
    const int signal = sigtimedwait(&signals, nullptr, &second);
    if (signal > 0) return signal;
    if (const absl::Status health = device.Health(); !health.ok()) {
      Log(LogLevel::kError, std::string(health.message()));
      return 0;
    }
    if (nccl != nullptr && nccl->stuck() > kStallDeadline) {
      Log(LogLevel::kError, "the GPU is lost: NCCL can't end a communicator");
      return 0;
    }
    store.Sweep();
    context.transports.Sweep(context.clock.Now());
    context.watch.Sweep(context.clock.Now() - kStallDeadline);
    if (const int reclaimed = store.ReclaimAbandoned(); reclaimed > 0) {
      Log(LogLevel::kWarning, "gave up open sequences whose writers went silent",
          {{"sequences", reclaimed}});
    }
  }
}

void BlockSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

// Null where there is to be no shared memory, or, unless a socket was asked for by name, can't be.
absl::StatusOr<std::unique_ptr<ShmServer>> StartShm(const Config& config, RpcContext& context) {
  if (config.shm_socket.empty()) {
    context.transports.SetShmSocket("", "shm_socket is empty");
    return nullptr;
  }
  const bool any = config.shm_socket == "auto";
  // Bound to this process's life: nothing stays behind in the file system.
  const std::string address = any ? "@kvtierd-" + context.boot_id : config.shm_socket;
  auto server = ShmServer::Start(address, context.transports, context.clock);
  if (server.ok()) {
    context.transports.SetShmSocket(address, "");
    return server;
  }
  const std::string why(server.status().message());
  if (!any)
    return cachestore::Error(cachestore::Reason::kInvalidField,
                             fmt::format("shm_socket is {}; {}", config.shm_socket, why));
  Log(LogLevel::kWarning, "no shared memory with clients", {{"why", why}});
  context.transports.SetShmSocket("", why);
  return nullptr;
}

cachestore::StoreOptions StoreOptionsOf(const Config& config) {
  return {.memory = config.memory,
          .page_tokens = config.page_tokens,
          .max_models = config.max_models,
          .max_sequences = config.max_sequences,
          .open_sequence_deadline = config.open_sequence_deadline,
          .max_leases = config.max_leases,
          .max_lease = config.max_lease,
          .max_pins = config.max_pins,
          .max_pin = config.max_pin,
          .first_grant_id = FirstGrantId(),
          .max_subscriptions = config.max_subscriptions,
          .event_log = config.event_log,
          .eviction = EvictionOf(config.eviction),
          .evict_above = config.evict_above,
          .evict_until = config.evict_until,
          .idle_ttl = OrNever(config.idle_ttl),
          .default_quota = OrNone(config.default_quota),
          .ladder = config.ladder};
}

int Serve(const Config& config) {
  BlockSignals();
  std::optional<ReadyFile> ready_file;
  if (!config.ready_file.empty()) {
    absl::StatusOr<ReadyFile> opened = ReadyFile::Open(config.ready_file);
    if (!opened.ok()) return Fail(opened.status());
    ready_file.emplace(*std::move(opened));
  }
  const SteadyClock clock;
  const auto opened = OpenDevice(config.device);
  if (!opened.ok()) return Fail(opened.status());
  cachestore::Device& device = **opened;
  Log(LogLevel::kInfo, "reserving memory and touching all of it", {{"memory", config.memory}});
  auto store = cachestore::Store::Create(StoreOptionsOf(config), device, clock);
  if (!store.ok()) return Fail(store.status());

  std::atomic<bool> draining{false};
  Transports transports({.max_transports = config.max_transports,
                         .max_shm_bytes = config.max_shm,
                         .nccl_deadline = config.nccl_deadline,
                         .nccl_idle = config.nccl_idle},
                        device);
  const auto nccl = SetUpNccl(config, device, transports);
  if (!nccl.ok()) return Fail(nccl.status());
  auto metrics =
      Metrics::Create(**store, {.listen = config.metrics_listen,
                                .device = device.name(),
                                .draining = [&draining] { return draining.load(); },
                                .transports = [&transports] { return transports.open(); },
                                .shm_bytes = [&transports] { return transports.mapped_bytes(); }});
  if (!metrics.ok()) return Fail(metrics.status());

  const int threads =
      config.workers > 0 ? config.workers : static_cast<int>(std::thread::hardware_concurrency());
  WorkQueue work(std::max(1, threads), kMaxPendingTasks);
  RpcContext context{.store = **store,
                     .work = work,
                     .observer = **metrics,
                     .transports = transports,
                     .clock = clock,
                     .boot_id = NewBootId(),
                     .medium = device.name() == std::string("host") ? "CPU" : "GPU",
                     .max_message_bytes = config.max_message_bytes,
                     .read_chunk_bytes = config.read_chunk_bytes,
                     .draining = draining};
  auto shm = StartShm(config, context);
  if (!shm.ok()) return Fail(shm.status());
  auto server =
      Server::Start({.listen = config.listen, .health_listen = config.health_listen}, context);
  if (!server.ok()) return Fail(server.status());

  const std::string metrics_address = (*metrics)->address();
  Log(LogLevel::kInfo, "kvtierd is ready",
      {{"version", kVersion},
       {"boot_id", context.boot_id},
       {"device", device.name()},
       {"codecs", kernels::HostTargets().front()},
       {"memory", config.memory},
       {"listen", (*server)->listen()},
       {"health_listen", (*server)->health_listen()},
       {"metrics_listen", metrics_address},
       {"shm_socket", transports.shm_socket()},
       {"nccl", *nccl == nullptr ? 0 : (*nccl)->version()}});
  if (ready_file.has_value()) {
    const absl::Status written = ready_file->Write(AddressesText(**server, metrics_address));
    if (!written.ok()) return Fail(written);
  }
  const int signal = WaitForSignal(**store, device, nccl->get(), context);
  Log(LogLevel::kInfo, "shutting down", {{"signal", signal}});
  // Of a device that is lost, nothing can be read to its end.
  (*server)->Shutdown(signal > 0 ? config.drain_deadline : absl::Seconds(1));
  metrics->reset();  // waits for a scrape that runs, up to two seconds
  Log(LogLevel::kInfo, "stopped");
  // What a lost device holds is not given back to it: it may never answer.
  if (signal == 0) std::_Exit(1);
  return 0;
}

}  // namespace
}  // namespace kvtier::service

// NOLINTNEXTLINE(bugprone-exception-escape): it ends the program, with a trace
int main(int argc, char** argv) {
  using namespace kvtier::service;  // NOLINT(google-build-using-namespace)
  // gRPC's own lines say less than the errors that follow them.
  setenv("GRPC_VERBOSITY", "NONE", 0);  // NOLINT(concurrency-mt-unsafe): no thread runs yet
  const LoadResult loaded = LoadConfig(argc, argv, EnvironmentOf(environ));
  if (loaded.exit_code.has_value()) {
    std::fputs(loaded.text.c_str(), *loaded.exit_code == 0 ? stdout : stderr);
    return *loaded.exit_code;
  }
  SetUpLogging(loaded.config.log_level, loaded.config.log_format);
  for (const std::string& warning : loaded.warnings) Log(LogLevel::kWarning, warning);
  return Serve(loaded.config);
}
