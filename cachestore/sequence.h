#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "cachestore/chunk.h"
#include "cachestore/layer_tensor.h"
#include "cachestore/model_registry.h"

namespace kvtier::cachestore {

struct SequenceKey {
  std::string name_space;
  std::string id;
  friend auto operator<=>(const SequenceKey&, const SequenceKey&) = default;
};

enum class SequenceState { kOpen, kSealed, kGone };

// One append stream's claim on a shard of a sequence. The sequence ends it when a higher epoch
// takes over or when the sequence goes.
struct WriterClaim {
  Shard shard;
  std::uint64_t epoch = 0;
  // Called once, outside the sequence's lock, when the sequence ends the claim, with OK when it was
  // sealed; not when the writer leaves by itself.
  std::function<void(const absl::Status&)> on_end;

  absl::Status ended;  // not OK: the claim is over. Guarded by the sequence's lock.
};

struct AppendResult {
  std::int64_t received_tokens = 0;   // least over the claim's layers and heads
  std::int64_t committed_tokens = 0;  // of the sequence
  std::int64_t skipped_tokens = 0;    // of this chunk
  std::int64_t saturated_values = 0;  // of this chunk
};

struct LayerDescription {
  std::int64_t received_tokens = 0;
  std::int64_t k_code_tokens = 0;
  std::int64_t v_code_tokens = 0;
  std::int64_t k_saturated_values = 0;
  std::int64_t v_saturated_values = 0;
};

struct SequenceDescription {
  std::string id;
  std::shared_ptr<const ModelEntry> model;
  SequenceState state = SequenceState::kOpen;
  std::int64_t committed_tokens = 0;
  MemoryHeld held;
  std::int64_t saturated_values = 0;
  std::vector<LayerDescription> layers;  // only where asked for
};

// What a read asks of one sequence, already resolved against the model.
struct ReadRange {
  Shard shard;
  std::int64_t first_token = 0;
  std::int64_t tokens = -1;  // -1: to the committed length
};

// What a read holds of one sequence: its bytes stay as they were when it was taken, whatever
// becomes of the sequence.
struct SequencePins {
  std::shared_ptr<ModelEntry> model;
  Shard shard;
  std::int64_t first_token = 0;
  std::int64_t tokens = 0;
  std::int64_t committed_tokens = 0;
  bool sealed = false;
  struct Layer {
    TensorPins k;
    TensorPins v;
  };
  std::vector<Layer> layers;  // of the shard
};

// One request's token stream: per layer and head how far it has got, and the K and V held.
// Thread-safe; its lock is held while an append's codecs run, so that what readers find is never
// half an append.
class Sequence {
 public:
  Sequence(SequenceKey key, std::shared_ptr<ModelEntry> model, Arena& arena, Device& device,
           absl::Time now);
  ~Sequence();

  const SequenceKey& key() const { return key_; }
  const ModelEntry& model() const { return *model_; }

  // ABORTED below the highest epoch seen in the shard, ALREADY_EXISTS at that of a live writer;
  // above, the older ones end.
  absl::StatusOr<AppendResult> Claim(const std::shared_ptr<WriterClaim>& claim, absl::Time now)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // An open sequence that has received nothing goes with its last writer. Whether it is gone.
  bool Leave(const std::shared_ptr<WriterClaim>& claim) ABSL_LOCKS_EXCLUDED(mutex_);

  // All of the chunk or nothing of it. A device that fails half-way ends the sequence.
  absl::StatusOr<AppendResult> Append(const WriterClaim& claim, const Chunk& chunk, absl::Time now)
      ABSL_LOCKS_EXCLUDED(mutex_);

  absl::Status Seal(std::int64_t tokens) ABSL_LOCKS_EXCLUDED(mutex_);

  // Lets go of everything held; what readers pinned goes when they do. `why` ends the live writers.
  // False if it was gone.
  bool Drop(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same, only for an open sequence; FAILED_PRECONDITION for a sealed one.
  absl::Status DropOpen(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same, only for an open sequence that has had no message since `before`. Whether it was.
  bool DropIdle(absl::Time before, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

  absl::StatusOr<SequencePins> Pin(const ReadRange& range) const ABSL_LOCKS_EXCLUDED(mutex_);

  SequenceDescription Describe(bool with_layers) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct HeadState {
    std::int64_t received = 0;
    std::uint64_t epoch = 0;
  };
  struct LayerState {
    std::vector<HeadState> heads;
    LayerTensor k;
    LayerTensor v;
  };
  // One layer of a chunk, checked and with its memory taken. `observed`: by `heads`.
  struct PlannedLayer {
    const Chunk::Layer* source = nullptr;
    LayerState* layer = nullptr;
    std::vector<HeadAdvance> heads;
    std::vector<HeadObservation> observed;
    LayerTensor::Growth k;
    LayerTensor::Growth v;
  };

  absl::Status SealLocked(std::int64_t tokens) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckWritable(const WriterClaim& claim) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::vector<PlannedLayer>> PlanChunk(const WriterClaim& claim, const Chunk& chunk)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `ended`: writers to notify once the lock is let go.
  absl::StatusOr<AppendResult> AppendLocked(const WriterClaim& claim, const Chunk& chunk,
                                            absl::Time now,
                                            std::vector<std::shared_ptr<WriterClaim>>& ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status RunChunk(const Chunk& chunk, std::vector<PlannedLayer>& planned)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SettleLayer(const PlannedLayer& planned) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int HeadsOf(int layer) const;
  AppendResult Standing(const Shard& shard) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::int64_t LeastReceived(const Shard& shard) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::int64_t Committed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  MemoryHeld Held() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::int64_t Saturated() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<std::shared_ptr<WriterClaim>> DropLocked(const absl::Status& why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Brings the model's totals up to what this sequence holds now.
  void Report(std::int64_t source_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  const SequenceKey key_;
  const std::shared_ptr<ModelEntry> model_;
  Arena& arena_;
  Device& device_;

  mutable absl::Mutex mutex_;
  SequenceState state_ ABSL_GUARDED_BY(mutex_) = SequenceState::kOpen;
  std::vector<LayerState> layers_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<WriterClaim>> writers_ ABSL_GUARDED_BY(mutex_);
  absl::Time last_message_ ABSL_GUARDED_BY(mutex_);
  ModelTotals reported_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier::cachestore
