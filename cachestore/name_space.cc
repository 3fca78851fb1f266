#include "cachestore/name_space.h"

#include <fmt/format.h>

#include "cachestore/base/errors.h"
#include "cachestore/base/status_macros.h"

namespace kvtier::cachestore {

NamespaceTable::Entry& NamespaceTable::GetLocked(const std::string& name) {
  Entry& entry = entries_[name];
  if (entry.name_space == nullptr) {
    entry.name_space = std::make_shared<Namespace>(policy_);
    entry.name_space->memory->SetQuota(default_quota_);
  }
  return entry;
}

std::shared_ptr<Namespace> NamespaceTable::Get(const std::string& name) {
  MutexLock lock(&mutex_);
  return GetLocked(name).name_space;
}

absl::StatusOr<std::shared_ptr<Namespace>> NamespaceTable::SetQuota(const std::string& name,
                                                                    std::int64_t bytes) {
  MutexLock lock(&mutex_);
  Entry& entry = GetLocked(name);
  KVT_RETURN_IF_ERROR(Set(entry, &Entry::has_quota, bytes > 0));
  entry.name_space->memory->SetQuota(entry.has_quota ? bytes : default_quota_);
  return entry.name_space;
}

absl::Status NamespaceTable::SetPressure(const std::string& name, Pressure pressure,
                                         absl::FunctionRef<void(Namespace&)> apply) {
  MutexLock lock(&mutex_);
  Entry& entry = GetLocked(name);
  const bool had = entry.has_ladder, has = pressure == Pressure::kLadder;
  KVT_RETURN_IF_ERROR(Set(entry, &Entry::has_ladder, has));
  ladders_ += (has ? 1 : 0) - (had ? 1 : 0);
  apply(*entry.name_space);
  return absl::OkStatus();
}

std::int64_t NamespaceTable::ladders() const {
  MutexLock lock(&mutex_);
  return ladders_;
}

absl::Status NamespaceTable::Set(Entry& entry, bool Entry::*setting, bool value) {
  const bool had = entry.has_settings();
  if (value && !had && with_settings_ >= kMaxQuotas) {
    return Error(
        Reason::kTooManyQuotas,
        fmt::format("{0} namespaces have a quota or a ladder of their own; the limit is {0}",
                    with_settings_));
  }
  entry.*setting = value;
  with_settings_ += (entry.has_settings() ? 1 : 0) - (had ? 1 : 0);
  return absl::OkStatus();
}

void NamespaceTable::Sweep() {
  MutexLock lock(&mutex_);
  // Nobody can come by one that only the table has, but through this lock.
  std::erase_if(entries_, [](const auto& entry) {
    const auto& name_space = entry.second.name_space;
    return !entry.second.has_settings() && name_space.use_count() == 1 &&
           name_space->memory.use_count() == 1;
  });
}

}  // namespace kvtier::cachestore
