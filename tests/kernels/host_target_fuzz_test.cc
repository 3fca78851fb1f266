// tests/fuzz/host_target_fuzz.cc on random input, under every compiler.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <vector>

#include "tests/support/seed.h"

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer's name for it
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace kvtier::kernels {
namespace {

TEST(HostTargetFuzz, RandomInputGivesTheSameBytesOnEveryTarget) {
  testing::SeededRandom random;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  int inputs = 0;
  do {
    std::vector<std::uint8_t> input(static_cast<std::size_t>(random.Between(16, 4096)));
    for (std::uint8_t& byte : input) byte = static_cast<std::uint8_t>(random.engine()());
    ASSERT_EQ(LLVMFuzzerTestOneInput(input.data(), input.size()), 0);
    ++inputs;
  } while (inputs < 20 || std::chrono::steady_clock::now() < end);
}

}  // namespace
}  // namespace kvtier::kernels
