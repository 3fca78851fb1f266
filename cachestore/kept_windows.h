#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "cachestore/column.h"

namespace kvtier::cachestore {

// What a sequence keeps of its columns in the layers of Model::windows: of each window the pages
// from one on. Its sequence's lock guards it, but for Hits. A column that is added to the path is
// kept by its maker already; before the path is cut, CutTo. Where the model has no windows nothing
// of it costs anything.
class KeptWindows {
 public:
  // Keeps nothing of `path` yet. `model` must outlive it.
  KeptWindows(const Model& model, const Path& path)
      : model_(model), begin_(model.windows.size(), path.pages()) {
    Tell();
  }

  // Keeps from now on, beside what it keeps, all that the windows see of the first `tokens` tokens,
  // and before that as far as Window says and it is still here. False, and nothing has changed,
  // where something that they see is gone.
  bool Reach(const Path& path, std::int64_t tokens);

  // What Reach kept for a hit at `tokens` MoveOn leaves alone, until Unwant of as many.
  void Want(std::int64_t tokens);
  void Unwant(std::int64_t tokens);

  // Lets go of what is behind the windows of a sequence of `tokens` tokens, and of those wanted.
  void MoveOn(const Path& path, std::int64_t tokens);

  // The path will be cut.
  void CutTo(const Path& path, std::int64_t pages);

  // Whether it keeps all that the windows see of `tokens` tokens, which are no fewer than those of
  // the path's columns. By any thread.
  bool Hits(std::int64_t tokens) const { return tokens == 0 || tokens >= least_hit(); }
  // The fewest but 0 for which it does.
  std::int64_t least_hit() const { return least_hit_.load(std::memory_order_relaxed); }
  // From where on it keeps a window.
  std::int64_t FirstToken(std::size_t window) const { return begin_[window] * model_.page_tokens; }

 private:
  bool none() const { return begin_.empty(); }
  void Tell();

  const Model& model_;
  std::vector<std::int64_t> begin_;  // of each window, a page
  std::multiset<std::int64_t> wants_;
  std::atomic<std::int64_t> least_hit_ = 0;
};

}  // namespace kvtier::cachestore
