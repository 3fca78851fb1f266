#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "cachestore/base/mutex.h"
#include "cachestore/memory_account.h"
#include "cachestore/model/memory_parts.h"
#include "cachestore/model/model.h"
#include "cachestore/model/rungs.h"

namespace kvtier::cachestore {

// What all sequences of one model hold now, and what went through them since the start.
struct ModelTotals {
  std::int64_t open_sequences = 0;
  std::int64_t sealed_sequences = 0;
  std::int64_t sequence_tokens = 0;  // committed, of each sequence
  std::int64_t tokens_held = 0;      // committed; once where sequences share them
  // Of these in the source dtype what went behind windows (Model::windows).
  std::int64_t behind_windows_bytes = 0;
  MemoryHeld held;                   // what only readers hold any more included
  std::int64_t appended_tokens = 0;  // committed since the start
  std::int64_t appended_bytes = 0;   // source bytes received since the start
  std::int64_t read_tokens = 0;
  std::int64_t read_bytes = 0;
  std::int64_t saturated_values = 0;

  std::int64_t sequences() const { return open_sequences + sealed_sequences; }
  ModelTotals& operator+=(const ModelTotals& other);
};

// The largest finite |x| that one KV head has received, and in how many tokens.
struct HeadMagnitudes {
  float k = 0;
  float v = 0;
  std::int64_t tokens = 0;
};

// What one append adds to them.
struct HeadObservation {
  int layer = 0;
  int head = 0;
  HeadMagnitudes magnitudes;
};

// A registered model, its memory, its totals, and the magnitudes that went through it since the
// start, which outlive the sequences they came with. Thread-safe.
class ModelEntry {
 public:
  explicit ModelEntry(std::shared_ptr<const Model> model, Rungs rungs = {})
      : model_(std::move(model)), rungs_(std::move(rungs)) {}

  const Model& model() const { return *model_; }
  const Rungs& rungs() const { return rungs_; }
  // All but `held`.
  void Add(const ModelTotals& delta) ABSL_LOCKS_EXCLUDED(mutex_);
  ModelTotals totals() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Where its sequences' memory is accounted for: `held` of the totals.
  MemoryAccount& memory() { return memory_; }

  void Observe(const std::vector<HeadObservation>& observations) ABSL_LOCKS_EXCLUDED(mutex_);
  // [layer][head]; empty while nothing was observed.
  std::vector<std::vector<HeadMagnitudes>> observed() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const std::shared_ptr<const Model> model_;
  const Rungs rungs_;
  MemoryAccount memory_;
  mutable Mutex mutex_;
  ModelTotals totals_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::vector<HeadMagnitudes>> observed_ ABSL_GUARDED_BY(mutex_);
};

// The models that this process knows, by id. Entries are never dropped, so at most `max_models`.
// Thread-safe.
class ModelRegistry {
 public:
  explicit ModelRegistry(int max_models) : max_models_(max_models) {}

  // Adds a model, or gives the entry that is there for its id. RESOURCE_EXHAUSTED past max_models.
  absl::StatusOr<std::shared_ptr<ModelEntry>> Add(std::shared_ptr<const Model> model,
                                                  Rungs rungs = {}) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<std::shared_ptr<ModelEntry>> Find(const std::string& id) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<std::shared_ptr<ModelEntry>> All() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const int max_models_;
  mutable Mutex mutex_;
  std::map<std::string, std::shared_ptr<ModelEntry>> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier::cachestore
