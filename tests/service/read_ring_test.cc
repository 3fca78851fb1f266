// A ring never hands out room that the reader has not given back, and always has some once all is.
#include "service/rpc/read_ring.h"

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/seed.h"

namespace kvtier::service {
namespace {

struct Ring {
  explicit Ring(std::int64_t size)
      : memory(static_cast<std::size_t>(size)),
        credit(std::make_shared<RingCredit>([this] { ++told; })),
        ring(memory.data(), size, credit) {}
  std::vector<std::byte> memory;
  int told = 0;
  std::shared_ptr<RingCredit> credit;
  ReadRing ring;
};

TEST(ReadRing, WhatIsThereIsNotWrittenOver) {
  testing::SeededRandom random;
  for (int episode = 0; episode < 200; ++episode) {
    const std::int64_t size = random.Between(1000, 100'000);
    Ring r(size);
    std::deque<std::pair<std::int64_t, std::int64_t>> there;  // begins and ends
    std::uint64_t done = 0;
    for (int step = 0; step < 300; ++step) {
      if (random.OneIn(3) && !there.empty()) {
        there.pop_front();
        r.credit->Grant(++done);
        continue;
      }
      const std::int64_t bytes = random.Between(1, random.OneIn(5) ? size : size / 4);
      const std::byte* const at = r.ring.Take(bytes);
      if (at == nullptr) {
        ASSERT_FALSE(there.empty()) << bytes << " of " << size;
        continue;
      }
      const std::int64_t begin = at - r.memory.data();
      ASSERT_LE(begin + bytes, size);
      for (const auto& [from, to] : there)
        ASSERT_TRUE(begin + bytes <= from || to <= begin) << "over what the reader has";
      there.emplace_back(begin, begin + bytes);
    }
  }
}

TEST(ReadRing, AQuarterEachTimeGoesAround) {
  Ring r(4096);
  for (std::uint64_t chunk = 0; chunk < 100; ++chunk) {
    if (chunk >= 4) r.credit->Grant(chunk - 3);
    EXPECT_EQ(r.ring.Take(1024), r.memory.data() + chunk % 4 * 1024);
    EXPECT_EQ(chunk >= 3 ? r.ring.Take(1) : nullptr, nullptr);
  }
}

TEST(ReadRing, CreditOnlyGrowsAndTellsOncePerGrowth) {
  Ring r(4096);
  r.credit->Grant(3);
  r.credit->Grant(2);
  r.credit->Grant(3);
  EXPECT_EQ(r.credit->chunks(), 3u);
  EXPECT_EQ(r.told, 1);
}

}  // namespace
}  // namespace kvtier::service
