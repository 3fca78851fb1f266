#pragma once

#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

namespace kvtier::testing {

// Numbers that follow from a seed. Not thread-safe.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  Random(const Random&) = delete;
  Random& operator=(const Random&) = delete;

  // Both ends may come.
  std::int64_t Between(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }
  bool OneIn(int n) { return Between(1, n) == 1; }
  template <class T>
  const T& Pick(const std::vector<T>& choices) {
    return choices[static_cast<std::size_t>(
        Between(0, static_cast<std::int64_t>(choices.size()) - 1))];
  }
  std::mt19937_64& engine() { return engine_; }

 private:
  std::mt19937_64 engine_;
};

// The randomness of one test: of KVTIER_SEED where that is set, else of a fresh seed. A failure
// while it lives prints the line that replays it, if it's the thread's that made it.
class SeededRandom : public Random {
 public:
  SeededRandom() : SeededRandom(Choose()) {}

 private:
  explicit SeededRandom(std::uint64_t seed)
      : Random(seed), trace_(__FILE__, __LINE__, "replay with: " + ReplayLine(seed)) {}

  static std::uint64_t Choose() {
    // NOLINTNEXTLINE(concurrency-mt-unsafe): nothing here sets the environment
    if (const char* given = std::getenv("KVTIER_SEED")) return std::strtoull(given, nullptr, 10);
    return std::random_device()();
  }
  static std::string ReplayLine(std::uint64_t seed) {
    std::string line =
        "KVTIER_SEED=" + std::to_string(seed) + " " + std::string(program_invocation_name);
    if (const auto* test = ::testing::UnitTest::GetInstance()->current_test_info()) {
      line += " --gtest_filter='" + std::string(test->test_suite_name()) + "." + test->name() + "'";
    }
    return line;
  }

  ::testing::ScopedTrace trace_;
};

}  // namespace kvtier::testing
