#include "cachestore/store.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/model/plan.h"

namespace kvtier::cachestore {
namespace {

constexpr int kMostRounds = 32;

const absl::Status& StatusOf(const absl::Status& status) { return status; }
template <class T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

absl::Status NotHeld(const SequenceKey& key) {
  return Error(
      Reason::kUnknownSequence,
      fmt::format("sequence \"{}\" is not held in namespace \"{}\"", key.id, key.name_space));
}

}  // namespace

template <class F>
auto Store::WithRoom(const std::shared_ptr<Namespace>& name_space, F f) {
  std::int64_t wanted = 0;
  for (int round = 0;; ++round) {
    std::int64_t needed = 0;
    auto result = f(needed);
    const std::string reason = ReasonOf(StatusOf(result));
    const bool quota = reason == ReasonName(Reason::kQuota);
    const std::int64_t most = std::min(budget(), quota ? name_space->memory->quota() : budget());
    const bool lacks_room = quota || reason == ReasonName(Reason::kBudget);
    // What would not fit into all of it costs nobody anything.
    if (!lacks_room || needed > most || round == kMostRounds) return result;
    if (LowerFor(quota ? name_space.get() : nullptr, needed)) {
      --round;  // there are only so many steps to take
      continue;
    }
    // Twice as much each time: pieces may not fit where their sum does, and others take some of it.
    wanted = std::min(most, std::max(needed, 2 * wanted));
    if (!MakeRoom(quota ? name_space.get() : nullptr, wanted)) return result;
  }
}

Writer::~Writer() {
  if (sequence_->Leave(claim_)) store_.Forget(sequence_);
}

absl::StatusOr<AppendResult> Writer::Append(const Chunk& chunk) {
  store_.EvictToWatermark();
  return store_.WithRoom(sequence_->owner().name_space, [&](std::int64_t& needed) {
    return sequence_->Append(*claim_, chunk, store_.clock_.Now(), needed);
  });
}

absl::StatusOr<std::unique_ptr<Store>> Store::Create(const StoreOptions& options, Device& device,
                                                     const Clock& clock) {
  KVT_ASSIGN_OR_RETURN(std::byte* const slab, device.Reserve(options.memory));
  return std::unique_ptr<Store>(new Store(options, slab, device, clock));
}

Store::Store(const StoreOptions& options, std::byte* slab, Device& device, const Clock& clock)
    : options_(options),
      device_(device),
      clock_(clock),
      arena_(slab, options.memory),
      models_(options.max_models),
      namespaces_(options.eviction, options.default_quota),
      evictor_(options.eviction, options.idle_ttl < absl::InfiniteDuration(), clock),
      leases_(options.first_grant_id,
              {options.max_leases, "leases", "max_leases", Reason::kTooManyLeases}, clock),
      pins_(options.first_grant_id, {options.max_pins, "pins", "max_pins", Reason::kTooManyPins},
            clock),
      subscribers_(options.first_grant_id, {options.max_subscriptions, options.event_log}, clock) {
  for (const std::string& format : options.ladder) lowered_.Add(format, 0);
}

absl::StatusOr<std::shared_ptr<ModelEntry>> Store::RegisterModel(ModelRequest request) {
  KVT_ASSIGN_OR_RETURN(std::shared_ptr<const Model> model,
                       ResolveModel(std::move(request), options_.page_tokens));
  if (const std::int64_t least = OnePageOfEveryLayer(*model); least > budget()) {
    return Error(Reason::kBudget,
                 fmt::format("memory is {} bytes; one page of every layer of \"{}\" as {} takes {}",
                             budget(), model->request.spec.name, model->format, least));
  }
  Rungs rungs = RungsOf(*model, options_.ladder);
  auto entry = models_.Add(std::move(model), std::move(rungs));
  KeepHeadroom();
  return entry;
}

absl::StatusOr<std::unique_ptr<Writer>> Store::OpenWriter(WriterRequest request) {
  KVT_ASSIGN_OR_RETURN(const std::shared_ptr<ModelEntry> model, models_.Find(request.model_id));
  KVT_ASSIGN_OR_RETURN(const Shard shard, ResolveShard(request.shard, model->model()));
  const int block_tokens = model->model().request.spec.hash_block_tokens;
  KVT_RETURN_IF_ERROR(CheckPrompt(request.prompt, block_tokens));
  const HashBlocksPtr blocks = HashBlocksOf(request.key.name_space, request.model_id, block_tokens,
                                            std::move(request.prompt));
  auto claim = std::make_shared<WriterClaim>();
  claim->shard = shard;
  claim->epoch = request.epoch;
  claim->on_end = std::move(request.on_end);
  // A sequence may go between being found and being claimed: then its name is free, and the next
  // round opens it anew.
  for (int round = 0;; ++round) {
    KVT_ASSIGN_OR_RETURN(std::shared_ptr<Sequence> sequence,
                         FindOrOpen(request.key, model, blocks));
    KVT_RETURN_IF_ERROR(CheckModel(*sequence, request.model_id));
    absl::StatusOr<AppendResult> standing = sequence->Claim(claim, blocks, clock_.Now());
    if (standing.ok())
      return std::make_unique<Writer>(*this, std::move(sequence), std::move(claim), *standing);
    if (ReasonOf(standing.status()) != ReasonName(Reason::kSequenceGone) || round == 2)
      return standing.status();
    Forget(sequence);
  }
}

absl::StatusOr<std::vector<std::int64_t>> Store::Lookup(const std::string& name_space,
                                                        const std::string& model_id,
                                                        absl::Span<const Prompt> prompts) {
  KVT_ASSIGN_OR_RETURN(const std::shared_ptr<ModelEntry> model, models_.Find(model_id));
  const int block_tokens = model->model().request.spec.hash_block_tokens;
  std::int64_t blocks = 0;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    KVT_RETURN_IF_ERROR(CheckPrompt(prompts[i], block_tokens, fmt::format("prompts[{}]", i)));
    blocks += BlocksOf(prompts[i], block_tokens);
  }
  if (blocks > kMaxPromptBlocks) {
    return Error(Reason::kInvalidField,
                 fmt::format("prompts have {} hash blocks together; want at most {} in one call",
                             blocks, kMaxPromptBlocks));
  }
  const std::shared_ptr<const Namespace> asked = namespaces_.Get(name_space);
  std::vector<std::int64_t> tokens;
  for (const Prompt& prompt : prompts) {
    const auto keys = PrefixKeysOf(name_space, model_id, block_tokens, prompt);
    if (model->model().windows.empty()) {
      tokens.push_back(block_tokens * asked->index.CountHeld(keys));
      continue;
    }
    PrefixIndex::Found found = asked->index.Find(keys);
    tokens.push_back(block_tokens * found.blocks);
    const Path let_go(std::move(found.column));  // nobody else may have it by now
  }
  return tokens;
}

absl::StatusOr<std::int64_t> Store::Fork(const SequenceKey& key, const std::string& id,
                                         std::int64_t tokens) {
  KVT_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> source, Find(key));
  const SequenceKey fork_key{key.name_space, id};
  const auto taken = [&] {
    return Error(Reason::kSequenceExists,
                 fmt::format("new_sequence is \"{}\", which is held in namespace \"{}\"", id,
                             key.name_space));
  };
  if (Find(fork_key).ok()) return taken();
  KVT_ASSIGN_OR_RETURN(const std::int64_t held, source->Hold(-1));
  // Room for the copies must not come from what is copied.
  const Lease kept(source, held, absl::InfiniteFuture(), clock_);
  KVT_ASSIGN_OR_RETURN(const SequenceFork fork,
                       WithRoom(source->owner().name_space, [&](std::int64_t& needed) {
                         return source->Fork(fork_key, tokens, clock_.Now(), needed);
                       }));
  KVT_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> named, Name(fork.sequence));
  if (named != fork.sequence) return taken();
  fork.sequence->List();
  return fork.tokens;
}

absl::Status Store::Truncate(const SequenceKey& key, std::int64_t tokens, std::uint64_t epoch) {
  // Another may cut it at the same time: then it's tried again on what that left.
  for (int round = 0; round < 3; ++round) {
    KVT_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> sequence, Find(key));
    const std::shared_ptr<Namespace> name_space = sequence->owner().name_space;
    bool copies = false;
    const auto cut = [&](Sequence& of) {
      return WithRoom(name_space, [&](std::int64_t& needed) {
        return of.Truncate(tokens, epoch, clock_.Now(), copies, needed);
      });
    };
    KVT_RETURN_IF_ERROR(cut(*sequence));
    if (!copies) return absl::OkStatus();
    KVT_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> successor,
                         WithRoom(name_space, [&](std::int64_t& needed) {
                           return sequence->Successor(clock_.Now(), needed);
                         }));
    KVT_RETURN_IF_ERROR(cut(*successor));
    KVT_ASSIGN_OR_RETURN(const bool replaced, Replace(sequence, successor, epoch));
    if (!replaced) continue;
    pins_.ForEach([&](Pin& pin) { pin.Follow(sequence, successor); });
    return absl::OkStatus();
  }
  return NotHeld(key);
}

absl::StatusOr<bool> Store::Replace(const std::shared_ptr<Sequence>& sequence,
                                    const std::shared_ptr<Sequence>& successor,
                                    std::uint64_t epoch) {
  Notices notices;
  MutexLock lock(&mutex_);
  const auto found = sequences_.find(sequence->key());
  if (found == sequences_.end() || found->second != sequence) return false;
  KVT_RETURN_IF_ERROR(sequence->Supersede(epoch, notices));
  found->second = successor;
  return true;
}

absl::Status Store::Seal(const SequenceKey& key, std::int64_t tokens) {
  KVT_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> sequence, Find(key));
  return sequence->Seal(tokens);
}

absl::Status Store::Abort(const SequenceKey& key) {
  KVT_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> sequence, Find(key));
  KVT_RETURN_IF_ERROR(sequence->DropOpen(
      Error(Reason::kSequenceGone, fmt::format("sequence \"{}\" was aborted", key.id))));
  Forget(sequence);
  return absl::OkStatus();
}

absl::Status Store::Remove(const SequenceKey& key) {
  KVT_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> sequence, Find(key));
  Forget(sequence);
  const bool held = sequence->Drop(
      Error(Reason::kSequenceGone, fmt::format("sequence \"{}\" was removed", key.id)));
  return held ? absl::OkStatus() : NotHeld(key);
}

absl::StatusOr<SequenceDescription> Store::Describe(const SequenceKey& key) const {
  KVT_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> sequence, Find(key));
  SequenceDescription description = sequence->Describe(true);
  if (description.state == SequenceState::kGone) return NotHeld(key);
  return description;
}

std::vector<SequenceDescription> Store::List(const SequenceKey& after, int limit) const {
  std::vector<std::shared_ptr<Sequence>> found;
  {
    MutexLock lock(&mutex_);
    for (auto it = order_.upper_bound(after);
         it != order_.end() && static_cast<int>(found.size()) < limit; ++it) {
      if (it->name_space != after.name_space) break;
      found.push_back(sequences_.at(*it));
    }
  }
  std::vector<SequenceDescription> descriptions;
  descriptions.reserve(found.size());
  for (const std::shared_ptr<Sequence>& sequence : found)
    descriptions.push_back(sequence->Describe(false));
  return descriptions;
}

int Store::ReclaimAbandoned() {
  const absl::Time now = clock_.Now();
  int reclaimed = 0;
  SequenceKey last;  // before all
  for (;;) {
    // A few at a time: nobody waits for a walk through all names.
    std::vector<std::shared_ptr<Sequence>> some;
    {
      MutexLock lock(&mutex_);
      for (auto it = order_.upper_bound(last); it != order_.end() && some.size() < 256; ++it)
        some.push_back(sequences_.at(*it));
    }
    if (some.empty()) return reclaimed;
    last = some.back()->key();
    for (const std::shared_ptr<Sequence>& sequence : some) {
      if (!sequence->DropIdle(now, options_.open_sequence_deadline)) continue;
      Forget(sequence);
      ++reclaimed;
    }
  }
}

absl::StatusOr<std::shared_ptr<Sequence>> Store::Find(const SequenceKey& key) const {
  MutexLock lock(&mutex_);
  const auto found = sequences_.find(key);
  if (found == sequences_.end()) return NotHeld(key);
  return found->second;
}

absl::StatusOr<std::shared_ptr<Sequence>> Store::FindOrOpen(
    const SequenceKey& key, const std::shared_ptr<ModelEntry>& model, const HashBlocksPtr& blocks) {
  if (auto held = Find(key); held.ok()) return held;
  Owner owner{model, namespaces_.Get(key.name_space)};
  SequenceStart start{.path = SharedPath(model->model(), owner.name_space->index, *blocks),
                      .blocks = blocks};
  return Name(
      std::make_shared<Sequence>(key, std::move(owner), Home(), clock_.Now(), std::move(start)));
}

absl::StatusOr<std::shared_ptr<Sequence>> Store::Name(std::shared_ptr<Sequence> sequence) {
  MutexLock lock(&mutex_);
  if (const auto held = sequences_.find(sequence->key()); held != sequences_.end())
    return held->second;
  if (static_cast<std::int64_t>(sequences_.size()) >= options_.max_sequences) {
    return Error(Reason::kTooManySequences,
                 fmt::format("{} sequences are held; the limit (max_sequences) is {}",
                             sequences_.size(), options_.max_sequences));
  }
  sequences_.emplace(sequence->key(), sequence);
  order_.insert(sequence->key());
  return sequence;
}

Path Store::SharedPath(const Model& model, const PrefixIndex& index, const HashBlocks& blocks) {
  const PrefixIndex::Found found = index.FindColumn(blocks.keys);
  Path path(found.column);
  path.CutTo(found.blocks * model.request.spec.hash_block_tokens / model.page_tokens);
  return path;
}

absl::Status Store::CheckModel(const Sequence& sequence, const std::string& model_id) const {
  const Model& own = sequence.model().model();
  if (own.id == model_id) return absl::OkStatus();
  KVT_ASSIGN_OR_RETURN(const std::shared_ptr<ModelEntry> asked, models_.Find(model_id));
  return Error(
      Reason::kModelMismatch,
      fmt::format("model_id is \"{}\"; sequence \"{}\" is of \"{}\": they differ in {}", model_id,
                  sequence.key().id, own.id, FirstDifference(own.request, asked->model().request)));
}

void Store::Forget(const std::shared_ptr<Sequence>& sequence) {
  MutexLock lock(&mutex_);
  const auto found = sequences_.find(sequence->key());
  if (found == sequences_.end() || found->second != sequence) return;
  sequences_.erase(found);
  order_.erase(sequence->key());
}

}  // namespace kvtier::cachestore
