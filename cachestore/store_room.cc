// How a store makes room: what it evicts, when, and for whom.

#include <algorithm>

#include "cachestore/base/status_macros.h"
#include "cachestore/store.h"

namespace kvtier::cachestore {

void Store::Lose(const Evictor::Victim& victim, EvictionReason reason) {
  std::int64_t tokens = 0;
  for (const std::shared_ptr<Sequence>& sequence : victim) {
    const Sequence::Loss loss = sequence->LoseEvicted();
    tokens = std::max(tokens, loss.tokens);  // the same ones
    if (loss.gone) Forget(sequence);
  }
  if (tokens > 0) evictions_.Add(reason, tokens);
}

bool Store::EvictOne(Namespace* of, EvictionReason reason) {
  const auto victim = evictor_.Evict(of == nullptr ? nullptr : &of->candidates);
  if (victim.has_value()) Lose(*victim, reason);
  return victim.has_value();
}

std::int64_t Store::Left(const Namespace* name_space) const {
  if (name_space == nullptr) return memory().free;
  return name_space->memory->quota() - name_space->memory->held().allocated;
}

bool Store::MakeRoom(Namespace* name_space, std::int64_t bytes) {
  const auto reason = name_space != nullptr ? EvictionReason::kQuota : EvictionReason::kMemory;
  const auto enough = [&] { return bytes <= Left(name_space); };
  bool better = false;
  while (!enough() && FreeSome(name_space, reason, enough)) better = true;
  return enough() || better || DropHeadroom();
}

bool Store::FreeSome(Namespace* of, EvictionReason reason, absl::FunctionRef<bool()> enough) {
  if (LowerOne(of)) return true;
  MutexLock lock(&room_mutex_);
  return enough() || EvictOne(of, reason);  // perhaps somebody else made room meanwhile
}

void Store::EvictToWatermark() {
  const auto percent = [&](int of) { return budget() / 100 * of + budget() % 100 * of / 100; };
  if (Held() <= percent(options_.evict_above)) return;
  const auto enough = [&] { return Held() <= percent(options_.evict_until); };
  while (!enough() && FreeSome(nullptr, EvictionReason::kMemory, enough)) {
  }
}

int Store::Sweep() {
  const int leases = leases_.Sweep();
  pins_.Sweep();
  if (options_.idle_ttl < absl::InfiniteDuration()) {
    MutexLock lock(&room_mutex_);
    while (const auto victim = evictor_.EvictUnused(clock_.Now() - options_.idle_ttl))
      Lose(*victim, EvictionReason::kIdle);
  }
  EvictToWatermark();
  subscribers_.Sweep();
  namespaces_.Sweep();
  return leases;
}

absl::StatusOr<QuotaStanding> Store::SetQuota(const std::string& name_space, std::int64_t bytes) {
  KVT_ASSIGN_OR_RETURN(const std::shared_ptr<Namespace> changed,
                       namespaces_.SetQuota(name_space, bytes));
  const auto standing = [&] {
    return QuotaStanding{changed->memory->quota(), changed->memory->held().allocated};
  };
  const auto enough = [&] { return standing().held <= standing().quota; };
  while (!enough() && FreeSome(changed.get(), EvictionReason::kQuota, enough)) {
  }
  return standing();
}

Pressure Store::GetPressure(const std::string& name_space) {
  const std::shared_ptr<Namespace> asked = namespaces_.Get(name_space);
  return evictor_.lowers(asked->candidates) ? Pressure::kLadder : Pressure::kEvict;
}

QuotaStanding Store::GetQuota(const std::string& name_space) {
  const std::shared_ptr<Namespace> asked = namespaces_.Get(name_space);
  return {asked->memory->quota(), asked->memory->held().allocated};
}

}  // namespace kvtier::cachestore
