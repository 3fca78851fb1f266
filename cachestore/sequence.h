#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cachestore/base/errors.h"
#include "cachestore/base/mutex.h"
#include "cachestore/chunk.h"
#include "cachestore/column.h"
#include "cachestore/follow_claims.h"
#include "cachestore/home.h"
#include "cachestore/kept_windows.h"
#include "cachestore/layer_tensor.h"
#include "cachestore/prefix_index.h"
#include "cachestore/writer_claims.h"

namespace kvtier::cachestore {

struct SequenceKey {
  std::string name_space;
  std::string id;
  friend auto operator<=>(const SequenceKey&, const SequenceKey&) = default;
  template <class H>
  friend H AbslHashValue(H hash, const SequenceKey& key) {
    return H::combine(std::move(hash), key.name_space, key.id);
  }
};

enum class SequenceState { kOpen, kSealed, kGone };

enum class PinKind { kSoft, kHard };

struct AppendResult {
  std::int64_t received_tokens = 0;   // least over the claim's layers and heads
  std::int64_t committed_tokens = 0;  // of the sequence
  std::int64_t skipped_tokens = 0;    // of this chunk
  std::int64_t saturated_values = 0;  // of this chunk
  // Where the residual rule counts from: 0, or the length that the sequence was begun with.
  std::int64_t residual_origin = 0;
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
  std::int64_t evicted_tokens = 0;  // that were committed behind these when it was sealed
  MemoryHeld held;
  std::int64_t saturated_values = 0;
  std::vector<LayerDescription> layers;  // only where asked for
  // Page columns by how often they were lowered, from once on; only where layers are asked for.
  std::vector<std::int64_t> lowered_pages;
};

// What a read asks of one sequence, already resolved against the model.
struct ReadRange {
  Shard shard;
  std::int64_t first_token = 0;
  std::int64_t tokens = -1;  // -1: to the committed length
  // Past which nothing is read, whatever is committed.
  std::int64_t limit = std::numeric_limits<std::int64_t>::max();
  bool received = false;  // what the shard has received is as good as committed
  // Of a layer with a window only what that sees at the range's end, and before that as much as
  // makes whole steps from first_token on; of pages, where step_tokens is 0.
  bool within_windows = false;
  std::int64_t step_tokens = 1;
};

// What a read holds of one sequence: its bytes stay as they were when it was taken, whatever
// becomes of the sequence.
struct SequencePins {
  std::shared_ptr<ModelEntry> model;
  Shard shard;
  std::int64_t first_token = 0;
  std::int64_t tokens = 0;
  std::int64_t committed_tokens = 0;  // that the reader may have
  std::int64_t end_token = 0;         // of the sequence
  bool sealed = false;
  struct Layer {
    std::int64_t first_token = 0;  // that the reader may have of it
    TensorPins k;
    TensorPins v;
  };
  std::vector<Layer> layers;  // of the shard
};

// What a sequence begins with: columns of others, and its prompt's hash blocks, as far as they
// are known. One for a reader is Sequence::ForReader's.
struct SequenceStart {
  Path path;
  std::int64_t tokens = 0;  // that it will begin with, where that is more than the columns have
  HashBlocksPtr blocks = NoBlocks();
  bool for_reader = false;
};

class Sequence;

// A fork that has no name yet, and how many tokens it begins with.
struct SequenceFork {
  std::shared_ptr<Sequence> sequence;
  std::int64_t tokens = 0;
};

// One request's token stream: per layer and head how far it has got, and the K and V held. Pages
// that are final in every layer are columns, which sequences share; the rest is its own.
// Thread-safe; its lock is held while an append's codecs run, so that what readers find is never
// half an append. Of the layers of Model::windows it keeps what KeptWindows says.
class Sequence : public std::enable_shared_from_this<Sequence> {
 public:
  Sequence(SequenceKey key, Owner owner, const SequenceHome& home, absl::Time now,
           SequenceStart start = {});
  ~Sequence();
  // One for a reader of columns alone, or for a pin on them: it is sealed and counts nowhere.
  static std::shared_ptr<Sequence> ForReader(SequenceKey key, const Owner& owner,
                                             const SequenceHome& home, absl::Time now, Path path);

  const SequenceKey& key() const { return key_; }
  const ModelEntry& model() const { return *owner_.model; }
  const Owner& owner() const { return owner_; }
  bool for_reader() const { return !counts_; }
  // Whether all that the windows see of its first `tokens` tokens is here, as far as it keeps that:
  // for those behind its columns.
  bool Hits(std::int64_t tokens) const { return windows_.Hits(tokens); }

  // As WriterClaims::Add; the older ones end. `blocks`: of the writer's prompt; FAILED_PRECONDITION
  // where they are of another prompt than the sequence's.
  absl::StatusOr<AppendResult> Claim(const std::shared_ptr<WriterClaim>& claim,
                                     const HashBlocksPtr& blocks, absl::Time now)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // An open sequence that holds nothing goes with its last writer. Whether it is gone.
  bool Leave(const std::shared_ptr<WriterClaim>& claim) ABSL_LOCKS_EXCLUDED(mutex_);

  // All of the chunk or nothing of it. A device that fails half-way ends the sequence. `needed`:
  // the memory that it takes, where that is not there.
  absl::StatusOr<AppendResult> Append(const WriterClaim& claim, const Chunk& chunk, absl::Time now,
                                      std::int64_t& needed) ABSL_LOCKS_EXCLUDED(mutex_);

  absl::Status Seal(std::int64_t tokens) ABSL_LOCKS_EXCLUDED(mutex_);

  // Cuts an open sequence to `tokens` tokens, which every layer and head must have, inside no group
  // of codes; what is codes stays codes. FAILED_PRECONDITION where a window has moved on. `epoch`
  // as a writer's: those of the same or a lower one end. Where somebody has a hold on what it cuts
  // off, it does nothing but `copies`: a successor has to be cut in its stead.
  absl::Status Truncate(std::int64_t tokens, std::uint64_t epoch, absl::Time now, bool& copies,
                        std::int64_t& needed) ABSL_LOCKS_EXCLUDED(mutex_);
  // One that is as this is, without its writers and without a name, to take its place.
  absl::StatusOr<std::shared_ptr<Sequence>> Successor(absl::Time now, std::int64_t& needed)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // It is gone, and its writers end: its successor takes its place, by one of `epoch`. Not where it
  // was sealed, dropped, or written to by a higher epoch meanwhile.
  absl::Status Supersede(std::uint64_t epoch, Notices& notices) ABSL_LOCKS_EXCLUDED(mutex_);

  // A hold on its first `tokens` tokens: they stay readable, after it is dropped as well, until the
  // hold is given back. -1: of all that is committed, whatever windows see of that. How many;
  // NOT_FOUND where it has not so many, or not what the windows see of them, or is gone.
  absl::StatusOr<std::int64_t> Hold(std::int64_t tokens) ABSL_LOCKS_EXCLUDED(mutex_);
  // `tokens`: how many that were.
  void Unhold(std::int64_t tokens) ABSL_LOCKS_EXCLUDED(mutex_);

  // A reader's sequence of its columns; null where there are none, or it is such a one itself.
  std::shared_ptr<Sequence> Columns(absl::Time now) const ABSL_LOCKS_EXCLUDED(mutex_);
  // It isn't evicted until the pin is given back, or only after all that isn't pinned. `tokens`,
  // and what comes back, as of Hold.
  absl::StatusOr<std::int64_t> AddPin(PinKind kind, std::int64_t tokens)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void RemovePin(PinKind kind, std::int64_t tokens) ABSL_LOCKS_EXCLUDED(mutex_);

  // Gone from now on. It lets go of everything held once nobody has a hold on it; what readers
  // pinned goes when they do. `why` ends the live writers. False if it was gone.
  bool Drop(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same, only for an open sequence; FAILED_PRECONDITION for a sealed one.
  absl::Status DropOpen(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same, only for an open sequence that has had no message for `deadline`. Whether it was.
  bool DropIdle(absl::Time now, absl::Duration deadline) ABSL_LOCKS_EXCLUDED(mutex_);

  // Lets go of what the evictor took of it: its end, the column before that, ... What it lost. Once
  // nothing is left but what it was begun with, which others have as well, it is gone.
  struct Loss {
    std::int64_t tokens = 0;
    bool gone = false;
  };
  Loss LoseEvicted() ABSL_LOCKS_EXCLUDED(mutex_);

  // By one who has a hold on it: another sequence, open, that begins as this one does. At the
  // length where all layers and heads stand it is exact, with copies of what is not in columns;
  // before, it has the whole columns of `tokens` only. -1: to the committed length. OUT_OF_RANGE
  // past that; NOT_FOUND where a window has moved on; RESOURCE_EXHAUSTED when the budget has no
  // room for the copies, and `needed` is what they take.
  absl::StatusOr<SequenceFork> Fork(SequenceKey key, std::int64_t tokens, absl::Time now,
                                    std::int64_t& needed) const ABSL_LOCKS_EXCLUDED(mutex_);
  // A fork is found by its keys from now on.
  void List() ABSL_LOCKS_EXCLUDED(mutex_);

  // By one who has a hold on it, which is on all that was pinned from now on.
  absl::StatusOr<SequencePins> Pin(const ReadRange& range) ABSL_LOCKS_EXCLUDED(mutex_);

  // From now on the claim is told of news, until it ends or is taken back. NOT_FOUND where the
  // sequence is gone.
  absl::Status Follow(std::shared_ptr<FollowClaim> claim) ABSL_LOCKS_EXCLUDED(mutex_);
  void Unfollow(const std::shared_ptr<FollowClaim>& claim) ABSL_LOCKS_EXCLUDED(mutex_);
  // How far what one who has a hold follows has got. ABORTED once the sequence went; where it is
  // sealed, OUT_OF_RANGE and NOT_FOUND as Pin.
  absl::StatusOr<FollowStanding> Look(FollowClaim& claim, const ReadRange& range)
      ABSL_LOCKS_EXCLUDED(mutex_);

  SequenceDescription Describe(bool with_layers) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct LayerState {
    std::vector<std::int64_t> received;  // by head
    LayerTensor k;
    LayerTensor v;
  };
  // One layer of a chunk, checked and with its memory taken. `observed`: by `heads`.
  struct PlannedLayer {
    const Chunk::Layer* source = nullptr;
    LayerState* layer = nullptr;
    std::vector<HeadAdvance> heads;
    std::vector<HeadObservation> observed;
    LayerTensor::Need k_need;
    LayerTensor::Need v_need;
    LayerTensor::Growth k;
    LayerTensor::Growth v;
  };

  // How one K or V of it is to end earlier.
  struct PlannedCut {
    LayerTensor* tensor = nullptr;
    LayerTensor::Cut cut;
  };

  absl::Status SealLocked(std::int64_t tokens) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckWritable(const WriterClaim& claim) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::vector<PlannedLayer>> PlanChunk(const WriterClaim& claim, const Chunk& chunk)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakeMemory(std::vector<PlannedLayer>& planned, std::int64_t& needed)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<AppendResult> AppendLocked(const WriterClaim& claim, const Chunk& chunk,
                                            absl::Time now, std::int64_t& needed, Notices& notices)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status RunChunk(const Chunk& chunk, std::vector<PlannedLayer>& planned)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SettleLayer(const PlannedLayer& planned, HeaderWrites& headers)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int HeadsOf(int layer) const;
  AppendResult Standing(const Shard& shard) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::int64_t LeastReceived(const Shard& shard) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::int64_t Committed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  MemoryHeld Held() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::int64_t Saturated() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropLocked(const absl::Status& why, Notices& notices) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndFollowers(const absl::Status& why, Notices& notices)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Pages that have become final in every layer go to columns; the index learns what is new.
  void Publish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Pages behind the path that are final in every layer; `most` are looked at.
  std::int64_t FinalPages(std::int64_t most) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MakeColumns() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // FAILED_PRECONDITION where it is sealed.
  absl::Status CheckOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckHeld() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether every layer and head has received as much.
  bool StandTogether() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckBlocks(const HashBlocks& blocks) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeBlocks(const HashBlocksPtr& blocks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of the first `tokens` tokens those that are known.
  BlockRange BlocksOf(std::int64_t tokens) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::int64_t BlocksIn(std::int64_t tokens) const;
  std::int64_t PathTokens() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LetGo() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CutPath(std::int64_t pages) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whoever follows it has yet to read what is behind its windows.
  void LetGoBehindWindows() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // All layers with nothing behind the path.
  void StartLayers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Its end goes, and so many columns before it as were evicted.
  void CutEvicted() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What is not evicted yet is kept from now on.
  void GuardEnd() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The same, and how many tokens that are; NOT_FOUND, and nothing is kept, where it is gone, or
  // has fewer than `tokens`. -1: whatever it has.
  absl::StatusOr<std::int64_t> Keep(std::int64_t tokens) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckRoomForCopy(std::int64_t& needed) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What is behind the path, layers that stand apart as they are.
  absl::Status CopyEndTo(Sequence& fork) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The part of a column that a token lies in; null where it lies in none, or begins one.
  std::shared_ptr<const Part> ColumnPart(std::int64_t token, std::size_t layer, Side side) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::vector<PlannedCut>> PlanCuts(std::int64_t tokens)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ReserveCuts(std::vector<PlannedCut>& cuts, std::int64_t& needed) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CutTo(std::int64_t tokens, std::vector<PlannedCut> cuts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // That fewer tokens are here than were sealed.
  absl::Status EvictedFrom(std::int64_t tokens) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WindowsMovedOn(Reason reason, std::int64_t tokens) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // It is no longer found by its keys.
  void Unlist() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Pages before where its residual begins to count: what is counted of them, the columns know.
  std::int64_t SharedPages() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // NOT_FOUND where some of it went behind its window.
  absl::StatusOr<SequencePins::Layer> PinLayer(std::size_t layer, const ReadRange& range,
                                               std::int64_t end) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of what a read up to `end` finds gone in a layer.
  absl::Status BehindWindow(std::size_t layer, const ReadRange& range, std::int64_t end) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WindowEvicted() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  LayerTensor::Memory Memory() const { return {home_.arena, owner_.memory(), home_.device}; }
  // Brings the model's totals up to what this sequence holds now.
  void Report(std::int64_t source_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  const SequenceKey key_;
  const Owner owner_;
  const SequenceHome home_;
  const bool counts_;  // in the model's totals

  // The evictor's lock guards it.
  EvictionNode end_;

  mutable Mutex mutex_;
  SequenceState state_ ABSL_GUARDED_BY(mutex_) = SequenceState::kOpen;
  Path path_ ABSL_GUARDED_BY(mutex_);
  KeptWindows windows_;                                   // but for Hits guarded by mutex_
  std::int64_t begun_pages_ ABSL_GUARDED_BY(mutex_) = 0;  // others' columns that it was begun with
  std::vector<LayerState> layers_ ABSL_GUARDED_BY(mutex_);  // what is behind the path
  WriterClaims writers_ ABSL_GUARDED_BY(mutex_);
  FollowClaims followers_ ABSL_GUARDED_BY(mutex_);
  absl::Time last_message_ ABSL_GUARDED_BY(mutex_);
  HashBlocksPtr blocks_ ABSL_GUARDED_BY(mutex_);  // from the first on
  // Of these, [begin, end) are in the index as this sequence's; those before, as its columns'.
  std::int64_t indexed_begin_ ABSL_GUARDED_BY(mutex_) = 0;
  std::int64_t indexed_end_ ABSL_GUARDED_BY(mutex_) = 0;
  std::int64_t holds_ ABSL_GUARDED_BY(mutex_) = 0;
  std::int64_t held_tokens_ ABSL_GUARDED_BY(mutex_) = 0;  // the most that a hold was taken on
  std::int64_t soft_pins_ ABSL_GUARDED_BY(mutex_) = 0;
  std::int64_t hard_pins_ ABSL_GUARDED_BY(mutex_) = 0;
  std::int64_t sealed_tokens_ ABSL_GUARDED_BY(mutex_) = 0;  // when it was sealed
  std::int64_t lost_tokens_ ABSL_GUARDED_BY(mutex_) = 0;    // of which LoseEvicted has yet to tell
  ModelTotals reported_ ABSL_GUARDED_BY(mutex_);            // last time, of this sequence
};

}  // namespace kvtier::cachestore
