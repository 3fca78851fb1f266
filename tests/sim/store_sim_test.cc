// The store under random work of many kinds, beside a model that knows what it must answer. Each
// episode follows from a seed; a failure prints the line that plays it again.

#include "tests/sim/store_sim.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>

#include "tests/support/seed.h"

namespace kvtier::sim {
namespace {

using testing::SeededRandom;

constexpr std::int64_t kEpisode = 2000;  // operations
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::int64_t kOperations = 300'000;
#else
constexpr std::int64_t kOperations = 1'000'000;
#endif

std::int64_t Number(const char* variable, std::int64_t otherwise) {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nothing here sets the environment
  const char* given = std::getenv(variable);
  return given == nullptr ? otherwise : std::strtoll(given, nullptr, 10);
}

// KVTIER_SIM_OPERATIONS in all, in episodes; KVTIER_SIM_EPISODE plays the one of that seed.
TEST(StoreSim, AnswersAsTheModelDoes) {
  SeededRandom seeds;
  const std::int64_t one = Number("KVTIER_SIM_EPISODE", -1);
  const std::int64_t operations =
      one >= 0 ? kEpisode : Number("KVTIER_SIM_OPERATIONS", kOperations);
  StoreSim::Tally tally;
  auto said = std::chrono::steady_clock::now();
  while (tally.operations < operations) {
    const std::int64_t seed = one >= 0 ? one : seeds.Between(0, std::int64_t{1} << 40);
    StoreSim sim({.seed = static_cast<std::uint64_t>(seed), .operations = kEpisode});
    const auto wrong = sim.Run();
    ASSERT_FALSE(wrong.has_value())
        << *wrong << "\nthat episode alone: KVTIER_SIM_EPISODE=" << seed
        << " build/dev/bin/sim_tests --gtest_filter=StoreSim.AnswersAsTheModelDoes";
    tally += sim.tally();
    if (const auto now = std::chrono::steady_clock::now(); now - said > std::chrono::seconds(20)) {
      said = now;
      fmt::print("{} of {} operations\n", tally.operations, operations);
    }
  }
  fmt::print("{}\n", tally.Text());
  if (one >= 0) return;
  // It tried what it is for.
  for (const std::int64_t count :
       {tally.rows_compared, tally.rows_followed, tally.tokens_shared, tally.evictions,
        tally.refused_for_room, tally.reads_ended, tally.device_failures, tally.truncated,
        tally.events_checked, tally.lowered, tally.windows_moved})
    EXPECT_GT(count, 0) << tally.Text();
}

// The same work on a device with a bug. One that the simulation did not find would say that it
// finds nothing.
TEST(StoreSim, FindsAPlantedBug) {
  SeededRandom seeds;
  for (int episode = 0; episode < 100; ++episode) {
    StoreSim sim({.seed = seeds.engine()(), .operations = kEpisode, .forgets_one_copy_of = 3});
    if (sim.Run().has_value()) return;
  }
  FAIL() << "100 episodes saw nothing of copies that copy nothing";
}

}  // namespace
}  // namespace kvtier::sim
