// Pieces of shared memory never overlap, and come back.
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "client/shared_memory.h"
#include "gtest/gtest.h"
#include "tests/support/seed.h"

namespace kvtier::client {
namespace {

std::shared_ptr<SharedPool> PoolOf(std::int64_t bytes) {
  auto region = transport::ShmRegion::Make(bytes);
  EXPECT_TRUE(region.ok()) << region.status();
  return std::make_shared<SharedPool>(
      std::make_shared<const SharedMemory>(*std::move(region), transport::UniqueFd(), "id"));
}

TEST(SharedPool, PiecesDoNotOverlapAndComeBack) {
  testing::SeededRandom random;
  constexpr std::int64_t kBytes = 1 << 20;
  const auto pool = PoolOf(kBytes);
  std::vector<SharedPool::Piece> pieces;
  for (int step = 0; step < 2000; ++step) {
    if (!pieces.empty() && random.OneIn(2)) {
      std::swap(pieces[static_cast<std::size_t>(random.Between(0, std::ssize(pieces) - 1))],
                pieces.back());
      pieces.pop_back();
      continue;
    }
    auto piece = pool->Take(random.Between(1, kBytes / 4));
    if (!piece.has_value()) continue;
    for (const SharedPool::Piece& other : pieces) {
      EXPECT_TRUE(piece->data() + piece->bytes() <= other.data() ||
                  other.data() + other.bytes() <= piece->data());
    }
    pieces.push_back(*std::move(piece));
  }
  pieces.clear();
  EXPECT_TRUE(pool->Take(kBytes).has_value());
}

TEST(SharedPool, TooMuchIsNotThere) {
  const auto pool = PoolOf(4096);
  EXPECT_FALSE(pool->Take(4097).has_value());
  EXPECT_FALSE(pool->Take(0).has_value());
  const auto all = pool->Take(4096);
  EXPECT_TRUE(all.has_value());
  EXPECT_FALSE(pool->Take(1).has_value());
}

TEST(SharedPool, WhatIsAbandonedStaysAway) {
  const auto pool = PoolOf(4096);
  SharedPool::Piece::Abandon(*pool->Take(1024));
  EXPECT_TRUE(pool->spoiled());
  EXPECT_FALSE(pool->Take(4096).has_value());
  EXPECT_TRUE(pool->Take(3072).has_value());
}

TEST(ShmRegion, WhatIsOutsideIsNotAt) {
  const auto region = transport::ShmRegion::Make(4096).value();
  EXPECT_EQ(region->At(0, 4096), region->data());
  EXPECT_EQ(region->At(4096, 0), region->data() + 4096);
  EXPECT_EQ(region->At(4096, 1), nullptr);
  EXPECT_EQ(region->At(1, 4096), nullptr);
  EXPECT_EQ(region->At(~0ull, 2), nullptr);
  EXPECT_EQ(region->At(2, ~0ull), nullptr);
}

}  // namespace
}  // namespace kvtier::client
