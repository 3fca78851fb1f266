#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "cachestore/arena.h"
#include "cachestore/base/clock.h"
#include "cachestore/base/mutex.h"
#include "cachestore/device/device.h"
#include "cachestore/lease.h"
#include "cachestore/model/prefix_key.h"
#include "cachestore/model_registry.h"
#include "cachestore/prefix_index.h"
#include "cachestore/sequence.h"
#include "cachestore/sequence_reader.h"

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
  std::uint64_t first_lease_id = 1;
};

// A lease as a client knows it. Of a prompt of which nothing is held there is none: all are 0.
struct LeaseGrant {
  std::uint64_t id = 0;
  std::int64_t tokens = 0;
  absl::Duration duration;  // from now
};

// Where the client names no duration.
inline constexpr absl::Duration kDefaultLease = absl::Seconds(30);

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
                                                   absl::Span<const Prompt> prompts) const;

  // Opens `id` in the sequence's namespace as Sequence::Fork; how many tokens it begins with.
  // ALREADY_EXISTS where `id` is held.
  absl::StatusOr<std::int64_t> Fork(const SequenceKey& key, const std::string& id,
                                    std::int64_t tokens) ABSL_LOCKS_EXCLUDED(mutex_);

  absl::Status Seal(const SequenceKey& key, std::int64_t tokens);
  absl::Status Abort(const SequenceKey& key);
  absl::Status Remove(const SequenceKey& key);

  // A lease on as much of a prompt as is held, which may be less than Lookup said; or on what a
  // sequence has committed. INVALID_ARGUMENT for a duration below 0 or past max_lease; 0 is
  // kDefaultLease. RESOURCE_EXHAUSTED past max_leases.
  absl::StatusOr<LeaseGrant> Acquire(const std::string& name_space, const std::string& model_id,
                                     const Prompt& prompt, absl::Duration duration);
  absl::StatusOr<LeaseGrant> Acquire(const SequenceKey& key, absl::Duration duration);
  // ABORTED where the lease has ended.
  absl::StatusOr<LeaseGrant> Renew(const std::string& name_space, std::uint64_t id,
                                   absl::Duration duration);
  void Release(const std::string& name_space, std::uint64_t id) { leases_.Release(name_space, id); }
  // Ends leases whose deadline is past. How many.
  int SweepLeases() { return leases_.Sweep(); }
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

  absl::StatusOr<SequenceDescription> Describe(const SequenceKey& key) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // At most `limit` sequences of a namespace whose id comes after `after`, in order.
  std::vector<SequenceDescription> List(const SequenceKey& after, int limit) const
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Gives up open sequences that had no message for open_sequence_deadline. How many.
  int ReclaimAbandoned() ABSL_LOCKS_EXCLUDED(mutex_);

  MemoryParts memory() const { return arena_.Snapshot(); }
  std::int64_t budget() const { return arena_.budget(); }
  const StoreOptions& options() const { return options_; }

 private:
  friend class Writer;

  Store(const StoreOptions& options, std::byte* slab, Device& device, const Clock& clock);

  absl::StatusOr<std::shared_ptr<Sequence>> Find(const SequenceKey& key) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<std::shared_ptr<Sequence>> FindOrOpen(const SequenceKey& key,
                                                       const std::shared_ptr<ModelEntry>& model,
                                                       const std::vector<PrefixKey>& keys)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<LeaseGrant> Grant(const std::string& name_space,
                                   std::shared_ptr<Sequence> sequence, std::int64_t tokens,
                                   absl::Duration duration);
  absl::StatusOr<absl::Duration> CheckDuration(absl::Duration duration) const;
  absl::StatusOr<SequenceReader> Read(std::shared_ptr<const Lease> lease,
                                      const std::string& model_id, ReadRange range,
                                      const ReadFormat& format);
  // What `sequence` is called by from now on, unless its key is taken: then who has it.
  absl::StatusOr<std::shared_ptr<Sequence>> Name(std::shared_ptr<Sequence> sequence)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The whole pages that are held of a prompt.
  Path SharedPath(const Model& model, const std::vector<PrefixKey>& keys) const;
  SequenceHome Home() { return {arena_, device_, index_}; }
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
  PrefixIndex index_;
  LeaseTable leases_;

  mutable Mutex mutex_;
  absl::flat_hash_map<SequenceKey, std::shared_ptr<Sequence>> sequences_ ABSL_GUARDED_BY(mutex_);
  absl::btree_set<SequenceKey> order_ ABSL_GUARDED_BY(mutex_);  // of the same keys, to list them
};

}  // namespace kvtier::cachestore
