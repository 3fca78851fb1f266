#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cachestore/model/model_spec.h"
#include "cachestore/model/prefix_key.h"
#include "tests/support/kv_data.h"

// A store as its users see it, whoever stands behind it: what conformance is tested of.
namespace kvtier::conformance {

using cachestore::Prompt;
using testing::KvData;

// K and V of tokens [first, first + count), all layers.
struct Write {
  std::string sequence;
  std::string model_id;
  const KvData* data = nullptr;
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::uint64_t epoch = 0;
  Prompt prompt = {};
};

struct Standing {
  std::int64_t begun = 0;  // where the stream was to begin
  std::int64_t received = 0;
  std::int64_t committed = 0;
};

struct Grant {
  std::uint64_t id = 0;
  std::int64_t tokens = 0;
};

// What to read: a sequence, or by a lease; tokens 0: all from `first` on.
struct Range {
  std::string sequence;
  std::uint64_t lease_id = 0;
  std::int64_t first = 0;
  std::int64_t tokens = 0;
  bool within_windows = false;
};

using Rows = std::vector<float>;  // layer by layer K, then V, [tokens, heads, dim]

// One namespace of a store with kMemory bytes. Errors are the store's own, or the client's; their
// reasons are the same.
inline constexpr std::int64_t kMemory = 8 << 20;
class Subject {
 public:
  virtual ~Subject() = default;

  virtual absl::StatusOr<std::string> Register(const cachestore::ModelRequest& model) = 0;
  virtual absl::StatusOr<Standing> Append(const Write& write) = 0;
  virtual absl::Status Seal(const std::string& sequence, std::int64_t tokens) = 0;
  virtual absl::Status Abort(const std::string& sequence) = 0;
  virtual absl::Status Remove(const std::string& sequence) = 0;
  virtual absl::Status Truncate(const std::string& sequence, std::int64_t tokens,
                                std::uint64_t epoch) = 0;
  virtual absl::StatusOr<std::int64_t> Fork(const std::string& sequence, const std::string& fork,
                                            std::int64_t tokens) = 0;
  virtual absl::StatusOr<std::int64_t> Lookup(const std::string& model_id,
                                              const Prompt& prompt) = 0;
  virtual absl::StatusOr<Grant> Acquire(const std::string& model_id, const Prompt& prompt) = 0;
  virtual absl::StatusOr<Grant> Acquire(const std::string& sequence) = 0;
  virtual absl::Status Renew(std::uint64_t lease_id) = 0;
  virtual void Release(std::uint64_t lease_id) = 0;
  virtual absl::StatusOr<Grant> Pin(const std::string& sequence) = 0;
  virtual absl::StatusOr<Rows> Read(const Range& range) = 0;
  virtual absl::StatusOr<std::int64_t> Committed(const std::string& sequence) = 0;
  // What is held then; 0 bytes: no quota.
  virtual absl::StatusOr<std::int64_t> SetQuota(std::int64_t bytes) = 0;
  virtual std::int64_t free_bytes() = 0;

  virtual std::string ReasonOf(const absl::Status& status) const = 0;
};

std::unique_ptr<Subject> StoreInProcess();
// kvtierd in a process of its own, by the C++ client.
std::unique_ptr<Subject> StoreBehindServer();
// The same, with K and V in shared memory.
std::unique_ptr<Subject> StoreBySharedMemory();

}  // namespace kvtier::conformance
