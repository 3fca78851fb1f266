#include "cachestore/arena.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "cachestore/model/part_layout.h"
#include "tests/cachestore/test_store.h"
#include "tests/support/seed.h"

namespace kvtier::cachestore {
namespace {

using kvtier::testing::SeededRandom;
using testing::SumOf;

// An arena over memory of its own.
class ArenaTest : public ::testing::Test {
 protected:
  Arena& Make(std::int64_t bytes) {
    slab_.assign(static_cast<std::size_t>(bytes + kAlignment), std::byte{0});
    void* aligned = slab_.data();
    std::size_t space = slab_.size();
    begin_ = static_cast<std::byte*>(
        std::align(kAlignment, static_cast<std::size_t>(bytes), aligned, space));
    arena_ = std::make_unique<Arena>(begin_, bytes);
    return *arena_;
  }
  const std::byte* begin() const { return begin_; }

 private:
  std::vector<std::byte> slab_;
  std::byte* begin_ = nullptr;
  std::unique_ptr<Arena> arena_;
};

TEST_F(ArenaTest, RoundsUpToTheAlignment) {
  Arena& arena = Make(1024);
  const Allocation one = arena.Allocate(1);
  const Allocation more = arena.Allocate(65);
  EXPECT_EQ(one.size(), 64);
  EXPECT_EQ(more.size(), 128);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(more.data()) % kAlignment, 0u);
  EXPECT_EQ(arena.Snapshot().free, 1024 - 192);
  EXPECT_EQ(arena.Snapshot().slack, 192);
}

TEST_F(ArenaTest, RefusesWhatNoPieceHolds) {
  Arena& arena = Make(1024);
  EXPECT_FALSE(arena.Allocate(1025));
  const Allocation half = arena.Allocate(512);
  EXPECT_FALSE(arena.Allocate(576));
  EXPECT_TRUE(arena.Allocate(512));  // and goes at once
  EXPECT_EQ(arena.Snapshot().free, 512);
}

TEST_F(ArenaTest, ABudgetThatIsNoMultipleOfTheAlignmentStillSumsUp) {
  Arena& arena = Make(1000);
  EXPECT_FALSE(arena.Allocate(961));
  const Allocation most = arena.Allocate(960);
  ASSERT_TRUE(most);
  EXPECT_EQ(arena.Snapshot().free, 40);
  EXPECT_EQ(SumOf(arena.Snapshot()), 1000);
}

TEST_F(ArenaTest, TakesTheSmallestPieceThatFits) {
  Arena& arena = Make(4096);
  std::vector<Allocation> all;
  for (const std::int64_t size : {512, 64, 128, 64, 256, 64}) all.push_back(arena.Allocate(size));
  const std::byte* const middle = all[2].data();
  all[0] = Allocation();
  all[2] = Allocation();
  all[4] = Allocation();
  EXPECT_EQ(arena.Allocate(100).data(), middle);
}

TEST_F(ArenaTest, AMovedAllocationIsGivenBackOnce) {
  Arena& arena = Make(1024);
  {
    Allocation a = arena.Allocate(64);
    a.Hold({.codes = 10});
    Allocation b = std::move(a);
    EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): it is empty then
    a = std::move(b);
    EXPECT_EQ(arena.Snapshot().use.codes, 10);
    EXPECT_EQ(arena.Snapshot().slack, 54);
  }
  EXPECT_EQ(arena.Snapshot().free, 1024);
  EXPECT_EQ(arena.Snapshot().use, MemoryUse{});
}

using ArenaDeathTest = ArenaTest;

TEST_F(ArenaDeathTest, HoldingMoreThanItsSizeIsABrokenInvariant) {
  Allocation a = Make(1024).Allocate(64);
  a.Hold({.codes = 60});
  EXPECT_DEATH(a.Hold({.scales = 5}), "broken invariant");
  EXPECT_DEATH(a.Hold({.codes = -61}), "broken invariant");
}

// The arena beside a model of it: which 64-byte units are taken, and by whom.
class ArenaModel {
 public:
  ArenaModel(Arena& arena, const std::byte* begin)
      : arena_(arena),
        begin_(begin),
        taken_(static_cast<std::size_t>(arena.budget() / kAlignment), false) {}

  void Allocate(std::int64_t bytes) {
    const std::int64_t units = AlignUp(bytes) / kAlignment;
    Allocation memory = arena_.Allocate(bytes);
    ASSERT_EQ(static_cast<bool>(memory), LongestFree() >= units) << bytes << " bytes";
    if (!memory) return;
    ASSERT_EQ(memory.size(), units * kAlignment);
    const std::int64_t first = (memory.data() - begin_) / kAlignment;
    ASSERT_EQ(first * kAlignment, memory.data() - begin_);
    Mark({first, units}, true);
    held_.push_back({std::move(memory), {first, units}, {}});
  }

  void Free(std::size_t index) {
    std::swap(held_[index], held_.back());
    Mark(held_.back().units, false);
    held_.pop_back();
  }

  void Hold(std::size_t index, SeededRandom& random) {
    Held& held = held_[index];
    const std::int64_t room = held.memory.size() - held.use.total();
    MemoryUse delta{.codes = random.Between(0, room)};
    if (random.OneIn(2)) delta = {.residual = -random.Between(0, held.use.residual)};
    if (random.OneIn(3)) delta = {.residual = random.Between(0, room)};
    held.memory.Hold(delta);
    held.use += delta;
  }

  void ExpectSums() const {
    MemoryUse use;
    std::int64_t allocated = 0;
    for (const Held& held : held_) {
      use += held.use;
      allocated += held.memory.size();
    }
    const MemoryParts parts = arena_.Snapshot();
    ASSERT_EQ(parts.use, use);
    ASSERT_EQ(parts.slack, allocated - use.total());
    ASSERT_EQ(parts.free, arena_.budget() - allocated);
    ASSERT_EQ(SumOf(parts), arena_.budget());
  }

  std::size_t size() const { return held_.size(); }

 private:
  struct Run {
    std::int64_t first = 0;
    std::int64_t count = 0;
  };
  struct Held {
    Allocation memory;
    Run units;
    MemoryUse use;
  };

  void Mark(Run run, bool taken) {
    for (std::int64_t i = run.first; i < run.first + run.count; ++i) {
      const auto unit = static_cast<std::size_t>(i);
      ASSERT_NE(taken_[unit], taken) << "unit " << i << " is handed out twice";
      taken_[unit] = taken;
    }
  }
  std::int64_t LongestFree() const {
    std::int64_t longest = 0, run = 0;
    for (const bool taken : taken_) {
      run = taken ? 0 : run + 1;
      longest = std::max(longest, run);
    }
    return longest;
  }

  Arena& arena_;
  const std::byte* const begin_;
  std::vector<bool> taken_;
  std::vector<Held> held_;
};

TEST_F(ArenaTest, MatchesItsModelAndMergesBackIntoOnePiece) {
  constexpr std::int64_t kBytes = 64 * 400;
  SeededRandom random;
  for (int run = 0; run < 20; ++run) {
    Arena& arena = Make(kBytes);
    ArenaModel model(arena, begin());
    // Each run has its own mix, so that some fill the arena and some drain it.
    const int allocate_percent = static_cast<int>(random.Between(20, 90));
    const std::int64_t largest = random.Pick<std::int64_t>({64, 700, 6000});
    for (int step = 0; step < 300; ++step) {
      if (random.Between(1, 100) <= allocate_percent) {
        ASSERT_NO_FATAL_FAILURE(model.Allocate(random.Between(1, largest)));
      } else if (model.size() > 0) {
        const auto index = static_cast<std::size_t>(
            random.Between(0, static_cast<std::int64_t>(model.size()) - 1));
        random.OneIn(2) ? model.Free(index) : model.Hold(index, random);
      }
      ASSERT_NO_FATAL_FAILURE(model.ExpectSums());
    }
    while (model.size() > 0) {
      model.Free(
          static_cast<std::size_t>(random.Between(0, static_cast<std::int64_t>(model.size()) - 1)));
    }
    EXPECT_EQ(arena.Snapshot().free, kBytes);
    EXPECT_TRUE(arena.Allocate(kBytes)) << "free neighbours were not merged";
  }
}

}  // namespace
}  // namespace kvtier::cachestore
