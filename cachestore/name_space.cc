#include "cachestore/name_space.h"

#include <fmt/format.h>

#include "cachestore/base/errors.h"

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
  if (bytes > 0 && !entry.has_quota && quotas_ >= kMaxQuotas) {
    return Error(
        Reason::kTooManyQuotas,
        fmt::format("{0} namespaces have a quota of their own; the limit is {0}", quotas_));
  }
  quotas_ += (bytes > 0 ? 1 : 0) - (entry.has_quota ? 1 : 0);
  entry.has_quota = bytes > 0;
  entry.name_space->memory->SetQuota(entry.has_quota ? bytes : default_quota_);
  return entry.name_space;
}

void NamespaceTable::Sweep() {
  MutexLock lock(&mutex_);
  // Nobody can come by one that only the table has, but through this lock.
  std::erase_if(entries_, [](const auto& entry) {
    const auto& [name_space, has_quota] = entry.second;
    return !has_quota && name_space.use_count() == 1 && name_space->memory.use_count() == 1;
  });
}

}  // namespace kvtier::cachestore
