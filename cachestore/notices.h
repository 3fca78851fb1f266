#pragma once

#include <functional>
#include <utility>
#include <vector>

namespace kvtier::cachestore {

// What others are told once the lock is let go under which it came about: it is declared before the
// lock is taken, and calls when it goes.
class Notices {
 public:
  Notices() = default;
  Notices(const Notices&) = delete;
  Notices& operator=(const Notices&) = delete;
  ~Notices() {
    for (const std::function<void()>& call : calls_) call();
  }

  void Add(std::function<void()> call) { calls_.push_back(std::move(call)); }

 private:
  std::vector<std::function<void()>> calls_;
};

}  // namespace kvtier::cachestore
