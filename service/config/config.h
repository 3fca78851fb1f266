#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "service/log.h"

namespace kvtier::service {

// What the operator asked for. The initializers are the defaults; fields.cc has a row for each
// field, docs/configuration.md says what they mean.
struct Config {
  // There is neither TLS nor authentication, so that only this machine is let in unless asked.
  std::string listen = "127.0.0.1:7071";
  std::string health_listen = "127.0.0.1:7072";
  std::string metrics_listen = "127.0.0.1:9464";  // empty: no metrics over HTTP
  std::string device = "host";
  std::int64_t memory = std::int64_t{1} << 30;  // bytes
  int page_tokens = 128;
  int max_models = 1024;
  std::int64_t max_sequences = 100'000;
  absl::Duration open_sequence_deadline = absl::Minutes(5);
  std::int64_t max_leases = 65'536;
  absl::Duration max_lease = absl::Minutes(10);
  std::int64_t max_pins = 4096;
  std::int64_t max_subscriptions = 64;
  std::int64_t event_log = 16 << 20;
  absl::Duration max_pin = absl::Hours(24);
  std::string eviction = "lru";
  std::vector<std::string> ladder = {"fp8_e4m3(scale=page)", "k4v2", "kivi2"};
  int evict_above = 99;  // percent of `memory`
  int evict_until = 98;
  absl::Duration idle_ttl;                       // 0: for ever
  std::int64_t default_quota = 0;                // bytes; 0: all of `memory`
  std::string shm_socket = "auto";               // empty: no shared memory
  std::int64_t max_shm = std::int64_t{1} << 30;  // bytes
  int max_transports = 256;
  std::string nccl_library = "libnccl.so.2";  // empty: no NCCL
  int max_nccl_transports = 8;
  std::int64_t nccl_memory = 16 << 20;  // bytes, of each
  absl::Duration nccl_deadline = absl::Seconds(30);
  absl::Duration nccl_idle = absl::Minutes(5);
  int max_message_bytes = 4 << 20;
  int read_chunk_bytes = 1 << 20;
  int workers = 0;  // 0: as many as there are cores
  absl::Duration drain_deadline = absl::Seconds(30);
  std::string ready_file;  // empty: none
  LogLevel log_level = LogLevel::kInfo;
  LogFormat log_format = LogFormat::kText;
};

// One field as it came out: its key in a file, its value as one would write it, and where that is
// from: "default", "file PATH line N", "environment NAME" or "flag --NAME".
struct Setting {
  std::string key;
  std::string value;
  std::string origin;
};

// What the arguments, the environment and the configuration file come to.
struct LoadResult {
  Config config;  // valid where `problems` is empty
  std::vector<Setting> settings;
  std::vector<std::string>
      problems;  // all there are, each naming field, value, origin, what is allowed
  std::vector<std::string> warnings;
  // Set: there is nothing to run. `text` is then for standard output (0) or standard error (2).
  std::optional<int> exit_code;
  std::string text;
};

using Environment = std::map<std::string, std::string>;

// The variables of a process, from its `environ`.
Environment EnvironmentOf(const char* const* variables);

// Flags over environment over file over defaults. Reads the file that --config or KVTIER_CONFIG
// names; otherwise it touches nothing.
LoadResult LoadConfig(int argc, const char* const* argv, const Environment& environment);

}  // namespace kvtier::service
