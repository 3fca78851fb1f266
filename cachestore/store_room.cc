// How a store makes room: what it evicts, when, and for whom.

#include <algorithm>

#include "cachestore/base/errors.h"
#include "cachestore/store.h"

namespace kvtier::cachestore {

void Store::Lose(const Evictor::Victim& victim, EvictionReason reason) {
  std::int64_t tokens = 0;
  for (const std::shared_ptr<Sequence>& sequence : victim.sequences) {
    const Sequence::Loss loss = sequence->LoseEvicted();
    tokens = std::max(tokens, loss.tokens);  // the same ones
    if (loss.gone) Forget(sequence);
  }
  if (tokens > 0) evictions_.Add(reason, tokens);
}

bool Store::MakeRoom(const std::string& lacks, Namespace& name_space, std::int64_t bytes) {
  const bool quota = lacks == ReasonName(Reason::kQuota);
  const auto enough = [&] {
    return bytes <= (quota ? name_space.memory->quota() - name_space.memory->held().allocated
                           : memory().free);
  };
  bool evicted = false;
  do {
    const auto victim = evictor_.Evict(quota ? &name_space.candidates : nullptr);
    if (!victim.has_value()) break;
    Lose(*victim, quota ? EvictionReason::kQuota : EvictionReason::kMemory);
    evicted = true;
  } while (!enough());
  return evicted;
}

void Store::EvictToWatermark() {
  const auto percent = [&](int of) { return budget() / 100 * of + budget() % 100 * of / 100; };
  if (Held() <= percent(options_.evict_above)) return;
  while (Held() > percent(options_.evict_until)) {
    const auto victim = evictor_.Evict();
    if (!victim.has_value()) return;
    Lose(*victim, EvictionReason::kMemory);
  }
}

int Store::Sweep() {
  const int leases = leases_.Sweep();
  pins_.Sweep();
  if (options_.idle_ttl < absl::InfiniteDuration()) {
    while (const auto victim = evictor_.EvictUnused(clock_.Now() - options_.idle_ttl))
      Lose(*victim, EvictionReason::kIdle);
  }
  EvictToWatermark();
  namespaces_.Sweep();
  return leases;
}

QuotaStanding Store::SetQuota(const std::string& name_space, std::int64_t bytes) {
  const std::shared_ptr<Namespace> changed = namespaces_.SetQuota(name_space, bytes);
  const auto standing = [&] {
    return QuotaStanding{changed->memory->quota(), changed->memory->held().allocated};
  };
  while (standing().held > standing().quota) {
    const auto victim = evictor_.Evict(&changed->candidates);
    if (!victim.has_value()) break;
    Lose(*victim, EvictionReason::kQuota);
  }
  return standing();
}

QuotaStanding Store::GetQuota(const std::string& name_space) {
  const std::shared_ptr<Namespace> asked = namespaces_.Get(name_space);
  return {asked->memory->quota(), asked->memory->held().allocated};
}

}  // namespace kvtier::cachestore
