#include "service/config/fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_replace.h"

namespace kvtier::service {
namespace {

constexpr std::int64_t kKiB = std::int64_t{1} << 10;
constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::int64_t kTiB = std::int64_t{1} << 40;

std::vector<Field> MakeFields() {  // NOLINT(readability-function-size): a table
  return {
      {"listen", "HOST:PORT", Address(&Config::listen), "Where gRPC is served."},
      {"health_listen", "HOST:PORT", Address(&Config::health_listen),
       "Where gRPC health alone is served, for probes."},
      {"metrics_listen", "HOST:PORT", HttpAddressOrOff(&Config::metrics_listen),
       "Where /metrics is served over HTTP. Empty turns it off."},
      {"device", "DEVICE", Device(&Config::device),
       "Where pages live. auto: the first GPU, or host memory where there is none."},
      {"memory", "SIZE", Size(&Config::memory, {.min = 64 * kKiB, .max = 64 * kTiB}),
       "The budget of pages, residuals and staging, reserved at start."},
      {"page_tokens", "N",
       Integer(&Config::page_tokens, {.min = 16, .max = 8192, .multiple_of = 16}),
       "Tokens a page, for models that do not ask."},
      {"max_models", "N", Integer(&Config::max_models, {.min = 1, .max = 65536}),
       "Registered models that are kept."},
      {"max_sequences", "N", Integer(&Config::max_sequences, {.min = 1, .max = 10'000'000}),
       "Sequences that are held at once."},
      {"open_sequence_deadline", "DURATION",
       Duration(&Config::open_sequence_deadline, {.min = absl::Seconds(1), .max = absl::Hours(24)}),
       "An open sequence without a message for so long is given up."},
      {"max_leases", "N", Integer(&Config::max_leases, {.min = 1, .max = 10'000'000}),
       "Leases that are held at once."},
      {"max_lease", "DURATION",
       Duration(&Config::max_lease, {.min = absl::Seconds(1), .max = absl::Hours(24)}),
       "The longest that a lease is given for at once, and that a read by name may take."},
      {"max_pins", "N", Integer(&Config::max_pins, {.min = 1, .max = 10'000'000}),
       "Pins that are held at once."},
      {"max_pin", "DURATION",
       Duration(&Config::max_pin, {.min = absl::Seconds(1), .max = absl::Hours(24)}),
       "The longest that a pin is given for."},
      {"max_subscriptions", "N", Integer(&Config::max_subscriptions, {.min = 1, .max = 10'000}),
       "Streams of KV events that are read at once."},
      {"event_log", "SIZE",
       Size(&Config::event_log, {.min = 64 << 10, .max = std::int64_t{1} << 40}),
       "What the newest KV events of a namespace may take, for subscribers that come back; outside "
       "the memory."},
      {"eviction", "POLICY", OneOf(&Config::eviction, {"lru", "s3-fifo", "none"}),
       "What goes first when room is needed: what was not used for longest; what was used once; "
       "nothing, and what does not fit is refused."},
      {"ladder", "FORMATS", Ladder(&Config::ladder),
       "What pages are stored as, one format after the other, in namespaces that rather lose bits "
       "than tokens (SetPressure)."},
      {"evict_above", "PERCENT", Integer(&Config::evict_above, {.min = 1, .max = 100}),
       "Once more of the memory is taken, some of it is evicted before it is needed."},
      {"evict_until", "PERCENT", Integer(&Config::evict_until, {.min = 1, .max = 100}),
       "How much of the memory is taken after that; at most evict_above."},
      {"idle_ttl", "DURATION",
       Duration(&Config::idle_ttl, {.min = absl::ZeroDuration(), .max = absl::Hours(24 * 30)}),
       "What nobody has read, leased or forked for so long is evicted. 0: never."},
      {"default_quota", "SIZE", Size(&Config::default_quota, {.min = 0, .max = 64 * kTiB}),
       "What a namespace may hold that was given no quota of its own. 0: all of the memory."},
      {"shm_socket", "SOCKET", SocketOrNone(&Config::shm_socket),
       "Where clients on this host hand over memory to share. auto: a name of the abstract "
       "namespace, new at each start; a path reaches other pods. Empty: no shared memory."},
      {"max_shm", "SIZE", Size(&Config::max_shm, {.min = kMiB, .max = 64 * kTiB}),
       "Memory of clients that is mapped at once; theirs, outside the memory."},
      {"max_transports", "N", Integer(&Config::max_transports, {.min = 1, .max = 4000}),
       "Transports that are open at once."},
      {"nccl_library", "FILE", PathOrNone(&Config::nccl_library),
       "NCCL, for transfers between this server's GPU and a worker's: a path, or a name that the "
       "loader finds. Must be the version that workers have. Empty: none."},
      {"max_nccl_transports", "N", Integer(&Config::max_nccl_transports, {.min = 1, .max = 1024}),
       "NCCL transports that are open at once. Each takes some tens of MiB of NCCL's own, too."},
      {"nccl_memory", "SIZE", Size(&Config::nccl_memory, {.min = kMiB, .max = kTiB}),
       "What of the GPU's memory an NCCL transport has for what is under way, reserved at start, "
       "outside the memory. A read's messages have at most a quarter of it."},
      {"nccl_deadline", "DURATION",
       Duration(&Config::nccl_deadline, {.min = absl::Milliseconds(100), .max = absl::Hours(1)}),
       "An NCCL transport on which something is to move and nothing does for so long is lost."},
      {"nccl_idle", "DURATION",
       Duration(&Config::nccl_idle, {.min = absl::Seconds(1), .max = absl::Hours(24)}),
       "An NCCL transport that nothing is asked of for so long is closed."},
      {"max_message_bytes", "SIZE",
       Size(&Config::max_message_bytes, {.min = 64 * kKiB, .max = 16 * kMiB}),
       "The largest message that is taken."},
      {"read_chunk_bytes", "SIZE",
       Size(&Config::read_chunk_bytes, {.min = 64 * kKiB, .max = 2 * kMiB}),
       "About how large the messages of a read are, where the reader asks for no block."},
      {"workers", "N", Integer(&Config::workers, {.min = 0, .max = 1024}),
       "Threads that encode and decode. 0: as many as there are cores."},
      {"drain_deadline", "DURATION",
       Duration(&Config::drain_deadline, {.min = absl::ZeroDuration(), .max = absl::Hours(1)}),
       "How long running calls may take to end once the server drains."},
      {"ready_file", "PATH", PathOrNone(&Config::ready_file),
       "Gets a JSON object of the real addresses once all are served."},
      {"log_level", "LEVEL",
       OneOf(&Config::log_level, Words<LogLevel>{{"debug", LogLevel::kDebug},
                                                 {"info", LogLevel::kInfo},
                                                 {"warning", LogLevel::kWarning},
                                                 {"error", LogLevel::kError}}),
       "The least that is logged, to standard error."},
      {"log_format", "FORMAT",
       OneOf(&Config::log_format,
             Words<LogFormat>{{"text", LogFormat::kText}, {"json", LogFormat::kJson}}),
       "Lines for people, or a JSON object a line."},
  };
}

// Levenshtein's distance: letters to put in, take out or change.
std::size_t Keystrokes(const std::string& from, const std::string& to) {
  std::vector<std::size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < from.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < to.size(); ++j) {
      const std::size_t changed = diagonal + (from[i] == to[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string Field::flag() const { return "--" + absl::StrReplaceAll(key, {{"_", "-"}}); }

std::string Field::variable() const { return "KVTIER_" + absl::AsciiStrToUpper(key); }

const std::vector<Field>& Fields() {
  static const auto* const fields = new std::vector<Field>(MakeFields());
  return *fields;
}

const Field* FindField(const std::string& key) {
  const std::vector<Field>& fields = Fields();
  const auto found =
      std::find_if(fields.begin(), fields.end(), [&](const Field& f) { return f.key == key; });
  return found == fields.end() ? nullptr : &*found;
}

std::string Suggestion(const std::string& key,
                       const std::function<std::string(const Field&)>& named) {
  const std::vector<Field>& fields = Fields();
  const Field& nearest =
      *std::min_element(fields.begin(), fields.end(), [&](const Field& a, const Field& b) {
        return Keystrokes(key, a.key) < Keystrokes(key, b.key);
      });
  if (Keystrokes(key, nearest.key) <= 1 + nearest.key.size() / 4)
    return fmt::format("; did you mean \"{}\"?", named(nearest));
  return "; kvtierd --help lists them";
}

}  // namespace kvtier::service
