#include "cachestore/kept_windows.h"

#include <algorithm>

#include "cachestore/base/check.h"

namespace kvtier::cachestore {

bool KeptWindows::Reach(const Path& path, std::int64_t tokens) {
  if (tokens == 0) return true;
  std::vector<std::int64_t> reached = begin_;
  bool sees = true;
  for (std::size_t i = 0; sees && i < begin_.size(); ++i) {
    const Window& window = model_.windows[i];
    const std::int64_t first = window.FirstKeptPage(tokens, path.pages(), model_.page_tokens);
    while (reached[i] > first && path[reached[i] - 1].KeepWindow(i)) --reached[i];
    sees = reached[i] <= window.FirstSeenPage(tokens, model_.page_tokens);
  }
  if (sees) {
    begin_.swap(reached);
    Tell();
    return true;
  }
  for (std::size_t i = 0; i < begin_.size(); ++i)
    for (std::int64_t page = reached[i]; page < begin_[i]; ++page) path[page].LeaveWindow(i);
  return false;
}

void KeptWindows::Want(std::int64_t tokens) {
  if (!none() && tokens > 0) wants_.insert(tokens);
}

void KeptWindows::Unwant(std::int64_t tokens) {
  if (none() || tokens == 0) return;
  const auto want = wants_.find(tokens);
  KVT_CHECK(want != wants_.end());
  wants_.erase(want);
}

void KeptWindows::MoveOn(const Path& path, std::int64_t tokens) {
  if (!wants_.empty()) tokens = std::min(tokens, *wants_.begin());
  for (std::size_t i = 0; i < begin_.size(); ++i) {
    const std::int64_t first =
        model_.windows[i].FirstKeptPage(tokens, path.pages(), model_.page_tokens);
    for (; begin_[i] < first; ++begin_[i]) path[begin_[i]].LeaveWindow(i);
  }
  Tell();
}

void KeptWindows::CutTo(const Path& path, std::int64_t pages) {
  for (std::size_t i = 0; i < begin_.size(); ++i) {
    for (std::int64_t page = std::max(begin_[i], pages); page < path.pages(); ++page)
      path[page].LeaveWindow(i);
    begin_[i] = std::min(begin_[i], pages);
  }
  Tell();
}

void KeptWindows::Tell() {
  std::int64_t least = 0;
  for (std::size_t i = 0; i < begin_.size(); ++i) {
    if (begin_[i] == 0) continue;
    least = std::max(least, begin_[i] * model_.page_tokens + model_.windows[i].tokens);
  }
  least_hit_.store(least, std::memory_order_relaxed);
}

}  // namespace kvtier::cachestore
