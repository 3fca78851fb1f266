// What a store promises to clients: leases and pins, and reads under a lease.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"
#include "cachestore/store.h"

namespace kvtier::cachestore {
namespace {

// How long a grant may be, and what an error calls that.
struct DurationBound {
  absl::Duration by_default;
  absl::Duration most;
  const char* name;
};

absl::StatusOr<absl::Duration> ResolveDuration(absl::Duration asked, const DurationBound& bound) {
  if (asked == absl::ZeroDuration()) return std::min(bound.by_default, bound.most);
  if (asked > absl::ZeroDuration() && asked <= bound.most) return asked;
  return Error(
      Reason::kInvalidField,
      fmt::format("duration_ms is {}; want at most {} ({}), or 0 for {}",
                  absl::ToInt64Milliseconds(asked), absl::ToInt64Milliseconds(bound.most),
                  bound.name, absl::ToInt64Milliseconds(std::min(bound.by_default, bound.most))));
}

absl::StatusOr<absl::Duration> LeaseDuration(absl::Duration asked, const StoreOptions& options) {
  return ResolveDuration(asked, {kDefaultLease, options.max_lease, "max_lease"});
}

absl::StatusOr<absl::Duration> PinDuration(absl::Duration asked, const StoreOptions& options) {
  return ResolveDuration(asked, {kDefaultPin, options.max_pin, "max_pin"});
}

absl::Status NoSuchLease(std::uint64_t id) {
  return Error(
      Reason::kLeaseEnded,
      fmt::format("lease_id is {}; no such lease is held: it expired or was released", id));
}

}  // namespace

template <class F>
absl::StatusOr<Grant> Store::WithPrefix(const std::string& name_space, const std::string& model_id,
                                        const Prompt& prompt, F take) {
  KVT_ASSIGN_OR_RETURN(const std::shared_ptr<ModelEntry> model, models_.Find(model_id));
  const int block_tokens = model->model().request.spec.hash_block_tokens;
  KVT_RETURN_IF_ERROR(CheckPrompt(prompt, block_tokens));
  const std::vector<PrefixKey> all = PrefixKeysOf(name_space, model_id, block_tokens, prompt);
  const std::shared_ptr<Namespace> asked = namespaces_.Get(name_space);
  absl::Span<const PrefixKey> keys(all);
  while (!keys.empty()) {
    PrefixIndex::Found found = asked->index.Find(keys);
    if (found.blocks == 0) break;
    std::shared_ptr<Sequence> sequence = std::move(found.sequence);
    if (sequence == nullptr) {
      sequence = Sequence::ForReader({name_space, "(a prefix)"}, {model, asked}, Home(),
                                     clock_.Now(), Path(std::move(found.column)));
    }
    auto grant = take(std::move(sequence), found.blocks * block_tokens);
    if (grant.ok() || grant.status().code() != absl::StatusCode::kNotFound) return grant;
    // It went meanwhile: perhaps somebody has less.
    keys = keys.first(static_cast<std::size_t>(found.blocks - 1));
  }
  return Grant();
}

absl::StatusOr<Grant> Store::GrantLease(std::shared_ptr<Sequence> sequence, std::int64_t tokens,
                                        absl::Duration duration) {
  KVT_ASSIGN_OR_RETURN(tokens, sequence->Hold(tokens));
  const std::string name_space = sequence->key().name_space;
  const auto lease =
      std::make_shared<Lease>(std::move(sequence), tokens, clock_.Now() + duration, clock_);
  KVT_ASSIGN_OR_RETURN(const std::uint64_t id, leases_.Add(name_space, lease));
  return Grant{id, tokens, duration};
}

absl::StatusOr<Grant> Store::Acquire(const std::string& name_space, const std::string& model_id,
                                     const Prompt& prompt, absl::Duration duration) {
  KVT_ASSIGN_OR_RETURN(duration, LeaseDuration(duration, options_));
  return WithPrefix(name_space, model_id, prompt,
                    [&](std::shared_ptr<Sequence> sequence, std::int64_t tokens) {
                      return GrantLease(std::move(sequence), tokens, duration);
                    });
}

absl::StatusOr<Grant> Store::Acquire(const SequenceKey& key, absl::Duration duration) {
  KVT_ASSIGN_OR_RETURN(duration, LeaseDuration(duration, options_));
  KVT_ASSIGN_OR_RETURN(std::shared_ptr<Sequence> sequence, Find(key));
  return GrantLease(std::move(sequence), -1, duration);
}

absl::StatusOr<Grant> Store::Renew(const std::string& name_space, std::uint64_t id,
                                   absl::Duration duration) {
  KVT_ASSIGN_OR_RETURN(duration, LeaseDuration(duration, options_));
  const std::shared_ptr<Lease> lease = leases_.Find(name_space, id);
  if (lease == nullptr) return NoSuchLease(id);
  KVT_RETURN_IF_ERROR(lease->Renew(clock_.Now() + duration));
  return Grant{id, lease->tokens(), duration};
}

absl::StatusOr<Grant> Store::GrantPin(const std::shared_ptr<Sequence>& sequence,
                                      std::int64_t tokens, const std::shared_ptr<Sequence>& columns,
                                      const PinTerms& terms) {
  KVT_ASSIGN_OR_RETURN(tokens, sequence->AddPin(terms.kind, tokens));
  std::vector<Pin::Pinned> pinned = {{sequence, tokens}};
  if (columns != nullptr) {
    const auto of_columns = columns->AddPin(terms.kind, -1);
    if (of_columns.ok()) pinned.push_back({columns, *of_columns});
  }
  const auto pin =
      std::make_shared<Pin>(std::move(pinned), terms.kind, clock_.Now() + terms.duration);
  KVT_ASSIGN_OR_RETURN(const std::uint64_t id, pins_.Add(sequence->key().name_space, pin));
  // A successor may have taken its place before the pin could be found.
  if (const auto now = Find(sequence->key()); now.ok() && !sequence->for_reader())
    pin->Follow(sequence, *now);
  return Grant{id, tokens, terms.duration};
}

absl::StatusOr<Grant> Store::AddPin(const std::string& name_space, const std::string& model_id,
                                    const Prompt& prompt, PinTerms terms) {
  KVT_ASSIGN_OR_RETURN(terms.duration, PinDuration(terms.duration, options_));
  return WithPrefix(name_space, model_id, prompt,
                    [&](const std::shared_ptr<Sequence>& sequence, std::int64_t tokens) {
                      // The columns of a sequence that has a name stay when that is removed.
                      return GrantPin(sequence, tokens, sequence->Columns(clock_.Now()), terms);
                    });
}

absl::StatusOr<Grant> Store::AddPin(const SequenceKey& key, PinTerms terms) {
  KVT_ASSIGN_OR_RETURN(terms.duration, PinDuration(terms.duration, options_));
  KVT_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> sequence, Find(key));
  return GrantPin(sequence, -1, nullptr, terms);
}

absl::StatusOr<SequenceReader> Store::OpenReader(const SequenceKey& key,
                                                 const std::string& model_id,
                                                 const ReadRange& range, const ReadFormat& format) {
  KVT_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> sequence, Find(key));
  KVT_ASSIGN_OR_RETURN(const std::int64_t tokens, sequence->Hold(-1));
  return Read(std::make_shared<Lease>(sequence, tokens, clock_.Now() + options_.max_lease, clock_),
              model_id, range, format);
}

absl::StatusOr<SequenceReader> Store::OpenReader(const std::string& name_space,
                                                 std::uint64_t lease_id,
                                                 const std::string& model_id, ReadRange range,
                                                 const ReadFormat& format) {
  std::shared_ptr<const Lease> lease = leases_.Find(name_space, lease_id);
  if (lease == nullptr) return NoSuchLease(lease_id);
  range.limit = lease->tokens();
  return Read(std::move(lease), model_id, range, format);
}

absl::StatusOr<SequenceReader> Store::Read(std::shared_ptr<const Lease> lease,
                                           const std::string& model_id, ReadRange range,
                                           const ReadFormat& format) {
  KVT_RETURN_IF_ERROR(lease->Check());
  KVT_RETURN_IF_ERROR(Resolve(*lease->sequence(), model_id, range));
  return SequenceReader::Open(std::move(lease), range, format, device_);
}

absl::StatusOr<SequenceFollower> Store::Follow(const FollowRequest& request, ReadRange range,
                                               const ReadFormat& format) {
  KVT_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> sequence, Find(request.key));
  KVT_RETURN_IF_ERROR(Resolve(*sequence, request.model_id, range));
  // Of no tokens: a truncate of what it has not read leaves it alone.
  KVT_ASSIGN_OR_RETURN(const std::int64_t tokens, sequence->Hold(0));
  auto claim = std::make_shared<FollowClaim>();
  claim->on_news = request.on_news;
  return SequenceFollower::Make(
      std::make_shared<Lease>(sequence, tokens, clock_.Now() + options_.max_lease, clock_),
      std::move(claim), range, format, device_);
}

absl::Status Store::Resolve(const Sequence& sequence, const std::string& model_id,
                            ReadRange& range) const {
  if (!model_id.empty()) {
    KVT_RETURN_IF_ERROR(CheckModel(sequence, model_id));
  }
  KVT_ASSIGN_OR_RETURN(range.shard, ResolveShard(range.shard, sequence.model().model()));
  return absl::OkStatus();
}

}  // namespace kvtier::cachestore
