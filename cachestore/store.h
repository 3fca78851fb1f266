#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "cachestore/arena.h"
#include "cachestore/base/clock.h"
#include "cachestore/base/mutex.h"
#include "cachestore/device/device.h"
#include "cachestore/eviction/evictor.h"
#include "cachestore/eviction_counts.h"
#include "cachestore/grant_table.h"
#include "cachestore/home.h"
#include "cachestore/lease.h"
#include "cachestore/model/prefix_key.h"
#include "cachestore/model_registry.h"
#include "cachestore/name_space.h"
#include "cachestore/pin.h"
#include "cachestore/prefix_index.h"
#include "cachestore/sequence.h"
#include "cachestore/sequence_follower.h"
#include "cachestore/sequence_reader.h"
#include "cachestore/subscription.h"

namespace kvtier::cachestore {

struct StoreOptions {
  std::int64_t memory = 0;  // the budget, in bytes
  int page_tokens = 128;    // for models that don't ask
  int max_models = 1024;
  std::int64_t max_sequences = 100'000;
  absl::Duration open_sequence_deadline =
      absl::Minutes(5);  // without a message, an open sequence is given up
  std::int64_t max_leases = 65'536;
  absl::Duration max_lease = absl::Minutes(10);  // at once; and the longest that a read may take
  std::int64_t max_pins = 4096;
  absl::Duration max_pin = absl::Hours(24);
  std::uint64_t first_grant_id = 1;  // of leases and pins, and of event logs
  std::int64_t max_subscriptions = 64;
  std::int64_t event_log = 16 << 20;  // bytes of events that are kept, of a namespace

  EvictionPolicyName eviction = EvictionPolicyName::kLru;
  // Once more than `evict_above` percent of the budget is taken, it is brought down to
  // `evict_until`, so that appends seldom wait for room.
  int evict_above = 100;
  int evict_until = 100;
  absl::Duration idle_ttl = absl::InfiniteDuration();  // what nobody used for so long goes
  std::int64_t default_quota = kNoQuota;  // in bytes, of a namespace that has none of its own
  // What pages are stored as under Pressure::kLadder, one format after the other.
  std::vector<std::string> ladder = {"fp8_e4m3(scale=page)", "k4v2", "kivi2"};
};

// What a namespace may have and has, in bytes.
struct QuotaStanding {
  std::int64_t quota = kNoQuota;
  std::int64_t held = 0;
};

// A lease or a pin as a client knows it. Of a prompt of which nothing is held there is none: all
// are 0.
struct Grant {
  std::uint64_t id = 0;
  std::int64_t tokens = 0;
  absl::Duration duration;  // from now
};

// Where the client names no duration.
inline constexpr absl::Duration kDefaultLease = absl::Seconds(30);
inline constexpr absl::Duration kDefaultPin = absl::Hours(1);

// What an append stream says first.
struct WriterRequest {
  SequenceKey key;
  std::string model_id;
  Shard shard;  // num_layers, num_heads 0: all that follow
  std::uint64_t epoch = 0;
  // What the sequence holds from its first token on, as far as that is known: a sequence that isn't
  // held begins with the pages that others have of it.
  Prompt prompt;
  // The stream is over: a higher epoch took over, the sequence went, or it was sealed (OK). Called
  // at most once, from any thread, outside locks.
  std::function<void(const absl::Status&)> on_end;
};

// What a pin is to be.
struct PinTerms {
  PinKind kind = PinKind::kSoft;
  absl::Duration duration;
};

// Who wants to read a sequence as it is received.
struct FollowRequest {
  SequenceKey key;
  std::string model_id;           // may be empty
  std::function<void()> on_news;  // as FollowClaim's
};

class Store;

// One append stream's end in the store. Not thread-safe; must not outlive the store. Leaving does
// not touch the sequence, except that one that never received anything goes with its last writer.
class Writer {
 public:
  Writer(Store& store, std::shared_ptr<Sequence> sequence, std::shared_ptr<WriterClaim> claim,
         AppendResult standing)
      : store_(store),
        sequence_(std::move(sequence)),
        claim_(std::move(claim)),
        standing_(standing) {}
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;
  ~Writer();

  const Model& model() const { return sequence_->model().model(); }
  const Shard& shard() const { return claim_->shard; }
  // Where the shard stood when the stream was opened: the first token to send.
  const AppendResult& standing() const { return standing_; }

  absl::StatusOr<AppendResult> Append(const Chunk& chunk);

 private:
  Store& store_;
  const std::shared_ptr<Sequence> sequence_;
  const std::shared_ptr<WriterClaim> claim_;
  const AppendResult standing_;
};

// The façade: models and sequences over one budget of one device. Thread-safe. Device and clock
// must outlive it, and it everything it hands out.
class Store {
 public:
  // Reserves the budget. RESOURCE_EXHAUSTED when the device has not so much.
  static absl::StatusOr<std::unique_ptr<Store>> Create(const StoreOptions& options, Device& device,
                                                       const Clock& clock);

  // Idempotent. RESOURCE_EXHAUSTED when the budget holds not one page of every layer.
  absl::StatusOr<std::shared_ptr<ModelEntry>> RegisterModel(ModelRequest request);
  absl::StatusOr<std::shared_ptr<ModelEntry>> FindModel(const std::string& id) const {
    return models_.Find(id);
  }
  std::vector<std::shared_ptr<ModelEntry>> Models() const { return models_.All(); }

  // A sequence that isn't held is opened. NOT_FOUND for the model; FAILED_PRECONDITION for a sealed
  // sequence or one of another model or prompt; ALREADY_EXISTS, ABORTED as Sequence::Claim.
  absl::StatusOr<std::unique_ptr<Writer>> OpenWriter(WriterRequest request)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // How many tokens of each prompt are held, from the first on, in whole hash blocks. Holds nothing
  // for the asker.
  absl::StatusOr<std::vector<std::int64_t>> Lookup(const std::string& name_space,
                                                   const std::string& model_id,
                                                   absl::Span<const Prompt> prompts);

  // Opens `id` in the sequence's namespace as Sequence::Fork; how many tokens it begins with.
  // ALREADY_EXISTS where `id` is held.
  absl::StatusOr<std::int64_t> Fork(const SequenceKey& key, const std::string& id,
                                    std::int64_t tokens) ABSL_LOCKS_EXCLUDED(mutex_);

  // As Sequence::Truncate; who has a lease on it keeps what it was.
  absl::Status Truncate(const SequenceKey& key, std::int64_t tokens, std::uint64_t epoch)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Seal(const SequenceKey& key, std::int64_t tokens);
  absl::Status Abort(const SequenceKey& key);
  absl::Status Remove(const SequenceKey& key);

  // A lease on as much of a prompt as is held, which may be less than Lookup said; or on what a
  // sequence has committed. INVALID_ARGUMENT for a duration below 0 or past max_lease; 0 is
  // kDefaultLease. RESOURCE_EXHAUSTED past max_leases.
  absl::StatusOr<Grant> Acquire(const std::string& name_space, const std::string& model_id,
                                const Prompt& prompt, absl::Duration duration);
  absl::StatusOr<Grant> Acquire(const SequenceKey& key, absl::Duration duration);
  // ABORTED where the lease has ended.
  absl::StatusOr<Grant> Renew(const std::string& name_space, std::uint64_t id,
                              absl::Duration duration);
  void Release(const std::string& name_space, std::uint64_t id) { leases_.End(name_space, id); }

  // The same of pins, with max_pin, kDefaultPin and max_pins. What was held of the sequence or the
  // prompt then is pinned. A pin of a sequence ends when that is removed; of a prompt the pages
  // that may be shared stay.
  absl::StatusOr<Grant> AddPin(const std::string& name_space, const std::string& model_id,
                               const Prompt& prompt, PinTerms terms);
  absl::StatusOr<Grant> AddPin(const SequenceKey& key, PinTerms terms);
  void Unpin(const std::string& name_space, std::uint64_t id) { pins_.End(name_space, id); }
  std::int64_t pins() const { return pins_.size(); }
  // What is due now and then: ends leases whose deadline is past, evicts down to the watermark, and
  // what nobody used for idle_ttl; forgets event logs. How many leases.
  int Sweep() ABSL_LOCKS_EXCLUDED(room_mutex_);
  std::int64_t leases() const { return leases_.size(); }

  // Under a lease of its own, of max_lease. `model_id` may be empty; another than the sequence's is
  // FAILED_PRECONDITION.
  absl::StatusOr<SequenceReader> OpenReader(const SequenceKey& key, const std::string& model_id,
                                            const ReadRange& range, const ReadFormat& format)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Under a lease that the client has.
  absl::StatusOr<SequenceReader> OpenReader(const std::string& name_space, std::uint64_t lease_id,
                                            const std::string& model_id, ReadRange range,
                                            const ReadFormat& format);

  // The same of an open sequence, or a sealed one, as it is received: `range` may go past what is
  // there, and where it names no length the sequence's end does, once it is sealed.
  absl::StatusOr<SequenceFollower> Follow(const FollowRequest& request, ReadRange range,
                                          const ReadFormat& format) ABSL_LOCKS_EXCLUDED(mutex_);

  absl::StatusOr<SequenceDescription> Describe(const SequenceKey& key) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // At most `limit` sequences of a namespace whose id comes after `after`, in order.
  std::vector<SequenceDescription> List(const SequenceKey& after, int limit) const
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Gives up open sequences that had no message for open_sequence_deadline. How many.
  int ReclaimAbandoned() ABSL_LOCKS_EXCLUDED(mutex_);

  // What `name_space` may have at most; 0 is the default quota. What it has more is evicted, as far
  // as it may go.
  absl::StatusOr<QuotaStanding> SetQuota(const std::string& name_space, std::int64_t bytes)
      ABSL_LOCKS_EXCLUDED(room_mutex_);
  QuotaStanding GetQuota(const std::string& name_space);

  // Tells what of a namespace can be found by Lookup and what no longer. RESOURCE_EXHAUSTED past
  // max_subscriptions. `on_events` as EventLog::Waiter.
  absl::StatusOr<std::unique_ptr<Subscription>> Subscribe(const std::string& name_space,
                                                          const EventPosition& after,
                                                          EventLog::Waiter on_events) {
    return subscribers_.Add(namespaces_.Get(name_space), after, std::move(on_events));
  }
  std::int64_t subscriptions() const { return subscribers_.size(); }
  EvictionCounts evictions() const { return evictions_.counts(); }

  // What gives way first in `name_space`. Pages that were lowered stay so.
  absl::Status SetPressure(const std::string& name_space, Pressure pressure);
  Pressure GetPressure(const std::string& name_space);
  // Page columns that were lowered, by the format that they got.
  std::map<std::string, std::int64_t> lowered() const { return lowered_.counts(); }

  MemoryParts memory() const ABSL_LOCKS_EXCLUDED(headroom_mutex_);
  std::int64_t budget() const { return arena_.budget(); }
  const StoreOptions& options() const { return options_; }

 private:
  friend class Writer;

  Store(const StoreOptions& options, std::byte* slab, Device& device, const Clock& clock);

  absl::StatusOr<std::shared_ptr<Sequence>> Find(const SequenceKey& key) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<std::shared_ptr<Sequence>> FindOrOpen(const SequenceKey& key,
                                                       const std::shared_ptr<ModelEntry>& model,
                                                       const HashBlocksPtr& blocks)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // On the first `tokens` of a sequence, or all.
  absl::StatusOr<Grant> GrantLease(std::shared_ptr<Sequence> sequence, std::int64_t tokens,
                                   absl::Duration duration);
  // The same, and with it on `columns`, if there are any.
  absl::StatusOr<Grant> GrantPin(const std::shared_ptr<Sequence>& sequence, std::int64_t tokens,
                                 const std::shared_ptr<Sequence>& columns, const PinTerms& terms);
  // As much of a prompt as is held, as a sequence, and what `take(sequence, tokens)` makes of it;
  // where it refuses there is less than was found, and it's tried again with that.
  template <class F>
  absl::StatusOr<Grant> WithPrefix(const std::string& name_space, const std::string& model_id,
                                   const Prompt& prompt, F take);
  absl::StatusOr<SequenceReader> Read(std::shared_ptr<const Lease> lease,
                                      const std::string& model_id, ReadRange range,
                                      const ReadFormat& format);
  // FAILED_PRECONDITION for another model than the sequence's.
  absl::Status Resolve(const Sequence& sequence, const std::string& model_id,
                       ReadRange& range) const;
  // What `sequence` is called by from now on, unless its key is taken: then who has it.
  absl::StatusOr<std::shared_ptr<Sequence>> Name(std::shared_ptr<Sequence> sequence)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // From now on `successor` has the name of `sequence`, which is gone (Sequence::Supersede). False
  // where another had it already.
  absl::StatusOr<bool> Replace(const std::shared_ptr<Sequence>& sequence,
                               const std::shared_ptr<Sequence>& successor, std::uint64_t epoch)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The whole pages that are held of a prompt.
  static Path SharedPath(const Model& model, const PrefixIndex& index, const HashBlocks& blocks);
  SequenceHome Home() { return {arena_, device_, evictor_}; }
  // `f(needed)` tries something that takes memory, and says in `needed` how much, where there is
  // not enough. As long as there is something to evict it's tried again.
  template <class F>
  auto WithRoom(const std::shared_ptr<Namespace>& name_space, F f);
  // Evicts until `bytes` more are free, or until a namespace has so much left of its quota, where
  // that is what lacks. False where nothing was left to evict and it is no better than before.
  bool MakeRoom(Namespace* name_space, std::int64_t bytes) ABSL_LOCKS_EXCLUDED(room_mutex_);
  void EvictToWatermark() ABSL_LOCKS_EXCLUDED(room_mutex_);
  // Stores the next column, of one namespace's or of all, in fewer bits. False where there is none,
  // or no room for the step.
  bool LowerOne(Namespace* of) ABSL_LOCKS_EXCLUDED(room_mutex_, lower_mutex_);
  // At least one, until `bytes` are free, or left of the namespace's quota. Whether there was one.
  bool LowerFor(Namespace* of, std::int64_t bytes) ABSL_LOCKS_EXCLUDED(room_mutex_, lower_mutex_);
  // A column's parts as a rung stores them, and those among them that were made for it, which are
  // nobody's yet.
  struct Lowered {
    std::vector<Column::Layer> layers;
    std::vector<std::shared_ptr<Part>> made;
  };
  absl::StatusOr<Lowered> Lower(const Column& column, const Model& rung)
      ABSL_LOCKS_EXCLUDED(headroom_mutex_);
  absl::StatusOr<std::vector<Allocation>> TakeForLowering(absl::Span<const std::int64_t> sizes)
      ABSL_LOCKS_EXCLUDED(headroom_mutex_);
  // As much as a step takes is set aside, if it can be had, as long as a namespace takes the
  // ladder: a step is taken when all else is full.
  void KeepHeadroom() ABSL_LOCKS_EXCLUDED(headroom_mutex_);
  // Whether there was any.
  bool DropHeadroom() ABSL_LOCKS_EXCLUDED(headroom_mutex_);
  // Lowers a column, or evicts something, if there is not enough by then. False where nothing is
  // left.
  bool FreeSome(Namespace* of, EvictionReason reason, absl::FunctionRef<bool()> enough)
      ABSL_LOCKS_EXCLUDED(room_mutex_, lower_mutex_);
  // What is free, or left of a namespace's quota.
  std::int64_t Left(const Namespace* name_space) const;
  std::int64_t Held() const { return budget() - memory().free; }
  // Evicts the next, and lets it go. Whether there was one.
  bool EvictOne(Namespace* of, EvictionReason reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(room_mutex_);
  void Lose(const Evictor::Victim& victim, EvictionReason reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(room_mutex_);
  absl::Status CheckModel(const Sequence& sequence, const std::string& model_id) const;
  // Forgets the name, if it still means this sequence.
  void Forget(const std::shared_ptr<Sequence>& sequence) ABSL_LOCKS_EXCLUDED(mutex_);

  // Constant after construction.
  const StoreOptions options_;
  Device& device_;
  const Clock& clock_;

  // Have their own locks.
  Arena arena_;
  ModelRegistry models_;
  NamespaceTable namespaces_;
  Evictor evictor_;
  EvictionCounter evictions_;
  LoweredCounter lowered_;
  GrantTable<Lease> leases_;
  GrantTable<Pin> pins_;
  Subscribers subscribers_;

  // Who makes room; before a sequence's lock. One at a time, so that what one has evicted has been
  // let go when the next looks for room.
  Mutex room_mutex_;
  // Who lowers a column; before a sequence's lock.
  Mutex lower_mutex_;
  mutable Mutex headroom_mutex_;
  std::vector<Allocation> headroom_ ABSL_GUARDED_BY(headroom_mutex_);

  mutable Mutex mutex_;
  absl::flat_hash_map<SequenceKey, std::shared_ptr<Sequence>> sequences_ ABSL_GUARDED_BY(mutex_);
  absl::btree_set<SequenceKey> order_ ABSL_GUARDED_BY(mutex_);  // of the same keys, to list them
};

}  // namespace kvtier::cachestore
